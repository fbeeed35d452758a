"""The runner mixins on runners without a model: what they show the tracker, and what comes with the step's output."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from vllm.v1.outputs import ModelRunnerOutput

from tests.kernel.worker.runners import (
    HIDDEN_SIZE,
    KINDS,
    VOCAB_SIZE,
    Row,
    RunnerV1,
    RunnerV2,
    Sampler,
    Verifying,
    made,
    new_request,
    step,
)
from tests.parts.observing.observed import called, observe
from vllm_rollout.adapter.weights import Changes
from vllm_rollout.kernel.wire import REPORT_ATTRIBUTE, RunnerReport
from vllm_rollout.kernel.worker.runner import ReportedOutput
from vllm_rollout.parts.observing.tracker import warm_up as warm_up_module
from vllm_rollout.parts.observing.tracker.ops import token_confidence
from vllm_rollout.parts.observing.tracker.step_values import StepValues
from vllm_rollout.parts.observing.tracker.warm_up import warm_up
from vllm_rollout.parts.observing.worker import runner as runner_module
from vllm_rollout.parts.observing.worker.runner import observe_sampler

WEIGHT = torch.ones(HIDDEN_SIZE, VOCAB_SIZE)


@pytest.fixture(params=KINDS, ids=["v1", "v1-cpu", "v2"])
def new_runner(request):
    """Makes an observed runner of each generation, whose outputs are read unless told otherwise."""
    return lambda is_read=True, **options: made(request.param, partial(observe, is_read=is_read), **options)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_step_says_which_weights_computed_it(new_runner, monkeypatch, asynchronous):
    monkeypatch.setattr(Changes, "num", 0)
    runner = new_runner(asynchronous=asynchronous)
    rows, new = [Row("a", 3, 3), Row("plain", 3, 3)], (new_request("a", 3),)
    assert step(runner, rows, new)[1].weights == 0
    assert step(runner, rows[1:])[1] is None, "nobody is observed, and no weights have come"
    monkeypatch.setattr(Changes, "num", 2)
    runner.execute_model(SimpleNamespace(rows=rows[1:], scheduled_new_reqs=(), finished_req_ids=set()))
    output = runner.sample_tokens()
    monkeypatch.setattr(Changes, "num", 3)  # before the output is read
    output = output.get_output() if asynchronous else output
    assert output.__dict__[REPORT_ATTRIBUTE].weights == 2
    assert step(runner, rows)[1].weights == 3


def test_an_unfinished_prefill_is_left_out(new_runner):
    runner = new_runner()
    _, report = step(runner, [Row("a", 2, 3)], (new_request("a", 3),))
    assert report is None
    _, report = step(runner, [Row("a", 3, 3)])
    assert np.isfinite(report.confidence).all()


def test_without_a_candidate_nothing_rides_on_the_output(new_runner):
    runner = new_runner()
    _, report = step(runner, [Row("plain", 3, 3)], (new_request("plain", 3, tagged=False),))
    assert report is None
    _, report = step(runner, [Row("plain", 4, 4), Row("a", 3, 3)], (new_request("a", 3),))
    assert report is not None
    assert report.parts == {}
    _, report = step(runner, [Row("plain", 5, 5)], finished=("a",))
    assert report is None
    assert len(runner.candidate_tracker) == 0


def test_a_request_id_that_ends_and_begins_in_one_step_begins_anew(new_runner):
    runner = new_runner()
    step(runner, [Row("a", 3, 3)], (new_request("a", 3),))
    _, report = step(runner, [Row("a", 5, 5)], (new_request("a", 5),), finished=("a",))
    assert report.confidence[1, 0, 0] == 0, "the deviation of one token"


def test_a_rank_whose_outputs_nobody_reads_observes_nothing(new_runner):
    runner = new_runner(is_read=False)
    _, report = step(runner, [Row("a", 3, 3)], (new_request("a", 3),))
    assert report is None
    assert len(runner.candidate_tracker) == 0
    _, report = step(runner, [Row("b", 3, 3)], (new_request("b", 3),), finished=("a",))
    assert report is None


def test_a_candidate_that_nobody_reads_is_not_observed(new_runner):
    runner = new_runner()
    new = (new_request("unread", 3, observed=False), new_request("read", 3))
    _, report = step(runner, [Row("unread", 3, 3), Row("read", 3, 3)], new)
    assert np.isnan(report.confidence[0, 0]).tolist() == [True, False]
    _, report = step(runner, [Row("unread", 4, 4)])
    assert report is None


def test_tokens_computed_again_after_a_reset_of_the_prefix_cache_count_once(new_runner):
    runner = new_runner()
    step(runner, [Row("a", 3, 3)], (new_request("a", 3),))
    step(runner, [Row("a", 4, 4)])
    step(runner, [Row("a", 5, 5)])  # dropped by the scheduler, which resets in this moment
    _, report = step(runner, [Row("a", 5, 5)], (new_request("a", 3),))
    seen = runner.all_logits
    assert_confidence(report, seen[0], seen[1], seen[3])


def assert_confidence(report: RunnerReport, *logits: torch.Tensor) -> None:
    """The first row has the confidence of these tokens.

    A last bit of one token moves mean and deviation by as much, however small the deviation is.
    """
    expected = token_confidence(torch.cat(logits), torch.arange(len(logits)))
    mean, deviation = report.confidence[:, 0, 0].tolist()
    error = 1e-5 * expected.mean().item()
    assert mean == pytest.approx(expected.mean().item(), abs=error)
    assert deviation == pytest.approx(expected.std(correction=0).item(), abs=error)


class OnDevice(NamedTuple):
    """Step values that are not on the host yet."""

    values: StepValues
    log: list[str]
    on_host = False

    def to_host(self) -> StepValues:
        self.log.append("copy")
        return self.values


class Event:
    log: list[str]

    def __init__(self, blocking: bool) -> None:
        assert blocking

    def record(self) -> None:
        self.log.append("record")

    def synchronize(self) -> None:
        self.log.append("wait")


def test_the_synchronous_loop_waits_for_values_that_are_on_a_device(monkeypatch):
    log: list[str] = []
    Event.log = log
    monkeypatch.setattr(torch.cuda, "Event", Event)
    runner = RunnerV1()
    observe(runner, v2=False, cpu=False)
    runner.answer = lambda: set_aside(runner, log)
    _, report = step(runner, [Row("a", 3, 3)], (new_request("a", 3),))
    assert log == ["copy", "record", "wait"]
    assert np.isfinite(report.confidence).all()


def set_aside(runner: RunnerV1, log: list[str]) -> ModelRunnerOutput:
    runner.candidate_tracker.step = OnDevice(runner.candidate_tracker.step, log)
    return RunnerV1.answer(runner)


def test_a_prompt_of_embeddings_has_its_length_too(new_runner):
    runner = new_runner()
    request = new_request("a", 0)
    request.prompt_token_ids, request.prompt_embeds = None, torch.zeros(4, HIDDEN_SIZE)
    step(runner, [Row("a", 4, 4)], (request,))
    _, report = step(runner, [Row("a", 5, 5)])
    assert_confidence(report, *runner.all_logits)


def test_operators_are_warmed_with_the_model_s_logits_where_vllm_warms_its_sampler(new_runner, monkeypatch):
    warmed = []
    monkeypatch.setattr(runner_module, "warm_up", lambda logits, hidden, parts: warmed.append((logits, hidden)))
    for is_read, num_warmed in ((True, 1), (False, 0)):
        runner, made = new_runner(is_read), []
        runner.model = SimpleNamespace(compute_logits=lambda hidden, made=made: made.append(hidden) or hidden @ WEIGHT)
        warmed.clear()
        assert runner._dummy_sampler_run(torch.ones(6, HIDDEN_SIZE)) == "what vLLM answers"
        assert len(made) == 1  # on every rank of a tensor-parallel group, which gathers
        assert len(made[0]) == 6  # fewer than vLLM's step had, and LoRA's kernels write beyond the logits
        assert len(warmed) == num_warmed
        for logits, hidden in warmed:
            assert (logits.shape[1], hidden.shape[1]) == (VOCAB_SIZE, HIDDEN_SIZE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_warming_up_calls_the_operators_of_the_tracker_for_whatever_the_model_makes(monkeypatch, dtype):
    """With tensors of the model's dtype: each compiles its own kernel."""
    calls = []
    operators = {"token_confidence", "update_confidence"}
    for name in operators:
        monkeypatch.setattr(warm_up_module, name, called(name, getattr(warm_up_module, name), calls))
    warm_up(torch.zeros(2, VOCAB_SIZE, dtype=dtype), torch.zeros(2, HIDDEN_SIZE, dtype=dtype))
    assert {name for name, _ in calls} == operators
    assert {tensors[0].dtype for name, tensors in calls if name == "token_confidence"} == {dtype}


