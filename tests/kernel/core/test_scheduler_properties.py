"""Random workloads on vLLM's scheduler: what holds whatever lengths, scores, places, blocks, arrivals and aborts."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from tests.kernel.core.scheduler_runs import LOOPS, Loop, TracedRun, assert_nothing_left
from tests.support.dry_run import EOS_TOKEN
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.rules.terms_port import PartTerms, Pruning, pruning_of
from vllm_rollout.kernel.wire import CandidateTag, EndingNote

MAX_LENGTH = 60
MIN_BLOCKS = 8
"""Enough for the prompt of 20 tokens and the longest output, in blocks of 16 tokens."""


class Sample(NamedTuple):
    """One request of the workload."""

    length: int
    arrival_step: int = 0
    abort_step: int | None = None
    logit: float = 1.0


class GroupSpec(NamedTuple):
    group_size: int
    samples: list[Sample]
    early_stop: bool = True
    joined: bool = False
    interval: int = 16
    max_tokens: int = MAX_LENGTH
    parts: Mapping[str, PartTerms] = {}
    """Terms of parts, by part."""

    @property
    def plan(self) -> Pruning | None:
        return pruning_of(self.parts)

    @property
    def is_pruned(self) -> bool:
        return self.plan is not None and self.plan.mode == "active"


class Workload(NamedTuple):
    groups: list[GroupSpec]
    plain: tuple[Sample, ...] = ()
    max_num_seqs: int = 12
    num_blocks: int = 12
    pause_step: int | None = None
    log_stats: bool = False


samples = st.builds(
    Sample,
    st.integers(1, MAX_LENGTH),
    st.sampled_from([0, 0, 0, 3, 40]),
    st.one_of(st.none(), st.none(), st.none(), st.integers(1, 80)),
    st.sampled_from([-2.0, -1.0, 1.0]),
)


def workloads(parts: st.SearchStrategy[Mapping[str, PartTerms]]) -> st.SearchStrategy[Workload]:
    """`parts`: terms of parts in a group."""
    groups = st.lists(samples, min_size=1, max_size=6).flatmap(
        lambda pool: st.builds(
            GroupSpec,
            st.integers(1, len(pool)),
            st.just(pool),
            st.sampled_from([True, True, True, False]),
            st.booleans(),
            st.sampled_from([1, 2, 16, 256]),
            st.sampled_from([MAX_LENGTH, MAX_LENGTH, 12]),
            parts,
        )
    )
    return st.builds(
        Workload,
        st.lists(groups, min_size=1, max_size=3),
        st.lists(samples, max_size=2).map(tuple),
        st.integers(1, 12),
        st.integers(MIN_BLOCKS, 40),
        st.one_of(st.none(), st.integers(1, 60)),
        st.booleans(),
    )


Say = Callable[[str, GroupSpec], dict[str, Any]]
"""Values of a group's candidates for parts, from the group's id."""


def play(
    workload: Workload,
    loop: Loop,
    model: str,
    prepare: Callable[[TracedRun], None] = lambda run: None,
    say: Say = lambda group_id, group: {},
) -> TracedRun:
    run = TracedRun(
        loop.scheduler_cls, model, depth=loop.depth, num_blocks=workload.num_blocks,
        max_num_seqs=workload.max_num_seqs, log_stats=workload.log_stats,
    )  # fmt: skip
    prepare(run)
    requests = requests_of(workload, say)
    run.logits.update({request_id: sample.logit for request_id, sample, _ in requests})
    for step in range(2000):
        for request_id, sample, kwargs in requests:
            if sample.arrival_step == step:
                run.add(request_id, sample.length, **kwargs)
        due = [
            request_id
            for request_id, sample, _ in requests
            if sample.abort_step is not None and max(sample.abort_step, sample.arrival_step + 1) == step
        ]
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


def requests_of(workload: Workload, say: Say = lambda group_id, group: {}) -> list[tuple[str, Sample, dict]]:
    requests = [(f"plain-{index}", sample, {}) for index, sample in enumerate(workload.plain)]
    for number, group in enumerate(workload.groups):
        for index, sample in enumerate(group.samples):
            terms = GroupTerms(group.group_size, len(group.samples), group.early_stop, parts=group.parts)
            its = say(f"g{number}", group)
            tag = CandidateTag(f"g{number}", None if group.joined else index, terms, group.interval, its)
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


def check_candidate(run: TracedRun, group: GroupSpec, sample: Sample, request_id: str) -> None:
    last, note = run.last(request_id), run.note(request_id)
    said = last.finish_reason, last.stop_reason
    if note.state == "surplus":
        assert group.early_stop
        assert said == (FinishReason.ABORT, "surplus")
    elif note.state == "failed":
        assert sample.abort_step is not None
        assert said == (FinishReason.ABORT, None)
    elif note.state == "pruned":
        assert group.is_pruned
        assert said == (FinishReason.ABORT, "pruned")
        assert sample.logit < 0
        assert not assessment_of(note).keep
        assert run.num_tokens(request_id) == group.plan.detection_length
    else:
        assert note.state == "finished"
        assert run.num_tokens(request_id) == min(sample.length, group.max_tokens)
        assert said[0] == (FinishReason.LENGTH if sample.length > group.max_tokens else FinishReason.STOP)
    if group.plan is None:
        assert assessment_of(note) is None
    else:
        check_assessment(run, group, sample, request_id)


def assessment_of(note: EndingNote) -> Any:
    """Decision of a part on a scored candidate. None: it was not scored."""
    return next((said.assessment for said in note.parts.values() if hasattr(said, "assessment")), None)


def check_assessment(run: TracedRun, group: GroupSpec, sample: Sample, request_id: str) -> None:
    """A candidate is judged at its detection length, if it goes on there."""
    note, num_tokens, length = run.note(request_id), run.num_tokens(request_id), group.plan.detection_length
    if assessment_of(note) is None:
        assert num_tokens <= length
        return
    assert assessment_of(note).score == sample.logit
    assert num_tokens >= length
    assert assessment_of(note).keep or note.state == "pruned" or not group.is_pruned


def check_group(group: GroupSpec, states: list[str]) -> None:
    ended_by_itself = [
        state == "finished" and sample.length <= group.max_tokens
        for state, sample in zip(states, group.samples, strict=True)
    ]
    assert not group.early_stop or sum(ended_by_itself) <= group.group_size
    if not group.is_pruned:
        able = [sample for sample in group.samples if sample.length <= group.max_tokens]
        if group.early_stop and sum(sample.abort_step is None for sample in able) >= group.group_size:
            assert sum(ended_by_itself) == group.group_size
    if all(sample.abort_step is None for sample in group.samples):  # else no floor can know what is taken away later
        assert states.count("finished") >= (1 if group.is_pruned and group.plan.allow_fewer else group.group_size)


def check_plain_requests_are_untouched(workload: Workload, run: TracedRun) -> None:
    for index, sample in enumerate(workload.plain):
        outputs = run.outputs.get(f"plain-{index}", [])
        assert all(len(output.new_token_ids) == 1 for output in outputs)
        assert all(output.kv_transfer_params is None for output in outputs)
        assert sample.abort_step is not None or len(outputs) == sample.length


def check(workload: Workload, run: TracedRun, loop: Loop) -> None:
    check_every_request_ends_once(workload, run, loop)
    check_tokens_are_complete_and_in_order(workload, run)
    for number, group in enumerate(workload.groups):
        ids = [f"g{number}-{index}" for index in range(len(group.samples))]
        for request_id, sample in zip(ids, group.samples, strict=True):
            check_candidate(run, group, sample, request_id)
        check_group(group, [run.state(request_id) for request_id in ids])
    check_plain_requests_are_untouched(workload, run)
    assert_nothing_left(run)


@pytest.mark.thorough
@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(workload=workloads(st.just({})), loop=st.sampled_from(LOOPS))
def test_whatever_happens_groups_keep_their_promises(workload, loop, tiny_model):
    check(workload, play(workload, loop, tiny_model), loop)


def test_the_random_workloads_reach_preempted_candidates(tiny_model):
    pool = [Sample(MAX_LENGTH - index) for index in range(6)]
    workload = Workload([GroupSpec(3, pool)])
    for loop in LOOPS:
        run = play(workload, loop, tiny_model)
        assert any(request.num_preemptions for request in run.requests.values())
        check(workload, run, loop)
