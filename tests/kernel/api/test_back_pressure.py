"""For a reader that is slow, or never reads, a bounded number of outputs is held, and nothing is lost or out of order.

Real are the client, vLLM's output processor and the scheduler; only the model is made up, and every token says which it
is. The test steps the engine.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.outputs import STREAM_FINISHED, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from tests.kernel.api.stepped_llm import SteppedEngine, SteppedLLM, let_everybody_run
from tests.kernel.core.scheduler_runs import TracedRun, assert_nothing_left
from vllm_rollout.kernel.api.candidates import CandidateOutput, sampled_logprobs
from vllm_rollout.kernel.core.scheduler import RolloutScheduler
from vllm_rollout.kernel.http.engine import CandidateEnd, CandidateTokens, GroupOrder, PreparedPrompt
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.wire import EndingNote

pytestmark = pytest.mark.anyio

RACE = GroupPlan(group_size=4, redundancy=4)
WHOLE_POOL = GroupPlan(group_size=8, early_stop=False)


@pytest.fixture
def llm(new_run: Callable[..., TracedRun]) -> SteppedLLM:
    return SteppedLLM(new_run())


def sampling(stream_tokens: int | None) -> SamplingParams:
    params = SamplingParams(max_tokens=4000, logprobs=0, flat_logprobs=True, detokenize=False)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    if stream_tokens is not None:
        params.output_kind, params.stream_interval = RequestOutputKind.DELTA, stream_tokens
    return params


def candidates(llm: SteppedLLM, group_id: str, plan: GroupPlan, lengths: list[int], stream_tokens: int | None = 1):
    return llm.run_candidates(group_id, plan, lengths, sampling(stream_tokens))


@asynccontextmanager
async def stalled(
    llm: SteppedLLM, outputs: AsyncGenerator[CandidateOutput, None]
) -> AsyncIterator[list[CandidateOutput]]:
    """A reader that takes the first output and then none."""
    async with aclosing(outputs):
        first = asyncio.ensure_future(anext(outputs))
        await let_everybody_run()
        await llm.step()
        yield [await first]


def held_outputs(read: list[CandidateOutput]) -> list[RequestOutput]:
    """Every output there is, but for those the reader has."""
    gc.collect()
    others = {id(STREAM_FINISHED), *(id(candidate.output) for candidate in read)}
    return [thing for thing in gc.get_objects() if type(thing) is RequestOutput and id(thing) not in others]


@pytest.mark.thorough
async def test_for_a_reader_that_never_reads_three_outputs_per_candidate_are_held(llm: SteppedLLM) -> None:
    outputs = candidates(llm, "g", WHOLE_POOL, [1000] * 8)
    async with stalled(llm, outputs) as read:
        await llm.step_to_the_end()
        held = held_outputs(read)
        # Of each candidate, on average: one in the queue, one that waits for room there, one that vLLM has merged.
        assert len(held) == 3 * 8
        assert sum(len(output.outputs[0].token_ids) for output in held) == 8 * 1000 - 1
        read += [output async for output in outputs]
        assert_complete(llm, "g", read, dict.fromkeys(range(8), 1000))
        assert len(read) == 1 + 3 * 8


def assert_complete(llm: SteppedLLM, group_id: str, read: list[CandidateOutput], lengths: dict[int, int]) -> None:
    """Each candidate's outputs hold its tokens and their logprobs, whole and in order, and its note with the last."""
    by_candidate: dict[int, list[CandidateOutput]] = {}
    for candidate in read:
        by_candidate.setdefault(candidate.index, []).append(candidate)
    assert by_candidate.keys() == lengths.keys()
    for index, parts in by_candidate.items():
        completions = [part.output.outputs[0] for part in parts]
        tokens = [token for completion in completions for token in completion.token_ids]
        assert tokens == llm.own_tokens(group_id, index, lengths[index], len(tokens))
        logprobs = [logprob for completion in completions for logprob in sampled_logprobs(completion.logprobs)]
        assert logprobs == [-k for k in range(1, len(tokens) + 1)]
        assert [part.output.finished for part in parts] == [False] * (len(parts) - 1) + [True]
        assert [part.note is not None for part in parts] == [False] * (len(parts) - 1) + [True]
        assert all(part.output.kv_transfer_params is None for part in parts)


