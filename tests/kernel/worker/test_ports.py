"""Parts in a worker: hooks are called where a part has them, and an exception of a part stays with it."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.kernel.worker.runners import Row, RunnerV1, step
from vllm_rollout.adapter.faults import Faults
from vllm_rollout.adapter.weights import Changes
from vllm_rollout.kernel.worker import ports
from vllm_rollout.kernel.worker.ports import WorkerPart, WorkerParts
from vllm_rollout.kernel.worker.runner import extend_runner

ROWS = [Row("a", 3, 3)]


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
    extend_runner(runner, v2=False, cpu=False)
    runner.join(WorkerParts([("listener", part)], runner.faults))
    return runner


def test_a_part_hears_of_steps_and_of_weights_before_the_step_that_they_compute(runner, part, monkeypatch):
    monkeypatch.setattr(Changes, "num", 0)
    first, second = (SimpleNamespace(rows=ROWS, number=number) for number in range(2))
    runner.execute_model(first)
    Changes.num += 1
    runner.execute_model(second)
    assert part.heard == [("see_step", first), ("new_weights",), ("see_step", second)]


@pytest.mark.parametrize("hook", ["see_step", "arrived", "new_weights", "stop"])
def test_an_exception_of_a_part_is_counted_and_later_parts_hear_it_too(hook):
    raising, other, faults = Listener(), Listener(), Faults()
    raising.raises_in = hook
    args = {"see_step": [1], "arrived": [SimpleNamespace(request_id="a"), [5]]}.get(hook, [])
    WorkerParts([("raising", raising), ("other", other)], faults).call(getattr(WorkerPart, hook), *args)
    assert [each[0] for each in raising.heard] == [hook, "begin_again"]
    assert [each[0] for each in other.heard] == [hook]
    assert faults.num == 1


def test_exceptions_of_a_part_are_reported(runner, part):
    part.raises_in = "see_step"
    _, report = step(runner, ROWS)
    assert (report.failed, report.num_internal_errors) == ({}, 1)


def test_a_hook_that_a_part_does_not_have_is_not_called(monkeypatch):
    def see_step(part: WorkerPart, step: Any) -> None:
        pytest.fail("called")

    monkeypatch.setattr(WorkerPart, "see_step", see_step)
    WorkerParts([("silent", WorkerPart())]).call(WorkerPart.see_step, None)


def test_a_part_that_has_nothing_to_do_in_a_worker_is_not_among_its_parts(part, monkeypatch):
    made = [("idle", lambda worker: None), ("listener", lambda worker: worker.part)]
    monkeypatch.setattr(ports, "faces", lambda face: made if face == "worker" else [])
    WorkerParts.of(SimpleNamespace(part=part, model_runner=SimpleNamespace(faults=Faults()))).call(WorkerPart.stop)
    assert part.heard == [("stop",)]


class Luggage(WorkerPart):
    """Has data about a candidate with the id `a`."""

    def __init__(self) -> None:
        self.came: list[Any] = []

    def take(self, request_ids: Any) -> dict[str, bytes]:
        return {request_id: b"data" for request_id in request_ids if request_id == "a"}

    def put(self, request: Any, data: bytes) -> None:
        self.came.append((request.request_id, data))


def test_data_of_parts_travel_with_a_candidate():
    one, other = Luggage(), Luggage()
    here, there = WorkerParts([("one", one), ("none", WorkerPart())]), WorkerParts([("other", other), ("one", one)])
    taken = here.take(["a", "b"])
    assert taken["b"] == {}
    there.put(SimpleNamespace(request_id="a"), taken["a"])
    assert (one.came, other.came) == ([("a", b"data")], [])
