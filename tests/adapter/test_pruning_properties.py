"""Random workloads with pruning on vLLM's scheduler: what holds whatever the lengths, scores, blocks and aborts."""

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_runs import LOOPS, Loop, TracedRun, assert_nothing_left, prune_by_sign
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from vllm_rollout.adapter.wire import CandidateTag
from vllm_rollout.group.judging.ledger import Scoring
from vllm_rollout.group.plans.pruning_plan import PruningPlan
from vllm_rollout.group.plans.terms import GroupTerms

MAX_LENGTH = 60
MIN_BLOCKS = 8
"""Enough for the prompt of 20 tokens and the longest output, in blocks of 16 tokens."""
DETECTION_LENGTHS = (1, 5, 20)


class Sample(NamedTuple):
    length: int
    logit: float
    arrival_step: int
    abort_step: int | None


class GroupSpec(NamedTuple):
    group_size: int
    samples: list[Sample]
    plan: PruningPlan
    early_stop: bool
    joined: bool
    max_tokens: int


class Workload(NamedTuple):
    groups: list[GroupSpec]
    max_num_seqs: int
    num_blocks: int


samples = st.builds(
    Sample,
    st.integers(1, MAX_LENGTH),
    st.sampled_from([-2.0, -1.0, 1.0]),
    st.sampled_from([0, 0, 0, 3, 30]),
    st.one_of(st.none(), st.none(), st.none(), st.integers(1, 60)),
)
plans = st.builds(
    lambda length, mode, allow_fewer: PruningPlan(length, mode=mode, allow_fewer=allow_fewer),
    st.sampled_from(DETECTION_LENGTHS),
    st.sampled_from(["active", "active", "shadow"]),
    st.booleans(),
)
groups = st.lists(samples, min_size=1, max_size=6).flatmap(
    lambda pool: st.builds(
        GroupSpec,
        st.integers(1, len(pool)),
        st.just(pool),
        plans,
        st.sampled_from([True, True, False]),
        st.booleans(),
        st.sampled_from([MAX_LENGTH, 12]),
    )
)
workloads = st.builds(
    Workload, st.lists(groups, min_size=1, max_size=3), st.integers(1, 12), st.integers(MIN_BLOCKS, 30)
)


def play(workload: Workload, loop: Loop, model: str) -> TracedRun:
    run = TracedRun(
        loop.scheduler_cls, model, depth=loop.depth, num_blocks=workload.num_blocks, max_num_seqs=workload.max_num_seqs
    )
    prune_by_sign(run, *DETECTION_LENGTHS)
    for step in range(2000):
        for number, group in enumerate(workload.groups):
            for index, sample in enumerate(group.samples):
                request_id = f"g{number}-{index}"
                if sample.arrival_step == step:
                    scoring = Scoring("rollout", f"g{number}", 7)
                    terms = GroupTerms(group.group_size, len(group.samples), group.early_stop, pruning=group.plan)
                    tag = CandidateTag(f"g{number}", None if group.joined else index, terms, 16, scoring)
                    run.logits[request_id] = sample.logit
                    extra_args = tag.to_extra_args()
                    run.add(request_id, sample.length, extra_args=extra_args, max_tokens=group.max_tokens)
                if sample.abort_step is not None and max(sample.abort_step, sample.arrival_step + 1) == step:
                    run.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        if not run.step() and step > 100:
            return run
    raise AssertionError("the workload does not end")


def check_candidate(run: TracedRun, group: GroupSpec, sample: Sample, request_id: str, loop: Loop) -> None:
    last, note, num_tokens = run.last(request_id), run.note(request_id), run.num_tokens(request_id)
    length = group.plan.detection_length
    assert num_tokens == run.requests[request_id].num_output_tokens
    assert run.num_dropped(request_id) <= loop.depth - 1
    if note.state == "pruned":
        assert (last.finish_reason, last.stop_reason) == (FinishReason.ABORT, "pruned")
        assert group.plan.mode == "active"
        assert sample.logit < 0
        assert note.assessment is not None
        assert not note.assessment.keep
        assert num_tokens == length
    elif group.plan.mode == "active" and note.assessment is not None:
        assert note.assessment.keep
    if note.state == "finished":
        assert num_tokens == min(sample.length, group.max_tokens)
    if note.assessment is not None:
        assert note.assessment.score == sample.logit
        assert num_tokens >= length
    elif note.state == "finished":
        assert num_tokens <= length
    assert num_tokens <= length or note.assessment is not None


def check_group(run: TracedRun, group: GroupSpec, states: list[str]) -> None:
    assert group.early_stop or "surplus" not in states
    if any(sample.abort_step is not None for sample in group.samples):
        return  # what a client takes away afterwards no floor can know
    floor = min(group.group_size, len(group.samples)) if not group.plan.allow_fewer else 1
    assert states.count("finished") >= floor
    if group.plan.mode == "shadow" and group.early_stop:
        assert "pruned" not in states


@pytest.mark.thorough
@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(workload=workloads, loop=st.sampled_from(LOOPS))
def test_whatever_happens_pruning_keeps_its_promises(workload, loop, tiny_model):
    run = play(workload, loop, tiny_model)
    for number, group in enumerate(workload.groups):
        ids = [f"g{number}-{index}" for index in range(len(group.samples))]
        for request_id, sample in zip(ids, group.samples, strict=True):
            check_candidate(run, group, sample, request_id, loop)
        check_group(run, group, [run.state(request_id) for request_id in ids])
    assert_nothing_left(run)


def test_the_random_workloads_reach_pruned_and_preempted_candidates(tiny_model):
    pool = [Sample(MAX_LENGTH - index, (-1.0) ** index, 0, None) for index in range(6)]
    workload = Workload([GroupSpec(3, pool, PruningPlan(20), True, False, MAX_LENGTH)], 12, 12)
    for loop in LOOPS:
        run = play(workload, loop, tiny_model)
        states = [run.state(f"g0-{index}") for index in range(6)]
        assert "pruned" in states
        assert states.count("finished") == 3
        assert any(request.num_preemptions for request in run.requests.values())
