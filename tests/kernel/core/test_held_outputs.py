"""Messages of a candidate: few, complete and in order."""

import queue
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists
from vllm.v1.request import RequestStatus

from tests.kernel.core.scheduler_runs import TracedRun, add_group, assert_nothing_left
from tests.support.dry_run import EOS_TOKEN
from vllm_rollout.kernel.core.held_outputs import HeldOutputs


def message_sizes(run: TracedRun, request_id: str) -> list[int]:
    return [len(output.new_token_ids) for output in run.outputs[request_id]]


def pause_and_resume(run: TracedRun, clear_cache: bool = False) -> None:
    run.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    while run.step():
        pass
    if clear_cache:
        assert run.scheduler.reset_prefix_cache(reset_running_requests=True)
    run.scheduler.set_pause_state(PauseState.UNPAUSED)


def test_a_long_candidate_nobody_streams_takes_a_handful_of_messages(new_run):
    run = new_run()
    (id,) = add_group(run, "g", [1000], group_size=1, interval=256)
    run.run()
    assert message_sizes(run, id) == [1, 256, 256, 256, 231]
    assert run.num_messages == 5
    assert run.tokens(id) == [*run.own_tokens(id, 999), EOS_TOKEN]


def test_a_streamed_candidate_gets_every_token_in_its_own_message(new_run):
    run = new_run()
    ids = add_group(run, "g", [40, 60], group_size=1, interval=1)
    run.run()
    assert message_sizes(run, ids[0]) == [1] * 40
    assert run.tokens(ids[0]) == [*run.own_tokens(ids[0], 39), EOS_TOKEN]
    assert run.tokens(ids[1]) == run.own_tokens(ids[1], 40)


@pytest.mark.parametrize("interval", [2, 7, 64])
def test_whatever_the_interval_a_stopped_candidate_gets_all_its_tokens(new_run, interval):
    run = new_run()
    ids = add_group(run, "g", [50, 90, 90], group_size=1, interval=interval)
    run.run()
    for id in ids[1:]:
        assert run.tokens(id) == run.own_tokens(id, 50)
        assert set(message_sizes(run, id)[1:-1]) <= {interval}


def test_a_preempted_candidate_that_is_stopped_gets_what_was_held(new_run):
    run = new_run(num_blocks=30)
    ids = add_group(run, "g", [150, 200, 200, 200], group_size=1, interval=256)
    run.run()
    stopped_early = [id for id in ids if run.num_tokens(id) < 150]
    assert any(run.requests[id].num_preemptions for id in stopped_early)
    for id in stopped_early:
        assert run.tokens(id) == run.own_tokens(id, run.requests[id].num_output_tokens)
        assert len(run.outputs[id]) == 2


@pytest.mark.parametrize("interval", [1, 16, 256])
def test_logprobs_line_up_with_tokens(new_run, interval):
    run = new_run()
    ids = add_group(run, "g", [60, 100], group_size=1, interval=interval, logprobs=0)
    run.run()
    for id in ids:
        outputs = run.outputs[id]
        for output in outputs:
            rows = output.new_logprobs
            assert len(output.new_token_ids) == len(rows.logprob_token_ids) == len(rows.logprobs)
            assert len(output.new_token_ids) == len(rows.sampled_token_ranks)
        token_ids = np.concatenate([output.new_logprobs.logprob_token_ids for output in outputs])
        logprobs = np.concatenate([output.new_logprobs.logprobs for output in outputs])
        ranks = np.concatenate([output.new_logprobs.sampled_token_ranks for output in outputs])
        assert token_ids[:, 0].tolist() == run.tokens(id)
        assert logprobs[:, 0].tolist() == [-k for k in range(1, 61)]
        assert ranks.tolist() == list(range(1, 61))


def test_without_logprobs_none_are_made_up(new_run):
    run = new_run()
    (id,) = add_group(run, "g", [60], group_size=1)
    run.run()
    assert [output.new_logprobs for output in run.outputs[id]] == [None] * len(run.outputs[id])


