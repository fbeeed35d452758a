"""An exception while a step is observed fails the observed candidates: the step goes on."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernel.core.test_internal_errors import PLANTED, fail
from tests.kernel.worker.runners import HIDDEN_SIZE, Row, RunnerV1, RunnerV2, made, new_request, step
from tests.parts.observing.observed import observe
from vllm_rollout.kernel.rules.types import NOT_FINITE
from vllm_rollout.kernel.wire import CandidateTag
from vllm_rollout.parts.observing.tracker.rows import RowsPart
from vllm_rollout.parts.observing.worker import runner as runner_module
from vllm_rollout.parts.observing.worker.part import ObservingWorker

RUNNERS = [(RunnerV1, False), (RunnerV1, True), (RunnerV2, False), (RunnerV2, True)]


@pytest.fixture(params=RUNNERS, ids=lambda each: f"{each[0].__name__}-{'async' if each[1] else 'sync'}")
def runner(request):
    cls, asynchronous = request.param
    return made((cls, cls is RunnerV2, False), observe, asynchronous=asynchronous)


IN_TRACKER = ["add", "start_step", "see_hidden_states", "observe"]


@pytest.mark.parametrize("method", IN_TRACKER)
def test_an_exception_of_the_tracker_fails_whom_it_observes(runner, monkeypatch, method):
    monkeypatch.setattr(runner.candidate_tracker, method, fail)
    new = (new_request("a", 3), new_request("b", 3, tagged=False))
    _, report = step(runner, [Row("a", 3, 3), Row("b", 3, 3)], new)
    assert report is not None
    assert list(report.failed) == ["a"]
    assert PLANTED in report.failed["a"]
    assert report.num_internal_errors
    monkeypatch.undo()
    _, report = step(runner, [Row("c", 3, 3), Row("b", 5, 5)], (new_request("c", 3),))
    assert not report.failed
    assert np.isfinite(report.confidence[0, 0]).tolist() == [True, False]


def test_a_candidate_whose_logits_are_not_finite_fails(runner, monkeypatch):
    """As those of a policy whose weights are broken: its tokens would be chance."""
    new = (new_request("a", 3), new_request("b", 3))
    new_logits = runner.new_logits

    def broken() -> Any:
        logits = new_logits()
        logits[1, 2] = float("nan")
        return logits

    assert not step(runner, [Row("a", 3, 3), Row("b", 3, 3)], new)[1].failed
    monkeypatch.setattr(runner, "new_logits", broken)
    assert step(runner, [Row("a", 4, 4), Row("b", 4, 4)])[1].failed == {"b": NOT_FINITE}


class Scores(RowsPart):
    """Observes candidates whose confidence is not wanted."""

    def observes(self, tag: CandidateTag) -> bool:
        return not tag.observed


def test_a_warm_up_that_fails_fails_whom_a_part_observes_and_no_other(runner, monkeypatch):
    calls: list[Any] = []
    monkeypatch.setattr(runner_module, "warm_up", lambda *arguments: calls.append(arguments) or fail())
    runner.model = SimpleNamespace(compute_logits=lambda hidden: hidden)
    for _ in range(2):  # the first time to measure its memory
        assert runner._dummy_sampler_run(torch.ones(2, HIDDEN_SIZE)) == "what vLLM answers"
    assert len(calls) == 1
    runner.candidate_tracker.parts = [Scores()]
    new = (new_request("a", 3, observed=False), new_request("b", 3), new_request("c", 3, tagged=False))
    _, report = step(runner, [Row("a", 3, 3), Row("b", 3, 3), Row("c", 3, 3)], new)
    assert report is not None
    assert report.failed == {"a": f"internal error in warming up: RuntimeError: {PLANTED}"}
    assert report.num_internal_errors == 1
    _, report = step(runner, [Row("b", 4, 4), Row("c", 4, 4)], finished=("a",))
    assert not report.failed
    come = new_request("d", 3, observed=False)
    come.request_id = "d"
    ObservingWorker(runner).put(come, b"statistics of a rank that observes")
    _, report = step(runner, [Row("b", 5, 5), Row("d", 4, 4)])
    assert list(report.failed) == ["d"]


def test_logits_that_all_ranks_must_gather_fail_a_warm_up_as_in_vllm(runner):
    """One rank that went on would wait for the others."""
    runner.model = SimpleNamespace(compute_logits=fail)
    with pytest.raises(RuntimeError, match=PLANTED):
        runner._dummy_sampler_run(torch.ones(2, HIDDEN_SIZE))
