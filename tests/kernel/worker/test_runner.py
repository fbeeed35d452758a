"""The runner mixins on runners without a model: what parts hear, and what comes with the step's output."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from tests.kernel.worker.runners import KINDS, Row, RunnerV2, Verifying, made, step
from vllm_rollout.adapter.weights import Changes
from vllm_rollout.kernel.wire import REPORT_ATTRIBUTE
from vllm_rollout.kernel.worker.runner import ReportedOutput, extend_runner


@pytest.fixture(params=KINDS, ids=["v1", "v1-cpu", "v2"])
def new_runner(request):
    """Makes a runner of each generation."""
    return partial(made, request.param, extend_runner)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_step_says_which_weights_computed_it(new_runner, monkeypatch, asynchronous):
    monkeypatch.setattr(Changes, "num", 0)
    runner, rows = new_runner(asynchronous=asynchronous), [Row("plain", 3, 3)]
    assert step(runner, rows)[1] is None, "no weights have come"
    monkeypatch.setattr(Changes, "num", 2)
    runner.execute_model(SimpleNamespace(rows=rows, scheduled_new_reqs=(), finished_req_ids=set()))
    output = runner.sample_tokens()
    assert isinstance(output, ReportedOutput) == asynchronous
    monkeypatch.setattr(Changes, "num", 3)  # before the output is read
    if asynchronous:
        assert output.get_kv_connector_output() == "connector"
        output = output.get_output()
    report = output.__dict__[REPORT_ATTRIBUTE]
    assert (report.weights, report.failed) == (2, {})
    assert np.isnan(report.confidence).all()
    assert step(runner, rows)[1].weights == 3


def test_exceptions_of_ours_are_reported(new_runner):
    runner = new_runner()
    runner.faults.caught("a test", RuntimeError("planted"))
    assert step(runner, [Row("plain", 3, 3)])[1].num_internal_errors == 1


def test_a_step_of_no_drafts_is_sampled_as_one_without_them():
    runner = Verifying()
    extend_runner(runner, v2=False, cpu=True)
    runner.num_drafted, runner.num_sampled = (0,), (1,)
    step(runner, [Row("a", 3, 3)])
    assert not runner.is_verifying
    runner.num_drafted = (1,)
    step(runner, [Row("a", 4, 4)])
    assert runner.is_verifying


def test_the_class_of_a_runner_changes_but_not_what_it_is():
    runner = RunnerV2()
    extend_runner(runner, v2=True, cpu=False)
    assert isinstance(runner, RunnerV2)
    assert type(runner).__name__ == "RolloutRunnerV2"
