"""What a training's record says, as the demo shows it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple


class Answer(NamedTuple):
    problem: str
    text: str
    num_tokens: int
    reward: float | None


@dataclass(frozen=True, slots=True)
class Curve:
    """One training: held-out success over its seconds, which evaluations are not in."""

    title: str
    seconds: tuple[float, ...]
    success: tuple[float, ...]
    p99: float
    """Length of held-out answers at the end, in tokens."""
    num_generated: int
    answers: tuple[tuple[Answer, Answer], ...]
    """To some held-out problems, before and after."""


def read(title: str, record: Path) -> Curve:
    """A training's record."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in record.read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    return Curve(
        title,
        tuple(line["seconds_of_steps"] for line in evaluations),
        tuple(line["success"] for line in evaluations),
        evaluations[-1]["p99"],
        sum(line["usage"]["generated_tokens"] for line in lines if line["kind"] == "step"),
        tuple(
            (Answer(*before), Answer(*after))
            for before, after in zip(evaluations[0]["answers"], evaluations[-1]["answers"], strict=True)
        ),
    )


def shown_answers(curve: Curve) -> tuple[Answer, Answer]:
    """To the problem that was thought about longest and not solved before; else to the first."""
    unsolved = [(before, after) for before, after in curve.answers if not before.reward]
    return max(unsolved, key=lambda pair: pair[0].num_tokens, default=curve.answers[0])


def seconds_to(curve: Curve, success: float) -> float | None:
    """When it first had that success, on a line between evaluations; None: never."""
    points = list(zip(curve.seconds, curve.success, strict=True))
    for (began, before), (ended, after) in pairwise(points):
        if before < success <= after:
            return began + (ended - began) * (success - before) / (after - before)
    return None