@pytest.mark.parametrize("cpu", [False, True])
def test_of_a_step_s_drafts_those_are_observed_that_are_accepted(cpu):
    runner = Verifying()
    observe(runner, v2=False, cpu=cpu)
    new = (new_request("a", 3), new_request("b", 3), new_request("c", 3))
    runner.num_drafted, runner.num_sampled = (2, 1, 0), (3, 1, 1)
    _, report = step(runner, [Row("a", 5, 5), Row("b", 4, 4), Row("c", 3, 3)], new)
    assert report.first_positions.tolist() == [0, 0, 0]
    seen = ~np.isnan(report.confidence)
    assert seen[0].tolist() == seen[1].tolist() == [[True, True, True], [True, False, False], [True, False, False]]
    runner.num_drafted, runner.num_sampled = (0, 3, 0), (1, 2, 1)
    _, report = step(runner, [Row("a", 6, 6), Row("b", 7, 7), Row("c", 4, 4)])
    assert report.first_positions.tolist() == [3, 1, 1]


@pytest.mark.parametrize("tagged", [True, False])
def test_a_step_of_no_drafts_is_sampled_as_one_without_them(tagged):
    runner = Verifying()
    observe(runner, v2=False, cpu=True)
    runner.num_drafted, runner.num_sampled = (0,), (1,)
    step(runner, [Row("a", 3, 3)], (new_request("a", 3, tagged=tagged),))
    assert not runner.is_verifying
    runner.num_drafted = (1,)
    step(runner, [Row("a", 4, 4)])
    assert runner.is_verifying


