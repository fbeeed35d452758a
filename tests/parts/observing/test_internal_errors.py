"""An exception while a step is observed fails the observed candidates: the step goes on."""

from typing import Any

import numpy as np
import pytest

from tests.kernel.core.test_internal_errors import PLANTED, fail
from tests.kernel.worker.runners import Row, RunnerV1, RunnerV2, made, new_request, step
from tests.parts.observing.observed import observe
from vllm_rollout.kernel.rules.types import NOT_FINITE

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
