"""Scores on runners without a model: what goes to the ring of features, and what rides on the step's output."""

from __future__ import annotations

import pickle
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernel.core.test_internal_errors import fail
from tests.kernel.worker import runners
from tests.kernel.worker.runners import HIDDEN_SIZE, KINDS, VOCAB_SIZE, Row, Verifying, made, step
from tests.parts.observing import observed
from tests.parts.observing.observed import called
from tests.parts.pruning.scoring import ScoringTracker
from tests.parts.pruning.steps import pruned_by, said, scores_in
from vllm_rollout.kernel.wire import REPORT_ATTRIBUTE
from vllm_rollout.kernel.worker.ports import WorkerParts
from vllm_rollout.kernel.worker.runner import ReportedOutput
from vllm_rollout.parts.observing.tracker import warm_up as warm_up_module
from vllm_rollout.parts.observing.tracker.warm_up import warm_up
from vllm_rollout.parts.observing.worker.part import ObservingWorker
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey, PruningPlan
from vllm_rollout.parts.pruning.worker import scorer as scorer_module
from vllm_rollout.parts.pruning.worker.feature_ring import FeatureRing, StateKey
from vllm_rollout.parts.pruning.worker.part import PruningWorker
from vllm_rollout.parts.pruning.worker.quality_head import HeadWeights
from vllm_rollout.parts.pruning.worker.scorer import PublishedHead


@pytest.fixture(params=KINDS, ids=["v1", "v1-cpu", "v2"])
def new_runner(request):
    """Makes a runner of each generation whose candidates are scored."""
    return lambda ring, **options: made(request.param, partial(observe, ring=ring), **options)


def observe(runner: Any, ring: FeatureRing, *, v2: bool, cpu: bool) -> None:
    """Observe a runner for scores."""
    observed.observe(runner, v2=v2, cpu=cpu)
    part = PruningWorker(runner.candidate_tracker, ring)
    runner.join(WorkerParts([("observing", ObservingWorker(runner)), ("pruning", part)], runner.faults))


def new_request(request_id: str, num_prompt_tokens: int, detection_length: int | None, **fields: Any) -> Any:
    plan = None if detection_length is None else PruningPlan(detection_length)
    its = said(plan and Scoring("r", "p", 1))
    return runners.new_request(request_id, num_prompt_tokens, parts=pruned_by(plan), said=its, **fields)


def heads_of(runner: Any) -> dict[HeadKey, PublishedHead]:
    return runner.candidate_tracker.parts[0].heads


def new_ring() -> FeatureRing:
    return FeatureRing(HIDDEN_SIZE, torch.float32, 1 << 12)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_due_candidate_s_state_goes_to_the_ring_and_its_score_on_the_output(new_runner, asynchronous):
    ring = new_ring()
    runner = new_runner(ring, asynchronous=asynchronous)
    head = HeadWeights(torch.ones(2, HIDDEN_SIZE), torch.zeros(2), torch.ones(2), torch.full((1,), 0.5))
    heads_of(runner)[HeadKey(2)] = PublishedHead(3, head)
    new = (new_request("a", 3, 2), new_request("b", 2, 9), new_request("plain", 3, None, tagged=False))
    _, report = step(runner, [Row("plain", 3, 3), Row("a", 3, 3), Row("b", 2, 2)], new)
    assert np.isnan(report.confidence[:, 0]).tolist() == [[True, False, False]] * 2
    assert scores_in(report).request_ids == ()
    output, report = step(runner, [Row("b", 3, 3), Row("plain", 4, 4), Row("a", 4, 4)])
    assert np.isnan(report.confidence[:, 0]).tolist() == [[False, True, False]] * 2
    ((request_id, seen),) = scores_in(report).observations()
    assert (request_id, seen.head_version) == ("a", 3)
    assert seen.logit == pytest.approx(2 * runner.hidden[2].sum().item() + 0.5)
    features, found = ring.take([StateKey("b", 2), StateKey("plain", 2), StateKey("a", 2)])
    assert found == [2]
    assert torch.equal(features[0], runner.hidden[2])
    same = pickle.loads(pickle.dumps(output)).__dict__[REPORT_ATTRIBUTE]  # worker -> engine core
    assert list(scores_in(same).observations()) == [(request_id, seen)]
    _, report = step(runner, [Row("a", 5, 5)])
    assert scores_in(report).request_ids == ()


def test_the_head_that_scores_is_that_of_the_adapter_which_the_request_has(new_runner):
    runner = new_runner(new_ring())
    for version, adapter in enumerate(("", "a", "b"), start=1):
        head = HeadWeights(torch.ones(2, HIDDEN_SIZE), torch.zeros(2), torch.ones(2), torch.full((1,), float(version)))
        heads_of(runner)[HeadKey(1, adapter)] = PublishedHead(version, head)
    adapters = {"x": "b", "y": None, "z": "a", "w": "another"}
    new = tuple(new_request(request_id, 3, 1, adapter=adapter) for request_id, adapter in adapters.items())
    _, report = step(runner, [Row(request_id, 3, 3) for request_id in adapters], new)
    assert {id: seen.head_version for id, seen in scores_in(report).observations()} == {"x": 3, "y": 1, "z": 2, "w": 0}


