"""Parts in a worker: hooks are called where a part has them, and an exception of a part stays with it."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.kernel.worker.test_runner import Row, RunnerV1, new_request
from vllm_rollout.adapter.faults import Faults
from vllm_rollout.adapter.weights import Changes
from vllm_rollout.kernel.tracker.rows import RowsPart, SeenRows
from vllm_rollout.kernel.wire import REPORT_ATTRIBUTE, RunnerReport
from vllm_rollout.kernel.worker import ports
from vllm_rollout.kernel.worker.ports import HOOKS, WorkerPart, WorkerParts
from vllm_rollout.kernel.worker.runner import observe_runner


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
    observe_runner(runner, True, v2=False, cpu=False)
    runner.join(WorkerParts([("listener", part)], runner.observing.faults))
    return runner


def step(runner: RunnerV1, *new: Any) -> Any:
    scheduled = SimpleNamespace(rows=[Row("a", 3, 3)], scheduled_new_reqs=new, finished_req_ids=set())
    runner.execute_model(scheduled)
    return scheduled, runner.sample_tokens().__dict__[REPORT_ATTRIBUTE]


def test_a_part_hears_of_steps_and_of_weights_before_the_step_that_they_compute(runner, part, monkeypatch):
    monkeypatch.setattr(Changes, "num", 0)
    first, _ = step(runner, new_request("a", 3))
    Changes.num += 1
    second, _ = step(runner)
    assert part.heard == [("see_step", first), ("new_weights",), ("see_step", second)]


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
    _, report = step(runner, new_request("a", 3))
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


class Sums(RowsPart):
    """Wants every candidate, and reports the sum of its hidden state in place of its mean confidence."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def observes(self, tag: Any) -> bool:
        return True

    def begin(self, slot: int, tag: Any, adapter: str) -> None:
        self.heard.append(("begin", tag.group_id, adapter))
        self.num_wanting += 1

    def end(self, slot: int, request_id: str) -> None:
        self.heard.append(("end", request_id))
        self.num_wanting -= 1

    def choose(self, rows: SeenRows) -> list[np.ndarray] | None:
        return [rows.seen.logit_rows] if rows.hidden is not None else None

    def see_rows(self, rows: SeenRows, chosen: Any) -> "Shown":
        return Shown(rows.hidden.index_select(0, rows.states_at(chosen[0])).sum(dim=1))


class Shown(NamedTuple):
    """Values of one step."""

    sums: torch.Tensor

    def to_host(self) -> "Shown":
        return self

    def add_to(self, report: RunnerReport) -> RunnerReport:
        return report._replace(parts={"sums": self.sums.tolist()})


def test_without_a_part_for_rows_confidences_are_reported_and_no_hidden_state_is_kept(runner):
    _, report = step(runner, new_request("a", 3))
    assert np.isfinite(report.confidence).all()
    assert report.parts == {}


def test_parts_see_the_rows_of_candidates_that_they_want_each_its_own_arrays():
    parts = [WorkerPart(), WorkerPart()]
    for part in parts:
        part.rows = Sums()
    runner = RunnerV1()
    observe_runner(runner, True, v2=False, cpu=False)
    runner.join(WorkerParts([("one", parts[0]), ("other", parts[1])], runner.observing.faults))
    _, report = step(runner, new_request("a", 3, observed=False))
    assert report.parts["sums"] == [runner.hidden[0].sum().item()]
    assert np.isfinite(report.confidence).all()
    runner.candidate_tracker.discard("a")
    for part in parts:
        assert part.rows.heard == [("begin", "g", ""), ("end", "a")]


class Luggage(WorkerPart):
    """Has data about a candidate with the id `a`."""

    def __init__(self) -> None:
        self.came: list[Any] = []

    def take(self, request_id: str) -> bytes:
        return b"data" if request_id == "a" else b""

    def put(self, request_id: str, data: bytes) -> None:
        self.came.append((request_id, data))


def test_data_of_parts_travel_with_a_candidate():
    one, other = Luggage(), Luggage()
    here, there = WorkerParts([("one", one), ("none", WorkerPart())]), WorkerParts([("other", other), ("one", one)])
    assert here.take("b") == {}
    there.put("a", here.take("a"))
    assert (one.came, other.came) == ([("a", b"data")], [])
