"""Table of known prompts: lengths, success, and when each was seen. Invariant: a prompt comes once.

Both histories yield rows in parts. The collector of all rows puts them in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from vllm_rollout.parts.pruning.rules.success import PromptSuccess, SuccessHistory

PromptOrder = Literal["last_seen", "success"]


class KnownLengths(NamedTuple):
    """Lengths of a prompt: mean and variance within groups, in tokens."""

    mean: float
    variance: float
    num_groups: int

    @property
    def std(self) -> float:
        return math.sqrt(self.variance)


class KnownPrompt(NamedTuple):
    """Statistics of one prompt."""

    key: str
    lengths: KnownLengths | None
    """None until a group of at least two candidates was over."""
    success: PromptSuccess | None
    """None until a candidate was rewarded."""
    prompts_ago: int | None
    """Number of other prompts whose newest group ended after this prompt's. None if no group of it has ended."""


def prompt_rows(lengths: Any, successes: SuccessHistory, size: int) -> Iterator[list[list[Any]]]:
    """JSON-able rows, about `size` at a time. Prompts without lengths come first, then those seen longest ago.

    `lengths`: a history of lengths. None: none are learned.

    The histories may change between the parts: a prompt that is seen then may come twice, or not at all.
    """
    for some in successes.prompts(size):
        rest = [row for row in some if lengths is None or row[0] not in lengths]
        if rest:
            yield [[key, 0, None, rewarded, successful] for key, rewarded, successful in rest]
    for some in () if lengths is None else lengths.prompts(size):
        rows = []
        for key, *_ in some:
            moments = lengths.of(key)
            known = moments and [moments.mean, moments.variance, moments.num_groups]
            rows.append([key, 1, known, *successes.of(key)])
        yield rows


def known_prompts(rows: Iterable[Sequence[Any]]) -> list[KnownPrompt]:
    """The prompts of these rows, the last seen first."""
    newest = {row[0]: row for row in rows}  # of one that came twice, the later row
    prompts: list[KnownPrompt] = []
    for key, is_seen, moments, rewarded, successful in reversed(newest.values()):
        success = PromptSuccess(rewarded, successful) if rewarded else None
        lengths = moments and KnownLengths(*moments)
        prompts.append(KnownPrompt(key, lengths, success, len(prompts) if is_seen else None))
    return prompts


def in_order(prompts: Sequence[KnownPrompt], order: PromptOrder) -> list[KnownPrompt]:
    """Sort prompts. `success`: least successful first, those without a reward last, ties by key. `last_seen`:
    unchanged."""
    if order == "last_seen":
        return list(prompts)
    return sorted(prompts, key=lambda prompt: (_rate(prompt), prompt.key))


def _rate(prompt: KnownPrompt) -> float:
    return 2.0 if prompt.success is None or prompt.success.rate is None else prompt.success.rate
