"""Values that a kind of field takes at the ends of its range, and values that it does not take."""

from __future__ import annotations

import math
from typing import Any

from vllm_rollout.kernel.rules.rows import Either, Flag, Integer, Kind, Names, Number, Object, Several, Text


def edges(kind: Kind) -> list[Any]:
    """Values at the ends of the range, or all values of a closed set."""
    match kind:
        case Integer(least, most):
            return [least, most]
        case Number(least, most, above, below):
            return [math.nextafter(least, most) if above else least, math.nextafter(most, least) if below else most]
        case Flag():
            return [False, True]
        case Names(names):
            return [*names]
        case Text(most):
            return ["x", "x" * most]
        case Several(each, most):
            return [[each.least], [*range(each.most - most + 1, each.most + 1)]]
        case Either(kinds):
            return [value for each in kinds for value in edges(each)]
        case Object():
            return []  # its own fields have them


def wrong(kind: Kind) -> list[Any]:
    """Values below and above the range, values of another type, and numbers that are not finite."""
    return [value for value in _candidates(kind) if not kind.holds(value)]


def _candidates(kind: Kind) -> list[Any]:
    match kind:
        case Integer(least, most):
            return [least - 1, most + 1, least + 0.5, True, str(least), [least], math.nan, math.inf]
        case Number(least, most, above, below):
            low, high = (least if above else math.nextafter(least, -math.inf)), (most if below else most + 0.001)
            return [low, least - 1, high, most + 1, True, str(least), [least], math.nan, math.inf, -math.inf]
        case Flag():
            return [2, "true", math.nan, []]
        case Names(names):
            return ["no such word", f"{names[0]} ", "", 1, [names[0]], {}]
        case Text(most):
            return ["", "x" * (most + 1), 1]
        case Several(each, most):
            return [[], [*range(each.least, each.least + most + 1)], *([value] for value in wrong(each))]
        case Either(kinds):
            return [value for each in kinds for value in _candidates(each)]
        case Object():
            return [1, "no such word", []]