def test_a_candidate_that_nobody_reads_is_not_observed_unless_it_is_scored(new_runner):
    runner = new_runner(new_ring())
    new = (
        new_request("unread", 3, None, observed=False),
        new_request("read", 3, None),
        new_request("scored", 3, 2, observed=False),
    )
    _, report = step(runner, [Row("unread", 3, 3), Row("read", 3, 3), Row("scored", 3, 3)], new)
    assert np.isnan(report.confidence[0, 0]).tolist() == [True, False, False]
    _, report = step(runner, [Row("unread", 4, 4)])
    assert report is None


def test_a_prompt_of_embeddings_has_its_length_too(new_runner):
    runner = new_runner(new_ring())
    request = new_request("a", 0, 2)
    request.prompt_token_ids, request.prompt_embeds = None, torch.zeros(4, HIDDEN_SIZE)
    step(runner, [Row("a", 4, 4)], (request,))
    _, report = step(runner, [Row("a", 5, 5)])
    assert list(scores_in(report).request_ids) == ["a"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_warming_up_calls_every_operator_for_whatever_the_model_makes(monkeypatch, dtype):
    """With tensors of the model's dtype, and the head with few rows and with many: each compiles its own kernel."""
    calls = []
    places = {"token_confidence": warm_up_module, "update_confidence": warm_up_module}
    places |= {"quality_head": scorer_module, "windowed_confidence": scorer_module}
    for name, module in places.items():
        monkeypatch.setattr(module, name, called(name, getattr(module, name), calls))
    parts = ScoringTracker(torch.device("cpu"), ring=new_ring()).parts
    warm_up(torch.zeros(2, VOCAB_SIZE, dtype=dtype), torch.zeros(2, HIDDEN_SIZE, dtype=dtype), parts)
    assert {name for name, _ in calls} == places.keys()
    assert {tensors[0].dtype for name, tensors in calls if name in ("token_confidence", "quality_head")} == {dtype}
    nums_due = [len(tensors[1]) for name, tensors in calls if name == "quality_head"]
    assert min(nums_due) <= 16 < max(nums_due), "FEW_DUE of kernels/triton/quality_head.py"


@pytest.mark.parametrize("cpu", [False, True])
def test_of_a_step_s_drafts_those_are_observed_that_are_accepted(cpu):
    ring, runner = new_ring(), Verifying()
    observe(runner, ring, v2=False, cpu=cpu)
    new = (new_request("a", 3, 2), new_request("b", 3, 3), new_request("c", 3, None))
    runner.num_drafted, runner.num_sampled = (2, 1, 0), (3, 1, 1)
    _, report = step(runner, [Row("a", 5, 5), Row("b", 4, 4), Row("c", 3, 3)], new)
    assert report.first_positions.tolist() == [0, 0, 0]
    seen = ~np.isnan(report.confidence)
    assert seen[0].tolist() == seen[1].tolist() == [[True, True, True], [True, False, False], [True, False, False]]
    assert [id for id, _ in scores_in(report).observations()] == ["a"], "b has one token, of three"
    features, found = ring.take([StateKey("a", 2), StateKey("b", 3)])
    assert found == [0]
    assert torch.equal(features[0], runner.hidden[1])
    runner.num_drafted, runner.num_sampled = (0, 3, 0), (1, 2, 1)
    _, report = step(runner, [Row("a", 6, 6), Row("b", 7, 7), Row("c", 4, 4)])
    assert report.first_positions.tolist() == [3, 1, 1]
    assert [id for id, _ in scores_in(report).observations()] == ["b"]
    assert torch.equal(ring.take([StateKey("b", 3)])[0][0], runner.hidden[2])


def test_a_report_comes_with_the_output_and_not_before(new_runner):
    ring = new_ring()
    runner = new_runner(ring, asynchronous=True)
    rows, new = [Row("a", 3, 3)], (new_request("a", 3, 1),)
    runner.execute_model(SimpleNamespace(rows=rows, scheduled_new_reqs=new, finished_req_ids=set()))
    output = runner.sample_tokens()
    assert isinstance(output, ReportedOutput)
    assert output.get_kv_connector_output() == "connector"
    assert len(ring) == 0
    assert list(scores_in(output.get_output().__dict__[REPORT_ATTRIBUTE]).request_ids) == ["a"]
    assert len(ring) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_exception_on_the_way_to_the_scheduler_fails_who_was_seen(new_runner, monkeypatch, asynchronous):
    runner = new_runner(new_ring(), asynchronous=asynchronous)
    monkeypatch.setattr(FeatureRing, "put", fail)
    new = (new_request("a", 3, 1), new_request("b", 3, 1, tagged=False))
    _, report = step(runner, [Row("a", 3, 3), Row("b", 3, 3)], new)
    assert list(report.failed) == ["a"]


def test_a_model_whose_last_states_are_narrower_than_it_says_refuses_pruning_alone(new_runner):
    """Such as OPT-350m, which projects its states."""
    runner = new_runner(FeatureRing(2 * HIDDEN_SIZE, torch.float32, 1 << 12))
    runner.model = SimpleNamespace(compute_logits=lambda hidden: torch.zeros(len(hidden), VOCAB_SIZE))
    runner._dummy_sampler_run(torch.ones(2, HIDDEN_SIZE))
    _, report = step(runner, [Row("a", 3, 3), Row("b", 3, 3)], (new_request("a", 3, 2), new_request("b", 3, None)))
    assert (list(report.failed), report.num_internal_errors) == (["a"], 0)
    assert (
        "its last hidden states have 4 numbers, and its configuration says 8. Leave pruning out." in report.failed["a"]
    )
    assert np.isfinite(report.confidence[0, 0]).tolist() == [False, True]
