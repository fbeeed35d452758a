"""Random workloads on vLLM's scheduler: what holds whatever the lengths, places, blocks, arrivals and aborts."""

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_runs import LOOPS, Loop, TracedRun, assert_nothing_left
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from tests.support.dry_run import EOS_TOKEN
from vllm_rollout.adapter.wire import CandidateTag, EndingNote
from vllm_rollout.group.plans.terms import GroupTerms

MAX_LENGTH = 60
MIN_BLOCKS = 8
"""Enough for the prompt of 20 tokens and the longest output, in blocks of 16 tokens."""


class Sample(NamedTuple):
    """One request of the workload."""

    length: int
    arrival_step: int
    abort_step: int | None


class GroupSpec(NamedTuple):
    group_size: int
    samples: list[Sample]
    early_stop: bool
    joined: bool
    interval: int
    max_tokens: int


class Workload(NamedTuple):
    groups: list[GroupSpec]
    plain: list[Sample]
    max_num_seqs: int
    num_blocks: int
    pause_step: int | None
    log_stats: bool


abort_steps = st.one_of(st.none(), st.none(), st.none(), st.integers(1, 80))
samples = st.builds(Sample, st.integers(1, MAX_LENGTH), st.sampled_from([0, 0, 0, 3, 40]), abort_steps)


@st.composite
def group_specs(draw) -> GroupSpec:
    pool = draw(st.lists(samples, min_size=1, max_size=6))
    return GroupSpec(
        group_size=draw(st.integers(1, len(pool))),
        samples=pool,
        early_stop=draw(st.sampled_from([True, True, True, False])),
        joined=draw(st.booleans()),
        interval=draw(st.sampled_from([1, 2, 16, 256])),
        max_tokens=draw(st.sampled_from([MAX_LENGTH, MAX_LENGTH, 20])),
    )


workloads = st.builds(
    Workload,
    st.lists(group_specs(), min_size=1, max_size=3),
    st.lists(samples, max_size=2),
    st.integers(1, 12),
    st.integers(MIN_BLOCKS, 40),
    st.one_of(st.none(), st.integers(1, 60)),
    st.booleans(),
)


def play(workload: Workload, loop: Loop, model: str) -> TracedRun:
    run = TracedRun(
        loop.scheduler_cls, model, depth=loop.depth, num_blocks=workload.num_blocks,
        max_num_seqs=workload.max_num_seqs, log_stats=workload.log_stats,
    )  # fmt: skip
    arrivals: list[tuple[int, str, int, dict]] = []
    aborts: list[tuple[int, str]] = []
    for request_id, sample, kwargs in requests_of(workload):
        arrivals.append((sample.arrival_step, request_id, sample.length, kwargs))
        if sample.abort_step is not None:
            aborts.append((max(sample.abort_step, sample.arrival_step + 1), request_id))
    for step in range(2000):
        for at, request_id, length, kwargs in arrivals:
            if at == step:
                run.add(request_id, length, **kwargs)
        due = [request_id for at, request_id in aborts if at == step]
        if due:
            run.scheduler.finish_requests(due, RequestStatus.FINISHED_ABORTED)
        if step == workload.pause_step:
            run.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            while run.step():
                pass
            run.scheduler.set_pause_state(PauseState.UNPAUSED)
        if not run.step() and step > 100:
            return run
    raise AssertionError("the workload does not end")


def requests_of(workload: Workload) -> list[tuple[str, Sample, dict]]:
    requests = [(f"plain-{index}", sample, {}) for index, sample in enumerate(workload.plain)]
    for number, group in enumerate(workload.groups):
        for index, sample in enumerate(group.samples):
            terms = GroupTerms(group.group_size, len(group.samples), group.early_stop)
            tag = CandidateTag(f"g{number}", None if group.joined else index, terms, group.interval)
            kwargs = {"extra_args": tag.to_extra_args(), "max_tokens": group.max_tokens}
            requests.append((f"g{number}-{index}", sample, kwargs))
    return requests


def check_every_request_ends_once(workload: Workload, run: TracedRun, loop: Loop) -> None:
    for request_id, sample, _ in requests_of(workload):
        outputs = run.outputs.get(request_id, [])
        num_final = sum(output.finished for output in outputs)
        aborted_plain = request_id.startswith("plain") and sample.abort_step is not None
        assert num_final == 1 or (num_final == 0 and aborted_plain)
        assert not any(output.finished for output in outputs[:-1])
        assert run.num_dropped(request_id) <= loop.depth - 1 or num_final == 0


def check_tokens_are_complete_and_in_order(workload: Workload, run: TracedRun) -> None:
    for request_id, sample, _ in requests_of(workload):
        tokens = run.tokens(request_id)
        if not any(output.finished for output in run.outputs.get(request_id, ())):
            assert tokens == run.own_tokens(request_id, len(tokens))
            continue
        assert len(tokens) == run.requests[request_id].num_output_tokens
        ended_by_itself = len(tokens) == sample.length
        body = tokens[:-1] if ended_by_itself else tokens
        assert body == run.own_tokens(request_id, len(body))
        assert not ended_by_itself or tokens[-1] == EOS_TOKEN


def check_groups(workload: Workload, run: TracedRun) -> None:
    for number, group in enumerate(workload.groups):
        by_itself = 0
        for index, sample in enumerate(group.samples):
            request_id = f"g{number}-{index}"
            finals = [output for output in run.outputs.get(request_id, ()) if output.finished]
            for output in finals:
                note, _ = EndingNote.take(output.kv_transfer_params)
                if note.state == "surplus":
                    assert group.early_stop
                    assert (output.finish_reason, output.stop_reason) == (FinishReason.ABORT, "surplus")
                elif note.state == "failed":
                    assert sample.abort_step is not None
                    assert (output.finish_reason, output.stop_reason) == (FinishReason.ABORT, None)
                else:
                    assert note.state == "finished"
                    capped = sample.length > group.max_tokens
                    assert output.finish_reason == (FinishReason.LENGTH if capped else FinishReason.STOP)
                    by_itself += not capped
        able = [sample for sample in group.samples if sample.length <= group.max_tokens]
        if not group.early_stop:
            continue
        if sum(sample.abort_step is None for sample in able) >= group.group_size:
            assert by_itself == group.group_size
        assert by_itself <= group.group_size


def check_plain_requests_are_untouched(workload: Workload, run: TracedRun) -> None:
    for index, sample in enumerate(workload.plain):
        outputs = run.outputs.get(f"plain-{index}", [])
        assert all(len(output.new_token_ids) == 1 for output in outputs)
        assert all(output.kv_transfer_params is None for output in outputs)
        assert sample.abort_step is not None or len(outputs) == sample.length


@pytest.mark.thorough
@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(workload=workloads, loop=st.sampled_from(LOOPS))
def test_whatever_happens_groups_keep_their_promises(workload, loop, tiny_model):
    run = play(workload, loop, tiny_model)
    check_every_request_ends_once(workload, run, loop)
    check_tokens_are_complete_and_in_order(workload, run)
    check_groups(workload, run)
    check_plain_requests_are_untouched(workload, run)
    assert_nothing_left(run)


def test_the_random_workloads_reach_preemption(tiny_model):
    candidates = [Sample(MAX_LENGTH - index, 0, None) for index in range(6)]
    workload = Workload([GroupSpec(2, candidates, True, False, 16, MAX_LENGTH)], [], 12, 12, None, False)
    for loop in LOOPS:
        run = play(workload, loop, tiny_model)
        assert any(request.num_preemptions for request in run.requests.values())
        check_groups(workload, run)
        check_tokens_are_complete_and_in_order(workload, run)