async def test_a_stalled_group_holds_up_neither_others_nor_its_own_candidates(llm: SteppedLLM) -> None:
    outputs = candidates(llm, "stalled", RACE, [500 + i for i in range(8)])
    async with stalled(llm, outputs) as read:
        other = asyncio.create_task(collect(candidates(llm, "other", RACE, [50] * 4 + [90] * 4)))
        await let_everybody_run()
        for _ in range(100):
            await llm.step()
        assert {candidate.note.state for candidate in await other if candidate.note} == {"finished", "surplus"}
        await llm.step_to_the_end()
        read += [output async for output in outputs]
    states = {candidate.index: candidate.note.state for candidate in read if candidate.note is not None}
    assert [states[index] for index in range(8)] == ["finished"] * 4 + ["surplus"] * 4


async def collect(outputs: AsyncIterator[CandidateOutput]) -> list[CandidateOutput]:
    return [output async for output in outputs]


def in_time(work: Awaitable[Any]) -> Awaitable[Any]:
    """Fail instead of hanging."""
    return asyncio.wait_for(work, 60)


async def test_a_dead_engine_is_told_to_a_reader_that_was_not_reading(llm: SteppedLLM) -> None:
    outputs = candidates(llm, "g", WHOLE_POOL, [1000] * 8)
    async with stalled(llm, outputs) as read:
        for _ in range(20):
            await llm.step()
        llm.output_processor.propagate_error(EngineDeadError())
        with pytest.raises(EngineDeadError):
            read += await in_time(collect(outputs))


async def test_one_failure_behind_a_full_queue_leaves_the_other_candidates_whole(llm: SteppedLLM) -> None:
    outputs = candidates(llm, "g", WHOLE_POOL, [300] * 8)
    async with stalled(llm, outputs) as read:
        for _ in range(20):
            await llm.step()
        llm.output_processor.request_states["g-c3-internal"].queue.put(ConnectionError("on purpose"))
        await llm.step_to_the_end()
        read += await in_time(collect(outputs))
    *outputs_of_it, last = (candidate for candidate in read if candidate.index == 3)
    assert last == CandidateOutput(3, None, EndingNote("failed", 0, None, error="ConnectionError: on purpose"))
    assert not any(candidate.output.finished for candidate in outputs_of_it)
    others = [candidate for candidate in read if candidate.index != 3]
    assert_complete(llm, "g", others, {index: 300 for index in range(8) if index != 3})


async def test_leaving_a_stalled_group_aborts_its_candidates_and_leaves_no_task(llm: SteppedLLM) -> None:
    before = asyncio.all_tasks()
    outputs = candidates(llm, "g", WHOLE_POOL, [30] * 2 + [1000] * 6)
    async with stalled(llm, outputs):
        for _ in range(100):
            await llm.step()
    assert llm.num_aborted == 6
    assert asyncio.all_tasks() == before
    await llm.step_to_the_end()
    assert not llm.output_processor.has_unfinished_requests()
    assert_nothing_left(llm.run)


@pytest.mark.thorough
async def test_without_streaming_only_the_last_outputs_wait(llm: SteppedLLM) -> None:
    outputs = candidates(llm, "g", WHOLE_POOL, [2, *range(301, 308)], stream_tokens=None)
    async with aclosing(outputs):
        first = asyncio.ensure_future(anext(outputs))
        await let_everybody_run()
        await llm.step_to_the_end()
        read = [await first]
        assert len(held_outputs(read)) == 7
        read += await in_time(collect(outputs))
    assert_complete(llm, "g", read, {0: 2, **{index: 300 + index for index in range(1, 8)}})


Happening = CandidateTokens | CandidateEnd


def run_with_pauses(
    llm: SteppedLLM, plan: GroupPlan, lengths: list[int], stream_tokens: int, steps_per_read: list[int]
) -> list[Happening]:
    """Everything a reader gets of a group that takes one happening after each of these numbers of engine steps."""

    async def run() -> list[Happening]:
        prompt = PreparedPrompt("p", [5] * 20, (lengths, sampling(stream_tokens), None))
        happenings: list[Happening] = []
        may_read = asyncio.Semaphore(0)

        async def read() -> None:
            order = GroupOrder("g", plan, prompt, "p", stream_tokens=stream_tokens)
            stream = SteppedEngine(llm).run_group(order)
            async with aclosing(stream):
                async for happening in stream:
                    await may_read.acquire()
                    happenings.append(happening)

        reading = asyncio.create_task(read())
        await let_everybody_run()
        for num_steps in steps_per_read:
            for _ in range(num_steps):
                await llm.step()
            may_read.release()
        while not reading.done():
            await llm.step()
            may_read.release()
        await reading
        return happenings

    return asyncio.run(run())


