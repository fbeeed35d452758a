"""Votes on the answer of a group from the answers of its candidates, and computes accuracy at k.

Invariant: every candidate either votes or is counted as abstained. The order of candidates only breaks ties.

Source: ARRoL 4.4 (scores -> ranks rescaled to [0, 1]). Ours leaves the lowest a weight above 0, so that many candidates
that tie for the last place still count. The baseline is DeepConf (trace confidence as weight).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from vllm_rollout.parts.pruning.rules.survivors import chance

VotingMethod = Literal["majority", "confidence", "quality"]
VOTING_METHODS: tuple[VotingMethod, ...] = ("majority", "confidence", "quality")

MAX_CONFIDENCE = 1e12
"""Largest weight of a confidence vote, in nats. The sum over any number of candidates stays finite."""

_NUMBER = re.compile(r"([+-]?)([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.([0-9]*))?|([+-]?)\.([0-9]+)")


@dataclass(frozen=True, slots=True)
class VoteResult:
    """Result of a group's vote."""

    winner: str | None
    """Normalised answer. None if no candidate voted."""
    share: float
    """The winner's share of all weight. 0 without a winner."""
    tally: Mapping[str, float]
    """Weight by normalised answer, heaviest first, ties by first appearance."""
    num_votes: int
    num_abstained: int
    """Candidates without an answer or without a weight."""
    num_without_weight: int
    """The part of `num_abstained` that had an answer. 0 in a majority vote, which needs no weights."""


@dataclass(frozen=True, slots=True)
class AnsweredGroup:
    """Answers of a prompt's candidates, and the correct answer."""

    prompt_id: str
    answers: Sequence[str | None]
    correct: str
    weights: Sequence[float | None] | None = None


@dataclass(frozen=True, slots=True)
class AccuracyAtK:
    """maj@k: the share of votes of k candidates that are right."""

    k: int
    accuracy: float
    """The mean over groups of the share of subsets whose winner is correct."""
    standard_error: float | None
    """Standard error of that mean, over groups. None for a single group."""
    num_groups: int
    num_exact: int
    """Groups of which every subset of size k was counted. The others were sampled."""


def normalise_answer(answer: str | None) -> str | None:
    """The form in which answers are compared. None for a blank one. A second normalisation changes nothing.

    White space is stripped and collapsed. A decimal number loses thousands separators, `+`, leading zeros and a
    fraction's trailing zeros: `1,000`, `+1000` and `01000.0` are `1000`, and `-0` is `0`. All other text (case, units,
    `%`, `1e3`, `1/2`) stays as written.
    """
    if answer is None:
        return None
    text = " ".join(answer.split())
    number = _NUMBER.fullmatch(text)
    if number is None:
        return text or None
    whole = (number[2] or "").replace(",", "").lstrip("0") or "0"
    fraction = (number[3] or number[5] or "").rstrip("0")
    size = f"{whole}.{fraction}" if fraction else whole
    return f"-{size}" if "-" in (number[1], number[4]) and size != "0" else size


def vote(
    answers: Sequence[str | None],
    method: VotingMethod,
    weights: Sequence[float | None] | None = None,
) -> VoteResult:
    """Add up the weights of equal answers. `answers[i]` and `weights[i]` belong to one candidate.

    majority: every answer has weight 1, and `weights` are not read.

    confidence: weights as given, in [0, MAX_CONFIDENCE]. If all are 0, every candidate with a weight counts as 1.

    quality: ranks of the weights (any finite scores) among the voters, from 1 for the lowest. Ties share their mean
    rank. Ranks are rescaled so that the best have weight 1. So the lowest have small weights and still count: several
    of them, or a tie, can outvote one that is a little better.

    A candidate without an answer abstains, and so does one without a weight if weights count: it gets no default score.

    Raises: ValueError for a weight out of range or a wrong number of them.
    """
    if method not in VOTING_METHODS:
        raise ValueError(f"method must be one of {', '.join(VOTING_METHODS)}, got {method!r}.")
    normalised = [normalise_answer(answer) for answer in answers]
    num_answers = sum(answer is not None for answer in normalised)
    if method == "majority":
        voters = [(answer, 1.0) for answer in normalised if answer is not None]
    else:
        checked = _check_weights(weights, len(answers), method)
        pairs = zip(normalised, checked, strict=True)
        voters = [(answer, weight) for answer, weight in pairs if answer is not None and weight is not None]
    units, scale = _units([weight for _, weight in voters], method)
    parts: dict[str, list[float]] = {}
    for (answer, _), unit in zip(voters, units, strict=True):
        parts.setdefault(answer, []).append(unit)
    totals = {answer: math.fsum(part) for answer, part in parts.items()}
    tally = {answer: totals[answer] / scale for answer in sorted(totals, key=lambda answer: -totals[answer])}
    winner = next(iter(tally), None)
    return VoteResult(
        winner=winner,
        share=0.0 if winner is None else totals[winner] / math.fsum(units),
        tally=tally,
        num_votes=len(voters),
        num_abstained=len(answers) - len(voters),
        num_without_weight=num_answers - len(voters),
    )


