"""Rules for candidates that go on in a later round.

A short round ends with some candidates of a group finished and others running. If a long round took the finished ones
first, it would return the short answers of every hard prompt. A trainer would then learn to answer shortly. So the
candidates with the lowest indices go on, whatever their length.

Invariant: the choice of the candidates that go on does not depend on their length.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any, NamedTuple

from vllm_rollout.kernel.rules.types import Ending

Moments = tuple[float, float]
"""Mean and standard deviation."""


class VersionSpan(NamedTuple):
    """Output tokens [start, end) that one version of the weights has sampled."""

    version: str
    start: int
    end: int


def choose_resumed(endings: Collection[Ending], group_size: int) -> tuple[int, ...]:
    """Indices of the candidates of a deferred group that go on: the first `group_size` that were neither pruned nor
    lost.

    Pruned candidates stay out, because the survival probabilities of their siblings rely on that verdict.
    """
    usable = sorted(ending.index for ending in endings if ending.state not in ("pruned", "failed"))
    return tuple(usable[:group_size])


def is_whole(ending: Ending) -> bool:
    """True if no token is left to generate: the candidate ended by itself, or was cut at `max_tokens`."""
    return ending.state == "finished" or ending.ended_by_itself


def joined_moments(first: Moments | None, num_first: int, rest: Moments | None, num_rest: int) -> Moments | None:
    """Moments of the numbers of two parts together. None if the moments of a part with numbers are unknown."""
    if not num_first:
        return rest
    if not num_rest:
        return first
    if first is None or rest is None:
        return None
    num = num_first + num_rest
    mean = (num_first * first[0] + num_rest * rest[0]) / num
    squares = num_first * (first[1] ** 2 + first[0] ** 2) + num_rest * (rest[1] ** 2 + rest[0] ** 2)
    return mean, sqrt(max(0.0, squares / num - mean**2))


def joined_spans(first: Sequence[VersionSpan], num_first: int, rest: Sequence[VersionSpan]) -> list[VersionSpan]:
    """Spans of the tokens of two parts, `first` before `rest`. Adjacent spans of one version become one span."""
    spans = list(first)
    for span in rest:
        moved = VersionSpan(span.version, span.start + num_first, span.end + num_first)
        if spans and spans[-1].version == moved.version and spans[-1].end == moved.start:
            moved = VersionSpan(moved.version, spans.pop().start, moved.end)
        spans.append(moved)
    return spans


def joined_ending(rest: Ending, num_first: int) -> Ending:
    """The ending of a candidate that resumed with `num_first` tokens."""
    return replace(rest, num_tokens=rest.num_tokens + num_first, num_resumed=num_first)


def spans_of(written: Sequence[Mapping[str, Any]]) -> list[VersionSpan]:
    """Spans from dictionaries `{"version", "start", "end"}`."""
    return [VersionSpan(span["version"], span["start"], span["end"]) for span in written]
