"""Parts in a worker: hooks are called where a part has them, and an exception of a part stays with it."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.kernel.worker.test_runner import Bare, Row, RunnerV1, moved_to, new_request, new_ring
from vllm_rollout.adapter.faults import Faults
from vllm_rollout.adapter.weights import Changes
from vllm_rollout.kernel.wire import REPORT_ATTRIBUTE
from vllm_rollout.kernel.worker import ports
from vllm_rollout.kernel.worker.ports import HOOKS, WorkerPart, WorkerParts
from vllm_rollout.kernel.worker.runner import observe_runner
from vllm_rollout.parts.moving.wire import WorkerState


class Listener(WorkerPart):
    """Has every hook, and can be told to raise in one."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.raises_in = ""

    def _hear(self, hook: str, *args: Any) -> None:
        self.heard.append((hook, *args))
        if hook == self.raises_in:
            raise RuntimeError("planted")

    def see_step(self, step: Any) -> None:
        self._hear("see_step", step)

    def arrived(self, request: Any, output_token_ids: Any) -> None:
        self._hear("arrived", request.request_id, output_token_ids)

    def new_weights(self) -> None:
        self._hear("new_weights")

    def stop(self) -> None:
        self._hear("stop")

    def begin_again(self) -> None:
        self.heard.append(("begin_again",))


@pytest.fixture
def part() -> Listener:
    return Listener()


@pytest.fixture
def runner(part: Listener) -> RunnerV1:
    runner = RunnerV1()
    observe_runner(runner, new_ring(), v2=False, cpu=False)
    runner.parts = WorkerParts([("listener", part)], runner.observing.faults)
    return runner


def step(runner: RunnerV1, *new: Any) -> Any:
    scheduled = SimpleNamespace(rows=[Row("a", 3, 3)], scheduled_new_reqs=new, finished_req_ids=set())
    runner.execute_model(scheduled)
    return scheduled, runner.sample_tokens().__dict__[REPORT_ATTRIBUTE]


def test_a_part_hears_of_steps_and_of_weights_before_the_step_that_they_compute(runner, part, monkeypatch):
    monkeypatch.setattr(Changes, "num", 0)
    first, _ = step(runner, new_request("a", 3, 9))
    Changes.num += 1
    second, _ = step(runner)
    assert part.heard == [("see_step", first), ("new_weights",), ("see_step", second)]


def test_a_part_hears_of_candidates_that_have_run_elsewhere_and_of_the_end(part):
    target = Bare()
    target.parts = WorkerParts([("listener", part)])
    moved_to(target, WorkerState())
    target.parts.stop()
    assert part.heard == [("arrived", "a", [5]), ("stop",)]


@pytest.mark.parametrize("hook", HOOKS)
def test_an_exception_of_a_part_is_counted_and_later_parts_hear_it_too(hook):
    raising, other, faults = Listener(), Listener(), Faults()
    raising.raises_in = hook
    args = {"see_step": [1], "arrived": [SimpleNamespace(request_id="a"), [5]]}.get(hook, [])
    getattr(WorkerParts([("raising", raising), ("other", other)], faults), hook)(*args)
    assert [each[0] for each in raising.heard] == [hook, "begin_again"]
    assert [each[0] for each in other.heard] == [hook]
    assert faults.num == 1


def test_exceptions_of_a_part_are_reported(runner, part):
    part.raises_in = "see_step"
    _, report = step(runner, new_request("a", 3, 9))
    assert (report.failed, report.num_internal_errors) == ({}, 1)


def test_a_hook_that_a_part_does_not_have_is_not_called(monkeypatch):
    monkeypatch.setattr(WorkerPart, "see_step", lambda *_: pytest.fail("called"))
    WorkerParts([("silent", WorkerPart())]).see_step(None)


def test_a_part_that_has_nothing_to_do_in_a_worker_is_not_among_its_parts(part, monkeypatch):
    made = [("idle", lambda worker: None), ("listener", lambda worker: worker.part)]
    monkeypatch.setattr(ports, "faces", lambda face: made if face == "worker" else [])
    observed = SimpleNamespace(observing=SimpleNamespace(faults=Faults()))
    WorkerParts.of(SimpleNamespace(part=part, model_runner=observed)).stop()
    assert part.heard == [("stop",)]
