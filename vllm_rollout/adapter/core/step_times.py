"""How long engine steps take, as the scheduler sees them: for profiles, and to see that a profile has come true.

Invariant: when nobody asked, a step costs one attribute test.

The time of a step is the interval between its update and the one before: what a candidate waits for its next token,
scheduling, model and processing of outputs together. A step none of whose requests was in an earlier one may have
followed an idle wait and is left out. A step that computes one token per request is a pure decode step; any other
prefills.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple
from statistics import fmean, median
from typing import Any, NamedTuple

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_rollout.config import DRIFT_INTERVAL_STEPS, DRIFT_SAMPLES, DRIFT_SHARE, MAX_RECORDED_STEPS
from vllm_rollout.group.cost import CostModel, PTLCurve
from vllm_rollout.server.engine import StepDrift

logger = init_logger("vllm.vllm_rollout")


class StepTime(NamedTuple):
    """One engine step."""

    batch_size: int
    num_tokens: int
    """Computed in the step; more than `batch_size` when it prefills."""
    context_tokens: float
    """Prompt and output so far, mean over the requests that are still running."""
    seconds: float


class StepTimes:
    """Records steps, or compares them with a cost model, or neither."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self._clock = clock
        self._warn = warn
        self._active = False
        self._before: float | None = None
        """Time of the update before; None when that was not looked at."""
        self._steps: deque[StepTime] | None = None
        self._drift: Drift | None = None
        self._skip = 0
        """Steps until the next one that drift looks at."""

    def step(self, scheduler_output: SchedulerOutput, running: Sequence[Request]) -> None:
        """A step was processed; `running` are the requests that go on."""
        if not self._active:
            return
        if self._steps is None:
            self._skip -= 1
            if self._skip > 1:
                return
        now = self._clock()
        before, self._before = self._before, now
        if before is None or not running or not scheduler_output.scheduled_cached_reqs.num_reqs:
            return
        num_tokens = scheduler_output.total_num_scheduled_tokens
        batch_size = len(scheduler_output.num_scheduled_tokens)
        # The step's own token is in there already.
        context = fmean(request.num_tokens for request in running) - 1
        seconds = now - before
        if self._steps is not None:
            self._steps.append(StepTime(batch_size, num_tokens, context, seconds))
        if self._drift is not None and self._skip <= 0 and num_tokens == batch_size:
            self._skip, self._before = DRIFT_INTERVAL_STEPS, None
            message = self._drift.add(batch_size, context, seconds)
            if message is not None:
                self._warn(message)

    def interrupt(self) -> None:
        """The next step's interval is not its own: generation is paused or resumed."""
        self._before = None

    def record(self, on: bool) -> None:
        """Keep every step from now on, the newest `MAX_RECORDED_STEPS` of them; or stop and forget."""
        self._steps = deque(maxlen=MAX_RECORDED_STEPS) if on else None
        self._restart()

    def take(self) -> list[StepTime]:
        """The steps recorded since the last call."""
        steps = list(self._steps or ())
        if self._steps is not None:
            self._steps.clear()
        return steps

    def compare_with(self, drift: Drift | None) -> None:
        """Look at every `DRIFT_INTERVAL_STEPS`th decode step from now on; None ends it."""
        self._drift = drift
        self._restart()

    def drift(self) -> list[StepDrift]:
        return [] if self._drift is None else self._drift.ranges()

    def _restart(self) -> None:
        self._active = self._steps is not None or self._drift is not None
        self._before, self._skip = None, DRIFT_INTERVAL_STEPS


class Drift:
    """Decode steps against a cost model, by ranges of batch sizes whose ends are powers of two.

    A range is off when the median of its newest `DRIFT_SAMPLES` ratios is; that is said once for a cost model.
    """

    def __init__(self, cost: CostModel, *, model: str, profile: str, batch_sizes: Sequence[int] = ()) -> None:
        self._cost = cost
        self._model = model
        self._profile = profile
        self._batch_sizes = batch_sizes
        """Those the profile has measured."""
        self._samples: dict[int, deque[tuple[float, float]]] = {}
        """Live and predicted seconds, by bit length of the batch size."""
        self._said = False

    def add(self, batch_size: int, context_tokens: float, seconds: float) -> str | None:
        """One decode step; answers what is to be said, if anything."""
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
        wanted = sorted({size for found in off for size in self._sizes_to_measure(found)})
        return (
            f"decode steps have drifted from the profile {self._profile}: {times}. Costs and budgets that rest on "
            "it are off by as much. Measure those batch sizes again with the server's flags while the machine does "
            f"nothing else, then start the server anew: vllm-rollout profile {self._model} --output {self._profile} "
            f"--refresh --batch-sizes {','.join(map(str, wanted))}"
        )

    def _sizes_to_measure(self, found: StepDrift) -> list[int]:
        measured = [size for size in self._batch_sizes if found.smallest <= size <= found.largest]
        return measured or [found.smallest]


def _range_of(bits: int, samples: Sequence[tuple[float, float]]) -> StepDrift:
    live, predicted = median(live for live, _ in samples), median(predicted for _, predicted in samples)
    return StepDrift(1 << (bits - 1), (1 << bits) - 1, len(samples), live, predicted)


def _is_off(found: StepDrift) -> bool:
    return not 1 / (1 + DRIFT_SHARE) <= found.ratio <= 1 + DRIFT_SHARE


class StepTimeCalls:
    """What API processes ask of an engine core's step times; results are plain lists and numbers."""

    def __init__(self, step_times: StepTimes) -> None:
        self._step_times = step_times

    def record_steps(self, on: bool) -> None:
        self._step_times.record(on)

    def take_steps(self) -> list[list[float]]:
        """`[batch size, tokens, context, seconds]` of each step since the last call."""
        return [list(step) for step in self._step_times.take()]

    def set_cost_model(
        self, cost: Sequence[Any] | None, model: str = "", profile: str = "", batch_sizes: Sequence[int] = ()
    ) -> None:
        """Compare with a cost model (`plain_cost_model`) from now on; None ends it. The rest is for the warning."""
        drift = cost and Drift(cost_model_of(cost), model=model, profile=profile, batch_sizes=batch_sizes)
        self._step_times.compare_with(drift or None)

    def step_drift(self) -> list[list[float]]:
        """`[smallest batch size, largest, samples, live seconds, predicted seconds]` by range, ascending."""
        return [list(astuple(found)) for found in self._step_times.drift()]


STEP_TIME_OPERATIONS = (
    StepTimeCalls.record_steps,
    StepTimeCalls.take_steps,
    StepTimeCalls.set_cost_model,
    StepTimeCalls.step_drift,
)


def plain_cost_model(cost: CostModel) -> list[Any]:
    """A cost model as lists and numbers, for `set_cost_model`."""
    curves = [[context, list(curve.batch_sizes), list(curve.seconds)] for context, curve in cost.curves]
    return [curves, cost.prefill_s_per_token, cost.step_prefill_s, cost.max_num_seqs]


def cost_model_of(plain: Sequence[Any]) -> CostModel:
    curves, *others = plain
    return CostModel(
        tuple((context, PTLCurve(tuple(sizes), tuple(seconds))) for context, sizes, seconds in curves), *others
    )
