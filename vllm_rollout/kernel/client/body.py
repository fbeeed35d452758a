"""The body of `POST /v1/rollouts`, built from a client's arguments.

Invariant: meanings and defaults of options are defined by the server's body, and nowhere else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, cleandoc, signature
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from pydantic import BaseModel
from typing_extensions import Unpack

from vllm_rollout.kernel.http.body import remedy_for
from vllm_rollout.kernel.http.protocol import Prompt, RolloutFields, RolloutRequest

Method = TypeVar("Method", bound=Callable[..., Any])

PromptLike = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any] | Prompt
"""Text, token ids, chat messages, or a whole prompt (`{"id": …, "messages": …}`)."""

Redundancy = int | str | Mapping[str, Any]
"""Spare candidates per prompt, `"auto"`, or `{"auto": {"tradeoff": 2.0}}`."""


if TYPE_CHECKING:
    from vllm_rollout import GroupOptions as GroupOptions
    from vllm_rollout import RolloutOptions as RolloutOptions
else:  # parts add fields to the bodies
    _ARGUMENTS = {"prompts", "group_size", "redundancy", "stream", "stream_tokens"}
    GroupOptions, RolloutOptions = (
        TypedDict(name, {f: its.annotation for f, its in body.model_fields.items() if f not in _ARGUMENTS}, total=False)
        for name, body in (("GroupOptions", RolloutFields), ("RolloutOptions", RolloutRequest))
    )


def rollout_body(
    prompts: Iterable[PromptLike],
    group_size: int,
    redundancy: Redundancy = 0,
    *,
    stream: bool = False,
    stream_tokens: int | None = None,
    **options: Unpack[RolloutOptions],
) -> dict[str, Any]:
    """The body of POST /v1/rollouts. The server checks the values. Only the forms of prompts are checked here.

    Raises: TypeError for a prompt of unknown form, and for an unknown option.
    """
    if isinstance(prompts, (str, Mapping, Prompt)):
        raise TypeError(f"prompts must be a list of prompts, got one {type(prompts).__name__}. Write [prompt].")
    body = {
        "prompts": [prompt_body(prompt, position) for position, prompt in enumerate(prompts)],
        "group_size": group_size,
        "redundancy": redundancy,
        "stream": stream,
        "stream_tokens": stream_tokens,
        **option_fields(options, RolloutOptions),
    }
    return said(body)


def said(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields without those that are None."""
    return {name: value for name, value in fields.items() if value is not None}


def option_fields(options: Mapping[str, Any], known: type) -> dict[str, Any]:
    """Options as fields of a body, without those that are None. Raises: TypeError for an option that is not
    in `known`.
    """
    if unknown := sorted(options.keys() - known.__annotations__.keys()):
        if (renamed := remedy_for(unknown[0], known.__annotations__)) is not None:
            raise TypeError(f"{unknown[0]}: {renamed}")
        raise TypeError(f"{unknown[0]} is no option; there are {', '.join(known.__annotations__)}")
    return {name: _plain(value) for name, value in said(options).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    return dict(value) if isinstance(value, Mapping) else value


def takes_options(known: type, body: type[BaseModel]) -> Callable[[Method], Method]:
    """Decorator: signature and help of a method with `**options` show those known options that the body
    describes."""
    fields = {name: its for name in known.__annotations__ if (its := body.model_fields.get(name)) is not None}

    def decorate(method: Method) -> Method:
        described = signature(method)
        *own, _ = described.parameters.values()
        defaults = {name: None if field.default_factory else field.default for name, field in fields.items()}
        options = [Parameter(name, Parameter.KEYWORD_ONLY, default=default) for name, default in defaults.items()]
        with_options = described.replace(parameters=[*own, *options])
        method.__signature__ = with_options  # type: ignore[attr-defined]  # no type has it; `inspect` reads it
        words = "\n".join(f"{name}: {field.description}" for name, field in fields.items())
        method.__doc__ = f"{cleandoc(method.__doc__ or '')}\n\nOptions:\n\n{words}"
        return method

    return decorate


def prompt_body(prompt: PromptLike, position: int) -> dict[str, Any]:
    """A prompt of any form as an object of the body. `position` is for the message.

    Raises: TypeError for an unknown form.
    """
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Prompt):
        return prompt.model_dump(exclude_none=True)
    if isinstance(prompt, Mapping):
        return dict(prompt)
    try:
        if isinstance(prompt, bytes):
            raise TypeError("decode it")  # its items are integers, too
        items: list[Any] = list(prompt)
        if items and isinstance(items[0], Mapping):
            return {"messages": [dict(message) for message in items]}
        return {"prompt_token_ids": [operator.index(token) for token in items]}
    except TypeError as error:
        raise TypeError(
            f"prompts[{position}] must be text, a list of token ids, a list of chat messages or a dict with one of "
            f"prompt, prompt_token_ids, messages; got {type(prompt).__name__} ({error})"
        ) from error