def assert_chunks_join(llm: SteppedLLM, lengths: list[int], stream_tokens: int, happenings: list[Happening]) -> None:
    chunks: dict[int, list[CandidateTokens]] = {index: [] for index in range(len(lengths))}
    ends: dict[int, CandidateEnd] = {}
    for happening in happenings:
        if isinstance(happening, CandidateEnd):
            assert happening.ending.index not in ends
            ends[happening.ending.index] = happening
        else:
            assert happening.index not in ends
            chunks[happening.index].append(happening)
    assert ends.keys() == chunks.keys()
    for index, parts in chunks.items():
        tokens = [token for part in parts for token in part.token_ids]
        assert tokens == ends[index].token_ids == llm.own_tokens("g", index, lengths[index], len(tokens))
        assert [part.offset for part in parts[:1]] == [0] * min(1, len(parts))
        assert all(b.offset == a.offset + len(a.token_ids) for a, b in pairwise(parts))
        assert all(len(part.token_ids) >= stream_tokens for part in parts[:-1])
        logprobs = [logprob for part in parts for logprob in part.logprobs]
        assert logprobs == ends[index].logprobs == [-k for k in range(1, len(tokens) + 1)]
        assert len(tokens) == ends[index].ending.num_tokens


@pytest.mark.parametrize("stream_tokens", [1, 7, 64])
def test_chunks_join_without_gaps_also_after_preemption(new_run, stream_tokens) -> None:
    llm = SteppedLLM(new_run(num_blocks=40))
    lengths = [150, 160, 170, 180, *[400] * 4]
    happenings = run_with_pauses(llm, RACE, lengths, stream_tokens, [])
    assert sum(request.num_preemptions for request in llm.run.requests.values()) > 0
    assert_chunks_join(llm, lengths, stream_tokens, happenings)
    states = Counter(happening.ending.state for happening in happenings if isinstance(happening, CandidateEnd))
    assert states == {"finished": 4, "surplus": 4}


PACES = (
    st.sampled_from([1, 3, 16]),
    st.lists(st.integers(1, 60), min_size=4, max_size=4),
    st.lists(st.integers(0, 20), max_size=40),
)
"""Tokens of a chunk, lengths of candidates, and engine steps before each read."""


@pytest.mark.thorough
@given(*PACES)
def test_chunks_join_whatever_the_pace_of_the_reader(tiny_model, stream_tokens, lengths, steps_per_read) -> None:
    llm = SteppedLLM(TracedRun(RolloutScheduler, tiny_model, num_blocks=12))
    assert_chunks_join_at_pace(llm, GroupPlan(group_size=2, redundancy=2), stream_tokens, lengths, steps_per_read)


def assert_chunks_join_at_pace(
    llm: SteppedLLM, plan: GroupPlan, stream_tokens: int, lengths: list[int], steps_per_read: list[int]
) -> None:
    happenings = run_with_pauses(llm, plan, lengths, stream_tokens, steps_per_read)
    assert_chunks_join(llm, lengths, stream_tokens, happenings)
    assert_nothing_left(llm.run)


def test_a_candidate_that_raises_is_announced_while_its_siblings_run(llm: SteppedLLM, monkeypatch) -> None:
    add_request = SteppedLLM.add_request

    async def add_request_but_one(self: SteppedLLM, request_id: str, *args: Any, **kwargs: Any) -> Any:
        if request_id.endswith("-c1"):
            raise RuntimeError("no such luck")
        return await add_request(self, request_id, *args, **kwargs)

    monkeypatch.setattr(SteppedLLM, "add_request", add_request_but_one)
    happenings = run_with_pauses(llm, GroupPlan(group_size=3, early_stop=False), [40, 40, 40], 1, [0, 5])
    ends = [i for i, happening in enumerate(happenings) if isinstance(happening, CandidateEnd)]
    failed, *others = (happenings[i].ending for i in ends)
    assert (failed.index, failed.state, failed.num_tokens) == (1, "failed", 0)
    assert ends[0] == 0
    assert [(end.state, end.num_tokens) for end in others] == [("finished", 40)] * 2
