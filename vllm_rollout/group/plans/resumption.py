"""Candidates that go on in a later round. Invariant: which of them do so does not depend on what they have become.

A short round ends with some candidates of a group over and others on their way. A long round that took the ones that
are over first would return the short answers of every hard prompt, and a trainer would learn to answer shortly. So the
first by index go on, however long they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any, NamedTuple

from vllm_rollout.group.types import Ending

Moments = tuple[float, float]
"""Mean and standard deviation."""


class VersionSpan(NamedTuple):
    """Output tokens that one version of the weights has sampled."""

    version: str
    start: int
    end: int


def choose_resumed(endings: Collection[Ending], group_size: int) -> tuple[int, ...]:
    """Indices of the candidates of a deferred group that go on: the first `group_size` of those that were not lost.

    Pruned ones stay out as well: that verdict is the group's, and their siblings' survival probabilities count on it.
    """
    usable = sorted(ending.index for ending in endings if ending.state not in ("pruned", "failed"))
    return tuple(usable[:group_size])


def is_whole(ending: Ending) -> bool:
    """There is nothing to go on with: it ended by itself, or was cut at `max_tokens`."""
    return ending.state == "finished" or ending.ended_by_itself


def is_off_policy(versions: Collection[str], num_resumed: int, current: str | None) -> bool:
    """Whether weights other than those of its round sampled, or may have sampled, some of a trajectory's tokens.

    Args:
        versions: weight versions of its tokens.
        num_resumed: tokens that it had from an earlier round.
        current: the version at the beginning of the round; None when nobody has named one. Then nothing tells whether
            the weights have changed since the earlier round, and they count as changed.
    """
    if not num_resumed:
        return len(set(versions)) > 1
    return current is None or set(versions) != {current}


def joined_moments(first: Moments | None, num_first: int, rest: Moments | None, num_rest: int) -> Moments | None:
    """Moments of numbers of which those of two parts are known; None when those of a part that has any are not."""
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
    """Spans of tokens that follow others, which keep theirs. Neighbours of one version are one span."""
    spans = list(first)
    for span in rest:
        moved = VersionSpan(span.version, span.start + num_first, span.end + num_first)
        if spans and spans[-1].version == moved.version and spans[-1].end == moved.start:
            moved = VersionSpan(moved.version, spans.pop().start, moved.end)
        spans.append(moved)
    return spans


def joined_ending(rest: Ending, num_first: int) -> Ending:
    """The ending of a candidate that had so many tokens before."""
    return replace(rest, num_tokens=rest.num_tokens + num_first, num_resumed=num_first)


def spans_of(written: Sequence[Mapping[str, Any]]) -> list[VersionSpan]:
    """Spans as `{"version", "start", "end"}` describes each."""
    return [VersionSpan(span["version"], span["start"], span["end"]) for span in written]