def accuracy_at_k(
    groups: Sequence[AnsweredGroup], k: int, method: VotingMethod, num_draws: int = 1000, seed: int = 0
) -> AccuracyAtK:
    """maj@k from more than k candidates per prompt: the expected accuracy over subsets of size k.

    All subsets are counted if there are at most `num_draws`. Otherwise `num_draws` subsets are drawn, keyed by (seed,
    prompt_id, draw), so that methods are compared on the same subsets. No answer counts as a wrong answer.

    Raises: ValueError without groups, or when a group has fewer than k candidates.
    """
    if not groups:
        raise ValueError("accuracy_at_k needs at least one group, got none.")
    if num_draws < 1:
        raise ValueError(f"num_draws must be at least 1, got {num_draws}.")
    smallest = min(groups, key=lambda group: len(group.answers))
    if not 1 <= k <= len(smallest.answers):
        raise ValueError(
            f"k must be in [1, {len(smallest.answers)}], the size of group {smallest.prompt_id!r}, got {k}."
        )
    rates = [_accuracy_of_group(group, k, method, num_draws, seed) for group in groups]
    mean = math.fsum(rates) / len(rates)
    error = None
    if len(rates) > 1:
        error = math.sqrt(math.fsum((rate - mean) ** 2 for rate in rates) / (len(rates) - 1) / len(rates))
    num_exact = sum(math.comb(len(group.answers), k) <= num_draws for group in groups)
    return AccuracyAtK(k, mean, error, len(rates), num_exact)


def _accuracy_of_group(group: AnsweredGroup, k: int, method: VotingMethod, num_draws: int, seed: int) -> float:
    # Short names in the order of the answers, which are read once: each draw would read them again.
    read = [normalise_answer(answer) for answer in group.answers]
    names = {answer: f"a{rank:07d}" for rank, answer in enumerate(sorted({each for each in read if each is not None}))}
    answers = [None if answer is None else names[answer] for answer in read]
    correct = names.get(normalise_answer(group.correct) or "")
    indices = range(len(answers))
    if math.comb(len(indices), k) <= num_draws:
        subsets = list(combinations(indices, k))
    else:
        subsets = [_draw(len(indices), k, seed, f"{group.prompt_id}/{draw}") for draw in range(num_draws)]
    num_correct = 0
    for subset in subsets:
        weights = None if group.weights is None else [group.weights[index] for index in subset]
        winner = vote([answers[index] for index in subset], method, weights).winner
        num_correct += winner is not None and winner == correct
    return num_correct / len(subsets)


def _draw(num_candidates: int, k: int, seed: int, name: str) -> tuple[int, ...]:
    """A uniformly drawn subset of size k, ascending."""
    drawn = sorted(range(num_candidates), key=lambda index: chance(seed, name, index))[:k]
    return tuple(sorted(drawn))


def _check_weights(
    weights: Sequence[float | None] | None, num_answers: int, method: VotingMethod
) -> Sequence[float | None]:
    if weights is None:
        raise ValueError(f"method {method} needs weights. Give one per answer, or use majority.")
    if len(weights) != num_answers:
        raise ValueError(f"weights must be as many as answers ({num_answers}), got {len(weights)}.")
    for position, weight in enumerate(weights):
        if weight is None:
            continue
        if not math.isfinite(weight):
            raise ValueError(f"weights[{position}] must be finite, got {weight}. Use null for a missing one.")
        if method == "confidence" and not 0 <= weight <= MAX_CONFIDENCE:
            raise ValueError(
                f"weights[{position}] must be in [0, {MAX_CONFIDENCE:g}] for method confidence, got {weight}. "
                "For scores of either sign use quality."
            )
    return weights


def _units(weights: Sequence[float], method: VotingMethod) -> tuple[list[float], float]:
    """Weights in units whose sums are exact if possible, and the size of 1 in those units."""
    if method == "quality" and weights:
        ranks = _doubled_ranks(weights)
        return [float(rank) for rank in ranks], float(max(ranks))
    return list(weights) if any(weights) else [1.0] * len(weights), 1.0


def _doubled_ranks(scores: Sequence[float]) -> list[int]:
    """Twice the rank of each score, from 1 on. Ties share their mean rank, so that its double is an integer."""
    ranked = sorted(scores)
    first = {score: rank for rank, score in reversed(list(enumerate(ranked, start=1)))}
    last = {score: rank for rank, score in enumerate(ranked, start=1)}
    return [first[score] + last[score] for score in scores]
