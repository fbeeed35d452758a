"""Times of engine steps as the scheduler sees them, with a clock that tests turn."""

from dataclasses import astuple
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from vllm_rollout.parts.shaping.core import DRIFT_INTERVAL_STEPS, MAX_RECORDED_STEPS, ShapingCore, StepTimes
from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve
from vllm_rollout.parts.shaping.rules.drift import DRIFT_SAMPLES, DRIFT_SHARE, Drift

COST = CostModel(((0, PTLCurve((1, 64), (0.010, 0.073))),))
"""9 ms, and one more per candidate."""
LOOK = DRIFT_INTERVAL_STEPS * DRIFT_SAMPLES
"""Decode steps that it takes to see a drift."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.num_reads = 0

    def __call__(self) -> float:
        self.num_reads += 1
        return self.now


class Timed(NamedTuple):
    """A dry run whose steps take as long as told, and what it has to say."""

    run: object
    clock: Clock
    times: StepTimes
    warnings: list[str]

    def step(self, seconds: float, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.clock.now += seconds
            assert self.run.step()


@pytest.fixture
def timed(new_run):
    def make(**kwargs) -> Timed:
        run, clock, warnings = new_run(**kwargs), Clock(), []
        part = run.scheduler.part(ShapingCore)
        part.step_times = StepTimes(clock, warnings.append)
        return Timed(run, clock, part.step_times, warnings)

    return make


def test_nobody_reads_the_clock_unless_asked(timed):
    idle = timed()
    idle.run.add("a", 5)
    idle.run.run()
    assert idle.clock.num_reads == 0
    assert idle.times.take() == []


def test_a_decode_step_is_the_interval_since_the_step_before(timed):
    run = timed()
    run.times.record(True)
    for name in "abc":
        run.run.add(name, 50)
    run.step(7.0)  # the prefill follows a wait of unknown length
    run.step(0.5)
    run.step(0.25)
    steps = run.times.take()
    assert [(step.batch_size, step.num_tokens, step.seconds) for step in steps] == [(3, 3, 0.5), (3, 3, 0.25)]
    assert run.times.take() == []


def test_the_context_is_the_mean_of_prompt_and_output_so_far(timed):
    run = timed()
    run.times.record(True)
    run.run.add("a", 50, prompt_token_ids=[5] * 20)
    run.run.add("b", 50, prompt_token_ids=[6] * 40)
    run.step(1.0, 4)
    # Three steps after the prefill, which made the first token.
    assert [step.context_tokens for step in run.times.take()] == [31, 32, 33]


def test_a_step_that_computes_a_prompt_is_no_decode_step(timed):
    run = timed()
    run.times.record(True)
    run.run.add("a", 50)
    run.step(1.0, 3)
    run.times.take()
    run.run.add("b", 50, prompt_token_ids=[6] * 40)
    run.step(1.0, 3)
    # In the asynchronous loop the step with b's prompt is already one behind.
    kinds = {(step.batch_size, step.num_tokens) for step in run.times.take()}
    assert (2, 41) in kinds
    assert kinds <= {(1, 1), (2, 41), (2, 2)}


def test_a_wait_for_work_is_not_a_step(timed):
    run = timed()
    run.times.record(True)
    run.run.add("a", 3)
    run.run.run()
    run.times.take()
    run.clock.now += 1000
    run.run.add("b", 5)
    run.step(1.0, 3)
    assert [step.seconds for step in run.times.take()] == [1.0, 1.0]


def test_an_interval_that_was_interrupted_is_left_out(timed):
    run = timed()
    run.times.record(True)
    run.run.add("a", 50)
    run.step(1.0, 2)
    run.times.interrupt()
    run.step(99.0)
    run.step(2.0)
    assert [step.seconds for step in run.times.take()] == [1.0, 2.0]


def test_a_recording_keeps_the_newest_steps():
    cached = SimpleNamespace(num_reqs=1)
    output = SimpleNamespace(total_num_scheduled_tokens=1, num_scheduled_tokens={"a": 1}, scheduled_cached_reqs=cached)
    clock = Clock()
    times = StepTimes(clock)
    times.record(True)
    for number in range(MAX_RECORDED_STEPS + 10):
        clock.now += number
        times.step(output, [SimpleNamespace(num_tokens=10)])
    steps = times.take()
    assert len(steps) == MAX_RECORDED_STEPS
    assert steps[-1].seconds == MAX_RECORDED_STEPS + 9


def test_recording_ends_when_told(timed):
    run = timed()
    run.times.record(True)
    run.run.add("a", 50)
    run.step(1.0, 3)
    run.times.record(False)
    reads = run.clock.num_reads
    run.step(1.0, 3)
    assert run.times.take() == []
    assert run.clock.num_reads == reads


def watched(timed, *, num_candidates=3):
    run = timed(max_num_seqs=64)
    run.times.compare_with(Drift(COST, model="some-model", profile="ptl.json", batch_sizes=(1, 2, 3, 4, 6)))
    for number in range(num_candidates):
        run.run.add(str(number), 3999, prompt_token_ids=[number + 3] * 20)
    return run


def test_live_steps_like_the_profile_are_no_drift(timed):
    run = watched(timed)
    run.step(0.012 * (1 + DRIFT_SHARE * 0.9), 3 * LOOK)
    assert run.warnings == []
    ((smallest, largest, samples, live, predicted),) = map(astuple, run.times.drift())
    assert (smallest, largest, samples) == (2, 3, DRIFT_SAMPLES)
    assert live == pytest.approx(0.012 * (1 + DRIFT_SHARE * 0.9))
    assert predicted == pytest.approx(0.012)


@pytest.mark.parametrize("factor", [1 + 2 * DRIFT_SHARE, 1 / (1 + 2 * DRIFT_SHARE)])
def test_a_drift_is_said_once_with_both_times_and_the_way_out(timed, factor):
    run = watched(timed)
    run.step(0.012, LOOK // 2)
    run.step(0.012 * factor, 3 * LOOK)
    (warning,) = run.warnings
    assert "batch sizes 2 to 3" in warning
    assert f"{12 * factor:.3g} ms live, 12 ms in the profile" in warning
    assert "vllm-rollout profile some-model --output ptl.json --refresh --batch-sizes 2,3" in warning


def test_a_few_slow_steps_are_no_drift(timed):
    run = watched(timed)
    for _ in range(6):
        run.step(0.012, LOOK // 2 + DRIFT_INTERVAL_STEPS)
        run.step(0.5, LOOK // 4)
    assert run.warnings == []


def test_most_steps_are_not_looked_at(timed):
    run = watched(timed)
    run.step(0.012, LOOK)
    assert run.clock.num_reads <= 2 * DRIFT_SAMPLES


def test_recording_and_comparing_do_not_disturb_each_other(timed):
    run = watched(timed)
    run.step(0.012, LOOK // 2)
    run.times.record(True)
    run.step(0.012, 10)
    run.times.record(False)
    run.step(0.012, LOOK)
    assert [found.num_samples for found in run.times.drift()] == [DRIFT_SAMPLES]