def test_v2_does_not_observe_drafts():
    rows, new = [Row("a", 3, 3)], (new_request("a", 3),)
    runner = RunnerV2()
    observe(runner, v2=True, cpu=False)
    runner.load_model()
    runner.execute_model(SimpleNamespace(rows=rows, scheduled_new_reqs=new, finished_req_ids=set()))
    runner.sampler(torch.randn(3, VOCAB_SIZE), SimpleNamespace(num_reqs=1))
    assert runner.candidate_tracker.step is None


def test_observing_changes_the_class_of_runner_and_sampler_but_not_what_they_are():
    runner, sampler = RunnerV2(), Sampler()
    observe(runner, False, v2=True, cpu=False)
    observe_sampler(sampler, runner.candidate_tracker, runner.observing)
    assert isinstance(runner, RunnerV2)
    assert isinstance(sampler, Sampler)
    assert type(runner).__name__ == "RolloutRunnerV2"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_values_on_a_device_are_copied_beside_the_next_step(new_runner, monkeypatch, asynchronous):
    heard: list[str] = []
    current = ["the step's stream"]

    class Stream:
        def wait_stream(self, other: str) -> None:
            heard.append(f"waits for {other}")

    class Event:
        def __init__(self, blocking: bool) -> None:
            heard.append(f"copied on {current[-1]}")

        def record(self) -> None:
            heard.append("recorded")

        def synchronize(self) -> None:
            heard.append("waited for")

    @contextmanager
    def entered(stream: Any) -> Iterator[None]:
        current.append("its own stream")
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(StepValues, "on_host", False)
    runner = new_runner(asynchronous=asynchronous)
    runner.async_output_copy_stream = runner.output_copy_stream = Stream()
    rows, new = [Row("a", 3, 3)], (new_request("a", 3),)
    runner.execute_model(SimpleNamespace(rows=rows, scheduled_new_reqs=new, finished_req_ids=set()))
    output = runner.sample_tokens()
    copied = ["copied on the step's stream"]
    if asynchronous:
        copied = ["waits for the step's stream", "copied on its own stream"]
        assert heard == [*copied, "recorded"], "nobody waits before the output is read"
        output = output.get_output()
    assert heard == [*copied, "recorded", "waited for"]
    assert np.isfinite(output.__dict__[REPORT_ATTRIBUTE].confidence).all()


def test_a_report_comes_with_the_output(new_runner):
    runner = new_runner(asynchronous=True)
    rows, new = [Row("a", 3, 3)], (new_request("a", 3),)
    runner.execute_model(SimpleNamespace(rows=rows, scheduled_new_reqs=new, finished_req_ids=set()))
    output = runner.sample_tokens()
    assert isinstance(output, ReportedOutput)
    assert output.get_kv_connector_output() == "connector"
    assert np.isfinite(output.get_output().__dict__[REPORT_ATTRIBUTE].confidence).all()
