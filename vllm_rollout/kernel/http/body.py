"""The base of all request bodies, and bodies made from a table of fields.

Invariant: an unknown field is an error that names it, and every accepted value can be sent to the engine.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cache, reduce
from operator import or_
from types import GenericAlias
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from vllm_rollout.kernel.rules.rows import Either, Flag, Integer, Kind, Names, Number, Object, Several, rows
from vllm_rollout.kernel.rules.terms_port import PartTerms
from vllm_rollout.kernel.xargs import PREFIX

MIN_INT, MAX_INT = -(2**63), 2**63 - 1
"""Integers that can be sent to the engine: 64 bit, signed."""
MAX_DEPTH = 32
"""Levels of nesting inside messages and sampling_params."""
MOST_NAME = 100
"""Most characters of a name in an error."""
SAMPLING = frozenset({
    "allowed_token_ids", "bad_words", "extra_args", "frequency_penalty", "ignore_eos",
    "include_stop_str_in_output", "logit_bias", "logprobs", "max_tokens", "min_p", "min_tokens",
    "presence_penalty", "repetition_detection", "repetition_penalty", "routed_experts_prompt_start", "seed",
    "skip_reading_prefix_cache", "skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_token_ids",
    "structured_outputs", "temperature", "thinking_token_budget", "top_k", "top_p", "trace_decode_token_ids",
    "watermarking",
})  # fmt: skip
"""Fields of vLLM's SamplingParams, which OpenAI requests have beside the prompt and our bodies in `sampling_params`."""
ELSEWHERE = {
    "n": "group_size",
    "num_generations": "group_size",
    "max_completion_tokens": "sampling_params.max_tokens",
    "max_new_tokens": "sampling_params.max_tokens",
    "logprobs": "include",
}
"""Fields of other APIs -> the places of the same settings in our bodies."""
RENAMED = {
    "sampling": "sampling_params",
    "return": "include",
    "return_text": "include",
    "return_logprobs": "include",
    "return_unselected": "include",
}
"""Old name of a body's field, or of an option of the Python client -> new name. Each is refused for one version."""
REMOVED = {
    "until": 'removed, leave it out: let rounds filter groups without variance ("filter": "zero_variance"), or drop '
    "these groups in the trainer",
}
"""Removed field of a body, or option of the Python client -> what to do instead."""
UNION_TAGS = frozenset({"<flag>", "<list>", "<name>", "<number>", "<object>"})
"""Parts of an error's location that pydantic adds and that are not part of the body."""


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, value: Any) -> Any:
        """Report only the first unknown field: a body with a million of them costs no more than one."""
        if isinstance(value, dict):
            known = _names_of(cls)
            for name in value:
                if name not in known:
                    text = name.encode(errors="backslashreplace").decode()
                    if (renamed := remedy_for(name, known)) is not None:
                        raise PydanticCustomError("unknown_field", "{remedy}", {"field": text, "remedy": renamed})
                    place = _place_of(name, known)
                    remedy = "Leave it out" if place is None else f"Write {place} instead"
                    raise PydanticCustomError(
                        "unknown_field",
                        "is not a field of this version. {remedy}; allowed here: {allowed}",
                        {"field": text, "allowed": ", ".join(known), "remedy": remedy},
                    )
        return value


class PartFields(Body):
    """Fields of a rollout that a part adds: the face `fields` of parts."""

    example: ClassVar[Mapping[str, Any]] = {}
    """Some of them, in an example of a body. Only the first part has one there."""

    def part_terms(self) -> dict[str, PartTerms]:
        """The terms of these fields, by part. Raises: PlanError that names the field as the body does."""
        return {}

    @property
    def allows_fewer_by(self) -> str | None:
        """Field by which a group may be complete with fewer than `group_size` trajectories. None: there is none."""
        return None


def _place_of(name: str, known: Sequence[str]) -> str | None:
    """The place, in a body with these fields, of a field of other endpoints. None if there is none."""
    place = ELSEWHERE.get(name, f"sampling_params.{name}" if name in SAMPLING else name.removeprefix(PREFIX))
    return place if place.partition(".")[0] in known else None


def remedy_for(name: str, known: Container[str]) -> str | None:
    """Message for a field of an earlier version. None for other names, and if `known` does not have the new name."""
    if name in REMOVED:
        return REMOVED[name]
    new = RENAMED.get(name)
    return f"renamed, write {new}" if new is not None and new in known else None


