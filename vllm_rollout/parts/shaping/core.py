"""The part in the engine core: admission by known lengths, and times of engine steps.

The times are for profiles, and to compare a profile with real steps.

Invariant: if nothing is recorded or compared, a step costs one attribute test.

The time of a step is the interval between its update and the one before. It is a candidate's wait for its next token:
scheduling, model and processing of outputs together. If none of a step's requests was in an earlier step, the step may
have followed an idle wait and is left out. A step that computes one token per request is a pure decode step. Any other
step prefills.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, ClassVar

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from vllm_rollout.adapter.names import learned_name
from vllm_rollout.kernel.core.ports import Answers, CorePart
from vllm_rollout.parts.shaping.calls import (
    LENGTH_HISTORY,
    OBSERVE_LENGTHS,
    RECORD_STEPS,
    SET_COST_MODEL,
    STEP_DRIFT,
    TAKE_STEPS,
    CostToCompare,
    LengthsToLookUp,
    ObservedGroup,
)
from vllm_rollout.parts.shaping.rules.admission import most_running
from vllm_rollout.parts.shaping.rules.cost import StepTime
from vllm_rollout.parts.shaping.rules.drift import Drift, StepDrift
from vllm_rollout.parts.shaping.rules.history import LENGTHS
from vllm_rollout.parts.shaping.rules.moments import LengthStatistics

MAX_RECORDED_STEPS = 65_536
"""Newest engine steps that a recording keeps (5 MB)."""
DRIFT_INTERVAL_STEPS = 32
"""One decode step in this many is compared with the profile: less than a microsecond per step."""

logger = init_logger("vllm.vllm_rollout")


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
        """Time of the update before. None if it was not measured."""
        self._steps: deque[StepTime] | None = None
        self._drift: Drift | None = None
        self._skip = 0
        """Steps until the next one that is compared."""

    def step(self, scheduler_output: SchedulerOutput, running: Sequence[Request]) -> None:
        """Note that a step was processed. `running`: the requests that continue."""
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
        # The count already includes the step's own token.
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
        """Drop the next step's interval, because generation is paused or resumed."""
        self._before = None

    def record(self, on: bool) -> None:
        """Start to keep every step, the newest `MAX_RECORDED_STEPS` of them. False: stop and drop them."""
        self._steps = deque(maxlen=MAX_RECORDED_STEPS) if on else None
        self._restart()

    def take(self) -> list[StepTime]:
        """The steps recorded since the last call."""
        steps = list(self._steps or ())
        if self._steps is not None:
            self._steps.clear()
        return steps

    def compare_with(self, drift: Drift | None) -> None:
        """Compare every `DRIFT_INTERVAL_STEPS`th decode step from now on. None ends it."""
        self._drift = drift
        self._restart()

    def drift(self) -> list[StepDrift]:
        return [] if self._drift is None else self._drift.ranges()

    def _restart(self) -> None:
        self._active = self._steps is not None or self._drift is not None
        self._before, self._skip = None, DRIFT_INTERVAL_STEPS


def _observe_lengths(core: EngineCore, group: ObservedGroup) -> None:
    memory = core.scheduler.group_steps.memories.of(group.adapter)
    if memory is not None and (lengths := LENGTHS.of(memory)) is not None:
        lengths.observe(group.key, group.lengths)


def _length_history(core: EngineCore, wanted: LengthsToLookUp) -> LengthStatistics:
    lengths = LENGTHS.of(core.scheduler.group_steps.memories.known(wanted.adapter) or {})
    if lengths is None:
        return LengthStatistics(None, [None] * len(wanted.keys))
    return lengths.statistics(wanted.keys)


def _step_times(core: EngineCore) -> StepTimes:
    times: StepTimes = core.scheduler.part(ShapingCore).step_times
    return times


def _set_cost_model(core: EngineCore, wanted: CostToCompare | None) -> None:
    drift = None
    if wanted is not None:
        drift = Drift(wanted.cost, model=wanted.model, profile=wanted.profile, batch_sizes=wanted.batch_sizes)
    _step_times(core).compare_with(drift)


class ShapingCore(CorePart):
    """Overrides: answers, most_running, stepped, interrupted, begin_again."""

    answers: ClassVar[Answers] = {
        OBSERVE_LENGTHS: _observe_lengths,
        LENGTH_HISTORY: _length_history,
        RECORD_STEPS: lambda core, on: _step_times(core).record(on),
        TAKE_STEPS: lambda core, _: _step_times(core).take(),
        SET_COST_MODEL: _set_cost_model,
        STEP_DRIFT: lambda core, _: _step_times(core).drift(),
    }

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.step_times = StepTimes()

    def most_running(self, first: Request) -> int | None:
        """None if no lengths are known."""
        scheduler = self._scheduler
        lengths = LENGTHS.of(scheduler.group_steps.memories.known(learned_name(first.lora_request)) or {})
        if lengths is None or (mean := lengths.mean) is None:
            return None
        num_free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        free_tokens = num_free * scheduler.block_size // len(scheduler.kv_cache_config.kv_cache_groups)
        return most_running(free_tokens, min(mean, first.max_tokens))  # it cannot become longer than this

    def stepped(self, step: SchedulerOutput) -> None:
        self.step_times.step(step, self._scheduler.running)

    def interrupted(self) -> None:
        self.step_times.interrupt()

    def begin_again(self) -> None:
        self.step_times = StepTimes()