def test_prefill_statistics_come_with_the_first_message_only(new_run):
    run = new_run()
    ids = add_group(run, "g", [60, 90], group_size=1, interval=16)
    run.run()
    for id in ids:
        assert [output.prefill_stats is not None for output in run.outputs[id]] == [True] + [False] * 4


def test_no_event_is_lost_or_told_twice(new_run, loop):
    stock = new_run(scheduler_cls=loop.stock_cls, log_stats=True, num_blocks=24)
    ours = new_run(log_stats=True, num_blocks=24)
    for run in (stock, ours):
        add_group(run, "g", [100, 120, 130, 140], group_size=4, interval=64)
        run.run()
    assert any(request.num_preemptions for request in ours.requests.values())
    for id in ours.requests:
        told = [[event.type for output in run.outputs[id] for event in output.events or ()] for run in (stock, ours)]
        assert told[0] == told[1]
        assert told[0]
        prefills = [sum(output.prefill_stats is not None for output in run.outputs[id]) for run in (stock, ours)]
        assert prefills[0] == prefills[1]


def test_statistics_do_not_bring_held_outputs_out(new_run):
    run = new_run(log_stats=True)
    (id,) = add_group(run, "g", [300], group_size=1, interval=256)
    run.run()
    assert message_sizes(run, id) == [1, 256, 43]


def test_tokens_stay_in_order_when_a_pause_clears_the_cache(new_run):
    run = new_run()
    ids = add_group(run, "g", [100, 90, 120], group_size=2, interval=64)
    for _ in range(20):
        run.step()
    pause_and_resume(run, clear_cache=True)
    run.run()
    assert [run.state(id) for id in ids] == ["finished", "finished", "surplus"]
    for id in ids:
        assert run.tokens(id)[:-1] == run.own_tokens(id, run.num_tokens(id) - 1)
    assert_nothing_left(run)


def test_a_pause_that_aborts_loses_no_token_that_stock_vllm_would_have_sent(new_run):
    run = new_run()
    ids = add_group(run, "g", [100, 100], group_size=2, interval=64)
    for _ in range(30):
        run.step()
    # As EngineCoreProc.pause_scheduler(mode="abort") does it, without an engine around it.
    core = EngineCoreProc.__new__(EngineCoreProc)
    core.output_queue = queue.Queue()
    core._send_abort_outputs(run.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED))
    run.run()
    answers = [core.output_queue.get_nowait()[1] for _ in range(core.output_queue.qsize())]
    for id in ids:
        outputs = [output for answer in answers for output in answer.outputs if output.request_id == id]
        last = [token for output in outputs for token in output.new_token_ids]
        assert run.tokens(id) + last == run.own_tokens(id, run.requests[id].num_output_tokens)


def output_with(*tokens: int, **fields) -> EngineCoreOutput:
    return EngineCoreOutput("r", list(tokens), **fields)


MASK = SamplingMaskLists(np.array([1, 2]), np.array([0, 2]))


class Step(NamedTuple):
    """Outputs of a step beside its token."""

    event: bool
    num_nans: int
    masked: bool
    """It has a sampling mask, which cannot wait for another one."""
    """The held outputs were to come with it."""