_BODIES: dict[type, type[Body]] = {}
"""Tables of fields -> the body that is made of each, for objects within a body."""

B = TypeVar("B", bound=Body)


def of_table(body: type[B]) -> type[B]:
    """Class decorator for a body that inherits a table of `kernel/rules/fields.py`. The table's rows set types and
    descriptions of its fields."""
    for name, row in rows(body).items():
        field = body.model_fields[name]
        annotation = _type_of(row.takes)
        field.annotation = annotation | None if field.default is None else annotation
        field.description = row.description
    body.model_rebuild(force=True)
    _BODIES.update((base, body) for base in body.__bases__ if not issubclass(base, Body))
    return body


def _type_of(kind: Kind) -> Any:
    """The type of a field's values, for pydantic's checks and for OpenAPI."""
    match kind:
        case Integer(least, most):
            return Annotated[StrictInt, Field(ge=least, le=most)]
        case Number():
            return Annotated[StrictFloat, Field(**limits(kind))]
        case Flag():
            return StrictBool
        case Names(names):
            return Literal[names]
        case Several(each, most):
            return Annotated[GenericAlias(list, _type_of(each)), Field(min_length=1, max_length=most)]
        case Object(table):
            return _BODIES[table]
        case Either(kinds):
            tags = [_TAGS[type(each)] for each in kinds]
            types = [Annotated[_type_of(each), Tag(tag)] for each, tag in zip(kinds, tags, strict=True)]
            return Annotated[reduce(or_, types), Discriminator(lambda value: _tag(value, tags))]
    raise TypeError(f"{type(kind).__name__} is no kind of value that a body has")


def limits(kind: Number) -> dict[str, Any]:
    """The bounds of a number, as arguments of pydantic's `Field`."""
    return {"gt" if kind.above else "ge": kind.least, "lt" if kind.below else "le": kind.most}


_TAGS = {Flag: "<flag>", Names: "<name>", Integer: "<number>", Several: "<list>", Object: "<object>"}


def _tag(value: Any, tags: list[str]) -> str:
    """The tag of the union's branch that fits a value, so that errors are about that branch only."""
    for form, tag in ((dict | BaseModel, "<object>"), (list, "<list>"), (str, "<name>")):
        if isinstance(value, form) and tag in tags:
            return tag
    return tags[0]


@cache
def _names_of(body: type[Body]) -> tuple[str, ...]:
    """Names of its fields. Cached, because a body may have a hundred thousand objects."""
    return tuple(body.model_fields)


def check_json(value: Any, where: str) -> None:
    """Check values that Python's JSON parser accepts and no engine can take.

    Raises: ValueError that names the path of the value. The path is built for an error only: with long names, the paths
    of all items would be many times as large as the body.
    """
    names: list[str | int] = []
    """Names of the open containers."""
    items: list[Iterator[tuple[str | int, Any]]] = [iter([(where, value)])]
    """Remaining items, first of the value itself, then of each open container."""
    while items:
        for name, item in items[-1]:
            fault = _fault(item)
            if fault is None and isinstance(item, dict | list) and len(items) > MAX_DEPTH:
                fault = f"is nested more than {MAX_DEPTH} levels deep; flatten it"
            if fault is not None:
                raise ValueError(f"{_path([*names, name])}: {fault}")
            if isinstance(item, dict | list):
                names.append(name)
                items.append(iter(item.items()) if isinstance(item, dict) else iter(enumerate(item)))
                break
        else:
            items.pop()
            if names:
                names.pop()


def _fault(value: Any) -> str | None:
    """The fault of a value itself, without a look at its items. None if it has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"must be a finite number, got {value}"
    if isinstance(value, int) and not MIN_INT <= value <= MAX_INT:
        return f"must be an integer from {MIN_INT} to {MAX_INT} (64 bit), got {value}"
    if isinstance(value, str) and not _is_unicode(value):
        return "must be valid Unicode text, got an unpaired surrogate"
    if isinstance(value, dict) and not all(map(_is_unicode, value)):
        return "must be valid Unicode text, got an unpaired surrogate"
    return None


def _path(names: Sequence[str | int]) -> str:
    return ".".join(f"{name:.{MOST_NAME}}" if isinstance(name, str) else str(name) for name in names)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
