"""What a client asks for, as the body of `POST /v1/rollouts`. Invariant: an argument's default is stated in
`rollout_body` and its meaning in `RolloutOptions`, and nowhere else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, cleandoc, signature
from typing import Any, TypedDict, TypeVar

from pydantic import BaseModel

from vllm_rollout.server.protocol import DualEndSelection, Prompt
from vllm_rollout.server.pruning_body import Pruning

Method = TypeVar("Method", bound=Callable[..., Any])

PromptLike = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any] | Prompt
"""Text, token ids, chat messages, or a whole prompt (`{"id": …, "messages": …}`)."""

Selection = str | Mapping[str, Any] | DualEndSelection
"""`"first"`, `"shortest"` or `{"dual_end": {"num_longest": 1, "patience": 1.5}}`."""

Redundancy = int | str | Mapping[str, Any]
"""Spare candidates per prompt, `"auto"`, or `{"auto": {"tradeoff": 2.0}}`."""


class RolloutOptions(TypedDict, total=False):
    """Options, the same for `rollout` and `stream` of both clients:

    early_stop: stop a group's other candidates when `group_size` valid ones have finished; "auto" or None: wherever the
        selection allows it.
    selection: which finished candidates make the group: "first", "shortest" or {"dual_end": {"num_longest": 1}}, whose
        "patience" bounds the wait for the longest.
    pruning: score candidates and stop those that will not help training: {"detection_length": 512, …} or a Pruning;
        None: no pruning.
    migration: groups may go on on other ranks when that pays: "spread" away from one that lags, "consolidate" on fewer
        in the tail, "auto" for both; "off": they stay.
    scale_down: "auto": half of the ranks are emptied before the rollout is over, when the rest fits on the others.
    on_engine_failure: "retry": groups whose data-parallel rank dies run again on another; "fail": they end, incomplete.
    audit_ratio: share of groups in which nobody is stopped, so that learning stays true; None: the server's.
    audit_unit: what is audited, each "group" by chance or the whole "rollout" by count; "auto": groups of a stream.
    sampling: any field of vLLM's SamplingParams except n.
    return_text: detokenize, and return the text of each trajectory.
    return_logprobs: return the log probability of each sampled token.
    return_unselected: also return tokens and text of candidates that were not selected.
    model: name of a served model; None: the first.
    """

    early_stop: bool | str | None
    selection: Selection
    pruning: Mapping[str, Any] | Pruning | None
    migration: str
    scale_down: str
    on_engine_failure: str
    audit_ratio: float | None
    audit_unit: str
    sampling: Mapping[str, Any] | None
    return_text: bool
    return_logprobs: bool
    return_unselected: bool
    model: str | None


def rollout_body(
    prompts: Iterable[PromptLike],
    group_size: int,
    redundancy: Redundancy = 0,
    early_stop: bool | str | None = None,
    selection: Selection = "first",
    pruning: Mapping[str, Any] | Pruning | None = None,
    sampling: Mapping[str, Any] | None = None,
    return_text: bool = False,
    return_logprobs: bool = True,
    return_unselected: bool = False,
    model: str | None = None,
    stream_tokens: int | None = None,
    stream: bool = False,
    migration: str = "off",
    scale_down: str = "off",
    on_engine_failure: str = "fail",
    audit_ratio: float | None = None,
    audit_unit: str = "auto",
) -> dict[str, Any]:
    """The body of POST /v1/rollouts. Values are the server's to judge; only a prompt's form is decided here.

    Raises: TypeError for a prompt of no known form.
    """
    if isinstance(prompts, (str, Mapping, Prompt)):
        raise TypeError(f"prompts must be a list of prompts, got one {type(prompts).__name__}. Write [prompt].")
    body = {
        "model": model,
        "prompts": [prompt_body(prompt, position) for position, prompt in enumerate(prompts)],
        "group_size": group_size,
        "redundancy": redundancy,
        "early_stop": early_stop,
        "selection": selection.model_dump() if isinstance(selection, BaseModel) else selection,
        "pruning": pruning.model_dump(exclude_unset=True) if isinstance(pruning, BaseModel) else pruning,
        "migration": migration,
        "scale_down": scale_down,
        "on_engine_failure": on_engine_failure,
        "audit_ratio": audit_ratio,
        "audit_unit": audit_unit,
        "sampling": dict(sampling or {}),
        "return": {"text": return_text, "logprobs": return_logprobs, "unselected": return_unselected},
        "stream": stream,
        "stream_tokens": stream_tokens,
    }
    return {field: value for field, value in body.items() if value is not None}


def takes_options(method: Method) -> Method:
    """Let `help` show the options and their defaults where `method` says `**options`."""
    described = signature(method)
    *own, _ = described.parameters.values()
    defaults = signature(rollout_body).parameters
    options = [defaults[name].replace(kind=Parameter.KEYWORD_ONLY) for name in RolloutOptions.__annotations__]
    method.__signature__ = described.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    method.__doc__ = "\n\n".join(cleandoc(text) for text in (method.__doc__, RolloutOptions.__doc__) if text)
    return method


def prompt_body(prompt: PromptLike, position: int) -> dict[str, Any]:
    """A prompt in one of its forms, as the body has it. Raises: TypeError for one of no known form."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Prompt):
        return prompt.model_dump(exclude_none=True)
    if isinstance(prompt, Mapping):
        return dict(prompt)
    try:
        items = list(prompt)
        if items and isinstance(items[0], Mapping):
            return {"messages": [dict(message) for message in items]}
        return {"prompt_token_ids": [operator.index(token) for token in items]}
    except TypeError as error:
        raise TypeError(
            f"prompts[{position}] must be text, a list of token ids, a list of chat messages or a dict with one of "
            f"prompt, prompt_token_ids, messages; got {type(prompt).__name__} ({error})"
        ) from error
