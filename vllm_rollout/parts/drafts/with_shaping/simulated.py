"""Expected effect of drafts on a simulated step: verified drafts, gained tokens and seconds.

Invariant: closed form of `parts/drafts/rules.py::DraftingRule`, in expectation, once the rule has learned all it can.
The likeliest drafts are verified as long as tokens per second grow. If no step has been without drafts for long, one is
made without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial
from statistics import fmean
from typing import Any, NamedTuple

from rich.table import Table

from vllm_rollout.parts.drafts.acceptance import DraftSettings, share_factor
from vllm_rollout.parts.drafts.rules import NUM_BINS, PLAIN_INTERVAL_STEPS, bin_of, least_worthy
from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.race import Race

BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CONTEXTS = tuple(2.0**power for power in range(8, 18))
"""Knots of drafted costs, besides those of the costs themselves. The verified drafts change with the context."""
MAX_BATCH_SIZE = 256
"""Largest batch size shown for a machine without a limit."""


class DraftedStep(NamedTuple):
    """Averages of a row over steps. The row's own token is not a draft."""

    drafts: float
    tokens: float
    seconds: float
    """Seconds that the step takes."""

    @property
    def s_per_token(self) -> float:
        return self.seconds / self.tokens


def drafted_step(
    cost: CostModel, settings: DraftSettings, factor: float, num_rows: float, context_tokens: float
) -> DraftedStep:
    """Step of a batch of `num_rows` rows. Their shares of drafts are `factor` times those of the settings."""
    plain_s = cost.ptl(num_rows, context_tokens)
    plain = DraftedStep(0.0, 1.0, plain_s)
    found, right = [0.0] * NUM_BINS, [0.0] * NUM_BINS
    for kind in settings.kinds:
        for probability in kind.accepted:
            bin = bin_of(probability)
            found[bin] += factor * kind.share
            right[bin] += factor * kind.share * probability

    def seconds(drafts: float) -> float:
        return cost.ptl(num_rows * (1 + drafts), context_tokens / (1 + drafts))

    least = least_worthy(found, right, lambda drafts: seconds(drafts) / plain_s)
    if least == NUM_BINS:
        return plain
    drafts = sum(found[least:])
    best = DraftedStep(drafts, 1 + sum(right[least:]), seconds(drafts))
    drafting = factor * sum(kind.share for kind in settings.kinds if bin_of(kind.accepted[0]) >= least)
    share = _plain_share(drafting, num_rows)
    return DraftedStep(*(share * one + (1 - share) * other for one, other in zip(plain, best, strict=True)))


def _plain_share(drafting: float, num_rows: float) -> float:
    """Share of all steps that are made without drafts although some row has drafts.

    It is one in `PLAIN_INTERVAL_STEPS`, or less if steps without any draft happen by themselves. `drafting`: share of
    rows that have drafts.
    """
    some = 1 - (1 - min(1.0, drafting)) ** num_rows
    in_a_row = some ** (PLAIN_INTERVAL_STEPS - 1)
    return in_a_row / sum(some**step for step in range(PLAIN_INTERVAL_STEPS))


def drafted(cost: CostModel, settings: DraftSettings, factor: float) -> CostModel:
    """Costs of steps in which every row gains one token. With drafts that is a part of a real step."""
    first, _ = cost.curves[0]
    more = [context for context in CONTEXTS if len(cost.curves) > 1 and context > first]
    contexts = sorted({context for context, _ in cost.curves} | set(more))
    knots = {float(size) for size in BATCH_SIZES} | {size for _, curve in cost.curves for size in curve.batch_sizes}
    sizes = tuple(sorted(knots))

    def curve(context: float) -> PTLCurve:
        steps = (drafted_step(cost, settings, factor, size, context) for size in sizes)
        return PTLCurve(sizes, tuple(step.s_per_token for step in steps))

    curves = tuple((context, curve(context)) for context in contexts)
    return CostModel(curves, cost.prefill_s_per_token, cost.step_prefill_s, cost.max_num_seqs)


class DraftedSteps:
    """Costs of one rank's steps, whose candidates come and go."""

    def __init__(self, cost: CostModel, settings: DraftSettings) -> None:
        self._settings = settings
        self._drafted = cache(partial(drafted, cost, settings))
        """Step costs by draft factor, in hundredths."""
        self._factors = 0.0
        """Draft factors of running candidates, summed."""

    def start(self, race: Race) -> None:
        """A candidate of this group starts to run."""
        self._factors += self._factor(race)

    def stop(self, race: Race) -> None:
        self._factors -= self._factor(race)

    def cost(self, num_running: int) -> CostModel:
        return self._drafted(round(self._factors / num_running, 2))

    def _factor(self, race: Race) -> float:
        return share_factor(self._settings, race.plan.num_candidates - 1, race.num_earlier)


class BatchGain(NamedTuple):
    """Gain of drafts at one batch size."""

    batch_size: int
    drafts: float
    """Drafts of a row in a step."""
    tokens: float
    """Tokens that a row gains in a step."""
    faster: float
    """Tokens per second, relative to steps without drafts."""


def gains(
    cost: CostModel, settings: DraftSettings, factor: float, sizes: Sequence[int], context_tokens: float
) -> list[BatchGain]:
    rows = []
    for size in sizes:
        step = drafted_step(cost, settings, factor, size, context_tokens)
        faster = cost.ptl(size, context_tokens) / step.s_per_token
        rows.append(BatchGain(size, step.drafts, step.tokens, faster))
    return rows


def gained_of(machine: Machine, group_size: int, contexts: Iterable[float]) -> tuple[list[Table], dict[str, Any]]:
    """Gain of drafts by batch size, for groups of `group_size`: a table, and its numbers.

    `contexts`: context of each candidate half way, in tokens.
    """
    drafts = machine.with_drafts(True).drafts
    most = machine.num_slots or MAX_BATCH_SIZE
    sizes = [size for size in BATCH_SIZES if size & (size - 1) == 0 and size <= most]
    rows = gains(machine.step_cost, drafts, share_factor(drafts, group_size - 1, 0), sizes, fmean(contexts))
    table = Table(title=f"What drafts bring, with {group_size} candidates to a prompt")
    for name in ("candidates in a step", "drafts of each", "tokens of each", "times as fast"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(f"{row.batch_size:,}", f"{row.drafts:.2f}", f"{row.tokens:.2f}", f"{row.faster:.2f}")
    return [table], {"drafts": [row._asdict() for row in rows]}


def as_measured() -> DraftSettings:
    """Acceptance of drafts where nothing else is said."""
    return DraftSettings()
