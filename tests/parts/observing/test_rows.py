"""Parts that see rows of candidates."""

from typing import Any, NamedTuple

import numpy as np
import torch

from tests.kernel.worker.runners import Row, RunnerV1, new_request, step
from tests.parts.observing.observed import observe
from vllm_rollout.kernel.wire import RunnerReport
from vllm_rollout.kernel.worker.ports import WorkerPart, WorkerParts
from vllm_rollout.parts.observing.tracker.rows import RowsPart, SeenRows
from vllm_rollout.parts.observing.worker.runner import RowsWorkerPart

ROWS = [Row("a", 3, 3)]


def observed_runner(*parts: tuple[str, WorkerPart]) -> RunnerV1:
    runner = RunnerV1()
    observe(runner, v2=False, cpu=False)
    runner.join(WorkerParts(parts, runner.faults))
    return runner


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


def test_without_a_part_for_rows_confidences_are_reported_and_no_hidden_state_is_kept():
    _, report = step(observed_runner(), ROWS, (new_request("a", 3),))
    assert np.isfinite(report.confidence).all()
    assert report.parts == {}


def test_parts_see_the_rows_of_candidates_that_they_want_each_its_own_arrays():
    parts = [RowsWorkerPart(), RowsWorkerPart()]
    for part in parts:
        part.rows = Sums()
    runner = observed_runner(("one", parts[0]), ("none", WorkerPart()), ("other", parts[1]))
    _, report = step(runner, ROWS, (new_request("a", 3, observed=False),))
    assert report.parts["sums"] == [runner.hidden[0].sum().item()]
    assert np.isfinite(report.confidence).all()
    runner.candidate_tracker.discard("a")
    for part in parts:
        assert part.rows.heard == [("begin", "g", ""), ("end", "a")]
