"""Record of a training, as the demo shows it."""

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
    """One training: held-out success over seconds of training, without the time of evaluations."""

    title: str
    seconds: tuple[float, ...]
    success: tuple[float, ...]
    p99: float
    """99th percentile of lengths of held-out answers at the end, in tokens."""
    num_generated: int
    answers: tuple[tuple[Answer, Answer], ...]
    """(before, after) answers to some held-out problems."""


def read(title: str, record: Path) -> Curve:
    """Read the record of a training."""
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
    """Answers to the problem with the longest wrong answer before training. If all were right, to the first problem."""
    unsolved = [(before, after) for before, after in curve.answers if not before.reward]
    return max(unsolved, key=lambda pair: pair[0].num_tokens, default=curve.answers[0])


def seconds_to(curve: Curve, success: float) -> float | None:
    """Seconds until the success is first reached, interpolated between evaluations. None if it is never reached."""
    points = list(zip(curve.seconds, curve.success, strict=True))
    for (began, before), (ended, after) in pairwise(points):
        if before < success <= after:
            return began + (ended - began) * (success - before) / (after - before)
    return None
