"""Compares decode steps with a cost model, to detect a profile that is no longer true.

Invariant: results depend only on the steps and their order. No clock is read here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from statistics import median

from vllm_rollout.parts.shaping.rules.cost import CostModel

DRIFT_SAMPLES = 16
"""Newest samples of a range of batch sizes whose median is compared: at least 512 steps, seconds to minutes."""
DRIFT_SHARE = 0.25
"""Smallest relative deviation of a median from the profile, in either direction, that counts as drift.

Measured on two cores: profiles made half an hour apart differ by 3 % in the median and by at most 11 %. Live steps of
an undisturbed server differ by up to 7 % (benchmarks/ptl.py). An engine whose core is shared is 30 % slower.
"""


@dataclass(frozen=True, slots=True)
class StepDrift:
    """Deviation of decode steps from the profile, for a range of batch sizes."""

    smallest: int
    largest: int
    num_samples: int
    live_s: float
    predicted_s: float
    """Medians over the newest samples, in seconds."""

    @property
    def ratio(self) -> float:
        return self.live_s / self.predicted_s

    @property
    def distance(self) -> float:
        """Distance of the ratio from 1, as a log: equal for twice and for half."""
        return abs(log(self.ratio))


class Drift:
    """Decode steps against a cost model, by ranges of batch sizes whose ends are powers of two.

    A range has drifted when the median of its newest `DRIFT_SAMPLES` ratios has. A message comes once for a cost model.
    """

    def __init__(self, cost: CostModel, *, model: str, profile: str, batch_sizes: Sequence[int] = ()) -> None:
        self._cost = cost
        self._model = model
        self._profile = profile
        self._batch_sizes = batch_sizes
        """Batch sizes that the profile has measured."""
        self._samples: dict[int, deque[tuple[float, float]]] = {}
        """(live, predicted) seconds, by bit length of the batch size."""
        self._said = False

    def add(self, batch_size: int, context_tokens: float, seconds: float) -> str | None:
        """Add one decode step. Returns a message for the log, at the first drift only."""
        samples = self._samples.setdefault(batch_size.bit_length(), deque(maxlen=DRIFT_SAMPLES))
        samples.append((seconds, self._cost.ptl(batch_size, context_tokens)))
        if self._said or len(samples) < DRIFT_SAMPLES or not _is_off(_range_of(batch_size.bit_length(), samples)):
            return None
        self._said = True
        return self._message(
            [found for found in self.ranges() if found.num_samples == DRIFT_SAMPLES and _is_off(found)]
        )

    def ranges(self) -> list[StepDrift]:
        return [_range_of(bits, samples) for bits, samples in sorted(self._samples.items())]

    def _message(self, off: Sequence[StepDrift]) -> str:
        times = "; ".join(
            f"batch sizes {found.smallest} to {found.largest}: {found.live_s * 1e3:.3g} ms live, "
            f"{found.predicted_s * 1e3:.3g} ms in the profile ({found.ratio:.2f}x)"
            for found in off
        )
        wanted: set[int] = set()
        for found in off:
            measured = {size for size in self._batch_sizes if found.smallest <= size <= found.largest}
            wanted |= measured or {found.smallest}
        return (
            f"decode steps have drifted from the profile {self._profile}: {times}. Costs and budgets that rest on "
            "it are off by as much. Measure those batch sizes again with the server's flags while the machine does "
            f"nothing else, then start the server anew: vllm-rollout profile {self._model} --output {self._profile} "
            f"--refresh --batch-sizes {','.join(map(str, sorted(wanted)))}"
        )


def _range_of(bits: int, samples: Sequence[tuple[float, float]]) -> StepDrift:
    live, predicted = median(live for live, _ in samples), median(predicted for _, predicted in samples)
    return StepDrift(1 << (bits - 1), (1 << bits) - 1, len(samples), live, predicted)


def _is_off(found: StepDrift) -> bool:
    return not 1 / (1 + DRIFT_SHARE) <= found.ratio <= 1 + DRIFT_SHARE
