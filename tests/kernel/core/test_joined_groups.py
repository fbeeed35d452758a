"""Groups whose siblings are requests of their own, seen from the API process: who meets whom, where, and what is told.

Real are the client, vLLM's output processor and the scheduler (`stepped_llm.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import OutputProcessor

from tests.kernel.api.stepped_llm import SteppedLLM, let_everybody_run
from tests.kernel.core.scheduler_runs import TracedRun, assert_nothing_left
from vllm_rollout.config import MAX_IDLE_S, UNMET_S
from vllm_rollout.kernel.core import scheduler
from vllm_rollout.kernel.http import clients
from vllm_rollout.kernel.http.metrics import Metrics

pytestmark = pytest.mark.anyio

JOIN = {"rollout_group_id": "q1", "rollout_group_size": 2, "rollout_num_candidates": 4}


@pytest.fixture
def llm(new_run: Callable[..., TracedRun]) -> SteppedLLM:
    return SteppedLLM(new_run())


def prompt(length: int, *token_ids: int) -> dict[str, Any]:
    return {"type": "token", "prompt_token_ids": list(token_ids or (5, 6, 7)), "length": length}


class Sibling:
    """A running request."""

    def __init__(
        self,
        llm: SteppedLLM,
        request_id: str,
        length: int,
        xargs: dict[str, Any] = JOIN,
        *token_ids: int,
        kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        params = SamplingParams(max_tokens=4000, seed=seed, detokenize=False, output_kind=kind, extra_args={**xargs})
        self.outputs: list[RequestOutput] = []
        self._stream = llm.generate(prompt(length, *token_ids), params, request_id, **kwargs)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> RequestOutput:
        async for output in self._stream:
            self.outputs.append(output)
        return self.outputs[-1]

    async def end(self) -> tuple[str, str | None]:
        (completion,) = (await self.task).outputs
        return completion.finish_reason, completion.stop_reason


async def race(llm: SteppedLLM, *siblings: Sibling) -> list[tuple[str, str | None]]:
    await let_everybody_run()
    await llm.step_to_the_end()
    return [await sibling.end() for sibling in siblings]


async def answer(
    llm: SteppedLLM, request_id: str, prompt: Any, xargs: dict[str, Any], n: int = 2, seed: int | None = None
) -> RequestOutput:
    """Answer of an OpenAI request that races a group by itself."""
    (only,) = await answers(llm, [(request_id, prompt)], xargs, n, seed)
    return only


async def answers(
    llm: SteppedLLM, requests: list[tuple[str, Any]], xargs: dict[str, Any], n: int, seed: int | None = None
) -> list[RequestOutput]:
    """Answers of several OpenAI requests that run together."""
    params = SamplingParams(n=n, max_tokens=400, seed=seed, detokenize=False, extra_args=xargs)
    streams = [llm.generate(prompt, params.clone(), request_id) for request_id, prompt in requests]
    tasks = [asyncio.create_task(anext(stream)) for stream in streams]
    await let_everybody_run()
    await llm.step_to_the_end()
    return await asyncio.gather(*tasks)


WON, LOST = ("stop", None), ("abort", "surplus")


async def test_siblings_that_share_a_prompt_race(llm: SteppedLLM) -> None:
    siblings = [Sibling(llm, f"r{i}", length) for i, length in enumerate((9, 30, 5, 40))]
    assert await race(llm, *siblings) == [WON, LOST, WON, LOST]
    assert_nothing_left(llm.run)
    assert len(llm.routes.ranks) == 0


@pytest.mark.parametrize(
    "stranger",
    [
        {"xargs": {**JOIN, "rollout_namespace": "run-2"}},
        {"token_ids": [5, 6, 8]},
        {"lora_request": SimpleNamespace(lora_name="sql", lora_int_id=1)},
    ],
    ids=["another run", "another prompt", "another adapter"],
)
async def test_the_same_name_elsewhere_is_another_group(llm: SteppedLLM, stranger: dict[str, Any]) -> None:
    others = {"token_ids": (), "xargs": JOIN, **stranger}
    token_ids, xargs = others.pop("token_ids"), others.pop("xargs")
    strangers = [Sibling(llm, f"s{i}", length, xargs, *token_ids, **others) for i, length in enumerate((4, 5))]
    siblings = [Sibling(llm, f"r{i}", length) for i, length in enumerate((50, 60, 70, 80))]
    assert await race(llm, *strangers, *siblings) == [WON, WON, WON, WON, LOST, LOST]


@pytest.mark.parametrize("by_its_own_id", [True, False], ids=["it leaves", "its id is aborted"])
async def test_a_request_that_bears_the_id_of_a_candidate_is_none(llm: SteppedLLM, by_its_own_id: bool) -> None:
    sibling = Sibling(llm, "r0", 30, {**JOIN, "rollout_group_size": 1, "rollout_num_candidates": 1})
    await let_everybody_run()
    stranger = Sibling(llm, "r0", 1000, {"of another": "plugin"})
    await let_everybody_run()
    await llm.step()
    if by_its_own_id:
        stranger.task.cancel()
    else:
        await llm.abort("r0")
    await let_everybody_run()
    assert len(llm.output_processor.request_states) == 1, "the stranger is gone at once, the candidate not yet"
    await llm.step_to_the_end()
    assert await sibling.end() == (WON if by_its_own_id else ("abort", None))
    assert not llm.output_processor.has_unfinished_requests()
    assert_nothing_left(llm.run)


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
async def test_a_stream_has_a_last_output_that_vllm_sends_of_siblings_that_never_began(new_run, kind) -> None:
    llm = SteppedLLM(new_run(max_num_seqs=2))
    siblings = [Sibling(llm, f"r{i}", 9, kind=kind) for i in range(4)]
    assert await race(llm, *siblings) == [WON, WON, LOST, LOST]
    for late in siblings[2:]:
        (completion,) = late.outputs[-1].outputs
        assert len(completion.token_ids) == 0
        assert bool(completion.token_ids) is (kind == RequestOutputKind.DELTA)


async def test_siblings_without_an_id_meet_by_their_prompt(llm: SteppedLLM) -> None:
    xargs = {"rollout_group_size": 2, "rollout_num_candidates": 4}
    siblings = [Sibling(llm, f"r{i}", length, xargs) for i, length in enumerate((9, 30, 5, 40))]
    again = [Sibling(llm, f"a{i}", length, xargs) for i, length in enumerate((19, 18, 50, 51))]
    strangers = [Sibling(llm, f"s{i}", 60 + i, xargs, 1, 2) for i in range(3)]
    ends = await race(llm, *siblings, *again, *strangers)
    assert ends == [WON, LOST, WON, LOST, WON, WON, LOST, LOST, WON, WON, LOST]
    # One of the strangers never came: those of the next batch do not wait for it, nor for its group's end.
    assert await race(llm, *[Sibling(llm, f"t{i}", 5 + i, xargs, 1, 2) for i in range(4)]) == [WON, WON, LOST, LOST]
    assert len({tag.group_id for tag, _ in llm.added.values()}) == 4
    assert len(llm._prompt_groups) == 0


async def test_candidates_say_whose_they_are_to_those_who_draft(llm: SteppedLLM, monkeypatch) -> None:
    xargs = {"rollout_group_size": 2, "rollout_num_candidates": 4}
    for client in ("one key", "another"):
        monkeypatch.setattr(clients, "_namespace", ContextVar("namespace", default=client))
        await race(llm, *[Sibling(llm, f"{client}-{i}", 5 + i, xargs) for i in range(4)])
        await answer(llm, f"{client}-own", [20, 21, 30, 31], {"rollout_redundancy": 2})
    said: dict[str, set[str]] = {}
    for request_id, (tag, _) in llm.added.items():
        said.setdefault(tag.namespace.partition("/")[0], set()).add(request_id.partition("-")[0])
    assert said == {"one key": {"one key"}, "another": {"another"}}


async def test_siblings_that_are_pinned_to_ranks_are_none_of_those_elsewhere(new_run) -> None:
    llm = SteppedLLM(new_run(), num_ranks=2)
    xargs = {"rollout_group_size": 2, "rollout_num_candidates": 4}
    await race(llm, *[Sibling(llm, f"r{i % 2}-{i}", 9, xargs, data_parallel_rank=i % 2) for i in range(8)])
    assert [ranks(llm, "r0"), ranks(llm, "r1")] == [{0}, {1}]
    assert len({tag.group_id for tag, _ in llm.added.values()}) == 2


async def test_of_several_api_processes_the_first_one_alone_has_groups_without_names(new_run) -> None:
    llm = SteppedLLM(new_run(), alone=False)
    await race(llm, *[Sibling(llm, f"r{i}", 9, {"rollout_group_size": 2, "rollout_num_candidates": 2}) for i in (0, 1)])
    assert len({tag.group_id for tag, _ in llm.added.values()}) == 1
    llm.client_index = 1
    params = SamplingParams(max_tokens=40, extra_args={"rollout_group_size": 2})
    with pytest.raises(VLLMValidationError, match="several API processes") as error:
        llm.generate(prompt(5), params, "r")
    assert error.value.parameter == "vllm_xargs.rollout_group_id"


async def test_a_request_s_own_group_cannot_be_joined(llm: SteppedLLM) -> None:
    sibling = Sibling(llm, "r0", 3)
    await answer(llm, "joined:00", [20, 21, 30, 31], {"rollout_redundancy": 2})
    await sibling.task
    own, joined = {tag.group_id for tag, _ in llm.added.values()}
    assert {"-" in own, "-" in joined} == {True, False}


@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA])
@pytest.mark.parametrize(
    ("says", "field", "values"),
    [
        ({"rollout_group_size": 3}, "rollout_group_size", ["is 2", "got 3"]),
        ({"rollout_num_candidates": 5}, "rollout_num_candidates", ["is 4", "got 5"]),
        ({"rollout_early_stop": 0}, "rollout_early_stop", ["is True", "got False"]),
    ],
)
async def test_a_sibling_that_says_otherwise_is_refused_with_both_values(llm, kind, says, field, values) -> None:
    first = Sibling(llm, "r0", 20)
    await let_everybody_run()
    other = Sibling(llm, "r1", 10, {**JOIN, **says}, kind=kind)
    await let_everybody_run()
    await llm.step_to_the_end()
    with pytest.raises(VLLMValidationError) as error:
        await other.task
    assert other.outputs == []
    assert error.value.parameter == f"vllm_xargs.{field}"
    for value in values:
        assert value in str(error.value)
    assert await first.end() == WON
    assert not llm.output_processor.has_unfinished_requests()
    # Another may come in its place.
    assert await race(llm, *[Sibling(llm, f"s{i}", 9 + i) for i in range(3)]) == [WON, LOST, LOST]
    assert_nothing_left(llm.run)
    assert len(llm.routes.ranks) == 0


async def test_the_id_of_a_request_may_be_large_and_no_id_in_the_engine_is(llm: SteppedLLM) -> None:
    id = "x" * 100_000
    assert (await answer(llm, id, [9, 30, 8], {"rollout_redundancy": 1})).request_id == id
    assert all(len(request_id) < 100 for request_id in llm.run.requests)
    sibling = Sibling(llm, id, 9)
    with pytest.raises(VLLMValidationError, match=r"^request_id: a request that joins .* at most 512 characters"):
        await sibling.task
    assert_nothing_left(llm.run)


def counted(llm: SteppedLLM) -> dict[str, float]:
    lines = generate_latest(llm.registry).decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("vllm_rollout:") and "_created" not in line)
    return {name.removeprefix("vllm_rollout:"): float(value) for name, value in values.items() if float(value)}


@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_joined_candidates_are_counted_by_end_state_and_their_tokens(llm: SteppedLLM, kind) -> None:
    llm.registry = CollectorRegistry()
    llm.rollout_metrics = Metrics(llm.registry)
    siblings = [Sibling(llm, f"r{i}", length, kind=kind) for i, length in enumerate((9, 30, 5, 40))]
    await let_everybody_run()
    for _ in range(3):
        await llm.step()
    siblings[3].task.cancel()
    await let_everybody_run()
    await llm.step_to_the_end()
    assert [await sibling.end() for sibling in siblings[:3]] == [WON, LOST, WON]
    count = counted(llm)
    lost = count['tokens_total{kind="wasted"}']
    assert 9 + 3 <= lost <= 10 + 4, "also what nobody read of the one whose client left"
    assert count == {
        'candidates_total{state="finished"}': 2,
        'candidates_total{state="surplus"}': 1,
        'candidates_total{state="failed"}': 1,
        'clients_left_total{request="joined"}': 1,
        'tokens_total{kind="returned"}': 14,
        'tokens_total{kind="wasted"}': lost,
    }


def ranks(llm: SteppedLLM, name: str) -> set[int | None]:
    return {rank for id, (_, rank) in llm.added.items() if id.startswith(name)}


async def test_siblings_meet_on_a_rank_that_has_room_and_groups_spread(new_run) -> None:
    llm = SteppedLLM(new_run(), num_ranks=2)
    siblings = []
    for i in range(4):
        for group in "abc":
            xargs = {**JOIN, "rollout_group_id": group}
            siblings.append(Sibling(llm, f"{group}{i}", 40 + i, xargs))
            await let_everybody_run()
    assert llm.routes.ranks.loads == [8, 4]
    pinned = [Sibling(llm, f"p{i}", 9, {**JOIN, "rollout_group_id": "p"}, data_parallel_rank=0) for i in range(4)]
    await race(llm, *siblings, *pinned)
    assert [ranks(llm, name) for name in "abcp"] == [{0}, {1}, {0}, {0}]
    assert llm.routes.ranks.loads == [0, 0]


async def test_siblings_meet_also_where_several_api_processes_take_them(new_run) -> None:
    processes = [SteppedLLM(new_run(), num_ranks=4, alone=False) for _ in range(2)]
    for llm in processes:
        for i in range(8):
            await race(llm, Sibling(llm, f"q{i}-", 5, {**JOIN, "rollout_group_id": f"q{i}"}))
    found = [[ranks(llm, f"q{i}-") for i in range(8)] for llm in processes]
    assert found[0] == found[1]
    assert len(set().union(*found[0])) > 1


async def test_candidates_are_inside_the_door_until_they_are_sent(llm: SteppedLLM) -> None:
    """Or an engine could be rebuilt beneath them."""
    llm.door.shut()
    siblings = [Sibling(llm, f"s{i}", 20 + i) for i in range(4)]
    await let_everybody_run()
    assert llm.num_inside == []
    llm.door.open()
    assert await race(llm, *siblings) == [WON, WON, LOST, LOST]
    assert len(llm.num_inside) == 4
    assert min(llm.num_inside) > 0
    assert llm.door.num_inside == 0


async def test_a_group_without_pruning_runs_on_an_engine_that_cannot_score(new_run) -> None:
    llm = SteppedLLM(new_run(), enable_batch_sharded_sampling=True)
    assert await race(llm, *[Sibling(llm, f"r{i}", 5 + i) for i in range(3)]) == [WON, WON, LOST]


async def test_one_that_comes_after_the_group_s_end_ends_in_its_first_step(llm: SteppedLLM) -> None:
    assert await race(llm, *[Sibling(llm, f"r{i}", 5 + i) for i in range(3)]) == [WON, WON, LOST]
    late = Sibling(llm, "late", 400)
    assert await race(llm, late) == [LOST]
    assert len(late.outputs[-1].outputs[0].token_ids) == 1
    assert_nothing_left(llm.run)
    assert len(llm.routes.ranks) == 0


async def test_more_than_were_announced_race_too_while_the_group_runs(llm: SteppedLLM) -> None:
    """A client that repeats a request which broke sends one more than it said."""
    siblings = [Sibling(llm, f"r{i}", length) for i, length in enumerate((50, 60, 70, 80, 7, 6))]
    assert await race(llm, *siblings) == [LOST, LOST, LOST, LOST, WON, WON]
    assert_nothing_left(llm.run)
    assert len(llm.routes.ranks) == 0


async def test_one_more_than_were_announced_begins_another_group_when_they_have_ended(llm: SteppedLLM) -> None:
    assert (await race(llm, *[Sibling(llm, f"r{i}", 5 + i) for i in range(4)])).count(WON) == 2
    assert await race(llm, Sibling(llm, "s0", 30)) == [WON]
    assert len(llm.run.scheduler.group_steps) == 1
    assert len(llm.routes.ranks) == 1


async def test_a_sibling_whose_client_went_away_leaves_a_place_for_the_one_that_is_sent_again(llm: SteppedLLM) -> None:
    siblings = [Sibling(llm, f"r{i}", 50 + i) for i in range(4)]
    await let_everybody_run()
    await llm.step()
    siblings[0].task.cancel()
    await let_everybody_run()
    await llm.step()
    assert await race(llm, *siblings[1:], Sibling(llm, "again", 9)) == [WON, LOST, LOST, WON]
    assert_nothing_left(llm.run)


async def test_a_trainer_that_never_sends_all_and_comes_back_does_not_meet_its_own_ghost(llm: SteppedLLM) -> None:
    """Two of four came and completed the group; the trainer died, and uses the same names again."""
    now = [0.0]
    llm.run.scheduler.clock = llm.routes._clock = lambda: now[0]

    def held() -> tuple[int, int]:
        llm.run.scheduler.forget_waiting()
        return tuple(llm.run.scheduler.group_steps.group_counts[:2])

    assert await race(llm, *[Sibling(llm, f"r{i}", 5 + i) for i in range(2)]) == [WON, WON]
    now[0] = MAX_IDLE_S
    assert held() == (0, 1)
    assert await race(llm, Sibling(llm, "too early", 5)) == [LOST]
    now[0] = 2 * MAX_IDLE_S + 1
    assert await race(llm, *[Sibling(llm, f"s{i}", 5 + i) for i in range(4)]) == [WON, WON, LOST, LOST]
    assert_nothing_left(llm.run)
    assert len(llm.routes.ranks) == 0


async def test_groups_whose_siblings_do_not_come_count_once_and_are_said_once(llm: SteppedLLM, monkeypatch) -> None:
    now, said = [0.0], []
    llm.run.scheduler.clock = llm.routes._clock = lambda: now[0]
    monkeypatch.setattr(scheduler.logger, "warning", lambda text, *args: said.append(text % args))

    def unmet() -> int:
        llm.run.scheduler.forget_waiting()
        return llm.run.scheduler.num_unmet

    groups = [{**JOIN, "rollout_group_id": name} for name in "abc"]
    for name, sent in zip("abc", (2, 3, 4), strict=True):
        await race(llm, *[Sibling(llm, f"{name}{i}", 5 + i, groups["abc".index(name)]) for i in range(sent)])
    now[0] = UNMET_S
    assert unmet() == 0
    now[0] += 1
    assert [unmet(), unmet()] == [2, 2], "all of c have come"
    assert len(said) == 1
    assert "2 of the 4 siblings" in said[0]
    assert "X-Correlation-ID" in said[0]


async def test_a_sibling_that_comes_begins_the_wait_anew(llm: SteppedLLM) -> None:
    now = [0.0]
    llm.run.scheduler.clock = llm.routes._clock = lambda: now[0]
    for i in range(3):
        assert await race(llm, Sibling(llm, f"r{i}", 5)) == [WON if i < 2 else LOST]
        now[0] += MAX_IDLE_S


async def raced(llm: SteppedLLM, request_id: str, lengths: list[int]) -> list[str | None]:
    params = SamplingParams(
        n=2, max_tokens=2000, output_kind=RequestOutputKind.FINAL_ONLY, extra_args={"rollout_redundancy": 1}
    )
    outputs = [output async for output in llm.generate(lengths, params, request_id)]
    return [choice.finish_reason for choice in outputs[-1].outputs]


@pytest.mark.parametrize("name", ["cmpl-a-0", "cmpl-a"])
async def test_the_id_of_a_request_stops_its_whole_group_and_the_count_is_what_stopped(llm: SteppedLLM, name: str):
    mine, other = (asyncio.create_task(raced(llm, id, [500, 600, 700])) for id in ("cmpl-a-0", "cmpl-ab-0"))
    await let_everybody_run()
    for _ in range(3):
        await llm.step()
    ids = [name, "unknown"]
    await llm.abort(ids)
    assert len(ids) == 3
    await llm.step_to_the_end()
    assert await mine == ["abort", "abort"]
    assert await other == ["stop", "stop"]


async def test_another_process_s_group_is_stopped_too(llm: SteppedLLM):
    """The other process has its requests in an output processor of its own."""
    running = asyncio.create_task(raced(llm, "chatcmpl-a", [500, 600, 700]))
    await let_everybody_run()
    await llm.step()
    processor, llm.output_processor = llm.output_processor, OutputProcessor(None, log_stats=False)
    ids = ["chatcmpl-a"]
    await llm.abort(ids)
    llm.output_processor = processor
    assert len(ids) == 3
    await llm.step_to_the_end()
    assert await running == ["abort", "abort"]


async def test_a_raced_request_whose_client_leaves_is_counted_with_its_tokens(llm: SteppedLLM) -> None:
    llm.registry = CollectorRegistry()
    llm.rollout_metrics = Metrics(llm.registry)
    running = asyncio.create_task(raced(llm, "cmpl-a-0", [4, 600, 700]))
    await let_everybody_run()
    for _ in range(8):
        await llm.step()
    running.cancel()
    await let_everybody_run()
    await llm.step_to_the_end()
    count = counted(llm)
    wasted = count.pop('tokens_total{kind="wasted"}')
    assert 4 + 2 * 7 <= wasted <= 4 + 2 * 9
    assert count == {
        'candidates_total{state="finished"}': 1,
        'candidates_total{state="failed"}': 2,
        'clients_left_total{request="choices"}': 1,
    }
    assert not llm.unread
    assert_nothing_left(llm.run)