@settings(max_examples=150)
@given(st.integers(1, 4), st.lists(st.builds(Step, st.integers(0, 1), *[st.sampled_from([0, 0, 1])] * 2)))
def test_outputs_wait_for_each_other_as_long_as_they_may_and_come_whole_in_order_and_once(interval, steps):
    held, waiting = HeldOutputs(interval), {}

    def check(message: EngineCoreOutput) -> None:
        assert message.new_token_ids == list(waiting)
        assert (message.events or []) == [str(token) for token, step in waiting.items() if step.event]
        assert message.num_nans_in_logits == max((step.num_nans for step in waiting.values()), default=0)
        waiting.clear()

    for token, step in enumerate(steps):
        waiting[token] = step
        output = output_with(
            token,
            events=[str(token)] if step.event else None,
            num_nans_in_logits=step.num_nans,
            new_sampling_mask=MASK if step.masked else None,
        )
        message = held.add(output)
        is_due = token == 0 or step.masked or len(waiting) == interval
        assert (message is not None) == is_due
        if message is not None:
            assert message.new_sampling_mask is (MASK if step.masked else None)
            check(message)
    check(held.finish(output_with()))


def test_held_outputs_come_with_everything_they_carried():
    def rows(token: int) -> LogprobsLists:
        return LogprobsLists(np.array([[token, 0]]), np.array([[-1.0 * token, -9.0]]), np.array([token]))

    held = HeldOutputs(10)
    held.add(output_with(9, new_logprobs=rows(9), events=["queued"]))
    held.add(output_with(1, new_logprobs=rows(1), events=["preempted"], routed_experts=np.ones((2, 3))))
    held.add(output_with(2, new_logprobs=rows(2)))
    last = output_with(3, new_logprobs=rows(3), events=["scheduled"], routed_experts=np.zeros((1, 3)), stop_reason=77)
    released = held.finish(last)
    assert released.new_token_ids == [1, 2, 3]
    assert released.new_logprobs.logprob_token_ids.tolist() == [[1, 0], [2, 0], [3, 0]]
    assert released.new_logprobs.logprobs.tolist() == [[-1, -9], [-2, -9], [-3, -9]]
    assert released.new_logprobs.sampled_token_ranks.tolist() == [1, 2, 3]
    assert released.events == ["preempted", "scheduled"]
    assert released.routed_experts[:, 0].tolist() == [1, 1, 0]
    assert released.stop_reason == 77


@given(st.sampled_from([0, 1, 3, -1]), st.lists(st.integers(1, 8), min_size=2, max_size=9), st.integers(1, 4))
def test_log_probabilities_are_those_that_the_candidate_asked_for_whatever_others_ask_for(
    num_logprobs, widths, interval
):
    """Rows of a step are as wide as its widest request. `widths`: of each step."""
    held, said = HeldOutputs(interval, num_logprobs), []
    for token, width in enumerate(widths):
        values = np.arange(width, dtype=np.float32)[None] - 100 * token
        rows = LogprobsLists(10 * token + np.arange(width)[None], values, np.array([token]))
        output = output_with(token, new_logprobs=rows)
        message = held.finish(output) if token == len(widths) - 1 else held.add(output)
        said += [] if message is None else [message.new_logprobs]
    token_ids = [row for rows in said for row in rows.logprob_token_ids.tolist()]
    values = [row for rows in said for row in rows.logprobs.tolist()]
    assert [rank for rows in said for rank in rows.sampled_token_ranks.tolist()] == list(range(len(widths)))
    for token, width in enumerate(widths):
        own = width if num_logprobs < 0 else min(width, num_logprobs + 1)
        assert token_ids[token][:own] == [10 * token + column for column in range(own)]
        assert values[token][:own] == [column - 100 * token for column in range(own)]
        assert set(token_ids[token][own:]) <= {10 * token}  # what vLLM did not give says nothing new
        assert num_logprobs < 0 or len(token_ids[token]) <= num_logprobs + 1


def test_a_held_row_does_not_keep_the_arrays_of_its_whole_step():
    step = LogprobsLists(np.zeros((500, 2000), np.int32), np.zeros((500, 2000), np.float32), np.zeros(500, np.int64))
    held = HeldOutputs(10, 0)
    held.add(output_with(1))
    held.add(output_with(2, new_logprobs=step.slice_request(3, 1)))
    (row,) = held._logprobs
    assert row.logprobs.base is None
    assert row.logprob_token_ids.base is None
