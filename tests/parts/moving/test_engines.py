"""Ranks over HTTP, the example of a trainer on freed ones, and what becomes of a group whose rank dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import httpx
import pytest
from prometheus_client import CollectorRegistry

from examples import freed_ranks
from tests.kernel.http.conftest import serving
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.moving.fakes import FakeMoves
from tests.support.waiting import eventually
from vllm_rollout import AsyncRolloutClient
from vllm_rollout.kernel.http.answers import (
    GroupEvent,
    RanksFreeEvent,
    RestartedEvent,
    RolloutAnswer,
    TokensEvent,
    TrajectoryEvent,
)
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.parts.moving.http.engine import Drained
from vllm_rollout.parts.moving.http.plan import MovingRollout
from vllm_rollout.parts.moving.http.scaling import ScaleDownWatch
from vllm_rollout.parts.moving.rules.load import ArrivedKV, TransferCost
from vllm_rollout.parts.moving.rules.placement import ALL_OWNERS, TRAINER
from vllm_rollout.parts.moving.rules.scaling import Progress, ScaleDown


async def states(http: httpx.AsyncClient) -> list[str]:
    return [engine["state"] for engine in (await http.get("/v1/engines")).json()["engines"]]


async def test_a_rank_is_drained_and_restored(engine: FakeEngine, http: httpx.AsyncClient):
    engine.num_ranks = 3
    assert await states(http) == ["active"] * 3
    for _ in range(2):
        answer = await http.post("/v1/engines/1/drain")
        assert (answer.status_code, answer.json()["state"]) == (200, "drained")
    assert await states(http) == ["active", "drained", "active"]
    assert (await http.post("/v1/engines/0/drain", json={"timeout_s": 0.0})).status_code == 200
    assert (await http.post("/v1/engines/2/drain")).status_code == 409
    for _ in range(2):
        answer = await http.post("/v1/engines/1/restore")
        assert (answer.status_code, answer.json()["state"]) == (200, "active")
    assert await states(http) == ["drained", "active", "active"]


@pytest.mark.parametrize("action", ["drain", "restore"])
@pytest.mark.parametrize(("num_ranks", "allowed"), [(1, "only rank 0"), (4, "ranks 0 to 3")])
async def test_a_rank_that_is_not_there(engine: FakeEngine, http: httpx.AsyncClient, action, num_ranks, allowed):
    engine.num_ranks = num_ranks
    answer = await http.post(f"/v1/engines/4/{action}")
    assert answer.status_code == 404
    assert allowed in answer.json()["error"]["message"]


@pytest.mark.parametrize(("rank", "body", "param"), [
    ("-1", {}, "rank"), ("one", {}, "rank"), ("0", {"timeout_s": -1.0}, "timeout_s"), ("0", {"wait": True}, "wait"),
])  # fmt: skip
async def test_bad_input_is_named(engine: FakeEngine, http: httpx.AsyncClient, rank, body, param):
    engine.num_ranks = 2
    answer = await http.post(f"/v1/engines/{rank}/drain", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert await states(http) == ["active"] * 2


async def test_what_moved_is_told_of_each_rank(engine: FakeEngine, http: httpx.AsyncClient):
    engine.num_ranks = 2
    engine.part(FakeMoves).arrived[1] = 0.25, ArrivedKV(2, 24, 1, TransferCost(1e-5, 16))
    names = ("moving_s", "num_moved_in_with_kv", "num_kv_blocks_in", "num_kv_fallbacks", "kv_seconds_per_token")
    ranks = (await http.get("/v1/engines")).json()["engines"]
    assert [[rank[name] for name in names] for rank in ranks] == [[0.0, 0, 0, 0, None], [0.25, 2, 24, 1, 1e-5]]


PROMPTS = [{"id": f"q{i}", "prompt": f"question {i}"} for i in range(8)]


async def test_half_of_the_ranks_are_free_while_a_rollout_runs_and_taken_back_after_it(engine, app):
    engine.num_ranks = 4
    engine.step_s = 0.002
    await engine.part(FakeMoves).drain(3, 0.0)  # by somebody else
    seen: list[list[str]] = []
    with serving(app) as url:
        async with AsyncRolloutClient(url) as client, httpx.AsyncClient(base_url=url) as http:
            async for event in client.stream(PROMPTS, 4, sampling_params={"seed": 1}, scale_down="auto"):
                if event.type == "ranks_free":
                    freed = event
                    seen.append(await states(http))
                if event.type == "done":
                    done = event
            after = await states(http)
            advice = (await http.get("/v1/engines/advice")).json()
    assert len(freed.ranks) == 1  # of three
    assert [state == "active" for state in seen[0]].count(True) == 2
    assert (done.freed.ranks, done.freed.num_moved) == (freed.ranks, 0)
    assert "of 32 responses" in freed.reason
    assert after == ["active"] * 3 + ["draining" if engine.num_running else "drained"]
    assert (advice["scale_down"]["reason"], advice["num_responses"]) == ("too_early", 0)


class PlannedMoves(FakeMoves):
    """Frees ranks 2 and 3; the trainer drains some others between plan and deed."""

    trainers: tuple[int, ...] = ()
    is_restoring = False

    async def plan_scale_down(self, progress: Progress) -> ScaleDown:
        for rank in self.trainers:
            await self.drain(rank, 0.0)
        return ScaleDown("free", "", (2, 3))

    async def restore(self, rank: int, owner: str = ALL_OWNERS) -> None:
        self.is_restoring = True
        await asyncio.sleep(0)
        await super().restore(rank, owner)


async def scaled_down(moves: PlannedMoves, told: asyncio.Queue[RanksFreeEvent] | None = None) -> ScaleDownWatch:
    """A rollout that has got its ranks, or not."""
    watch = ScaleDownWatch(moves, "rollout", 4, time.monotonic)
    told = told or asyncio.Queue()
    watch.begin(told.put)
    watch.candidate_ended()
    for _ in range(50):
        await asyncio.sleep(0)
    return watch


class LeftMoves(PlannedMoves):
    """Work stays on some ranks, and others take groups again."""

    results: Mapping[int, tuple[bool, int]]
    """True if a rank is held, and its requests, when it was drained."""

    async def drain(self, rank: int, timeout_s: float, owner: str = TRAINER) -> Drained:
        await super().drain(rank, timeout_s, owner)
        is_held, num_left = self.results[rank]
        return Drained(is_held, 0, num_left, {}, timeout_s)


@pytest.mark.parametrize(
    ("results", "free"),
    [
        ({2: (True, 8), 3: (True, 0)}, [3]),
        ({2: (True, 0), 3: (False, 0)}, [2]),
        ({2: (True, 8), 3: (False, 8)}, None),
    ],
)
async def test_only_ranks_that_are_empty_and_stay_so_are_free(results, free):
    moves = LeftMoves(FakeEngine(num_ranks=4))
    moves.results = results
    told: asyncio.Queue[RanksFreeEvent] = asyncio.Queue()
    watch = await scaled_down(moves, told)
    assert moves.held == set(free or ())
    assert ([] if told.empty() else told.get_nowait().ranks) == (free or [])
    await watch.end()
    assert moves.held == set()


async def test_a_rollout_that_cannot_free_all_it_wanted_frees_none():
    moves = PlannedMoves(FakeEngine(num_ranks=4))
    moves.trainers = (0, 1)
    await scaled_down(moves)
    assert moves.held == {0, 1}


async def test_ranks_are_taken_back_also_when_nobody_waits_for_it(engine: FakeEngine):
    engine.num_ranks = 4
    engine.parts["moving"] = moves = PlannedMoves(engine)
    watch = await scaled_down(moves)
    assert moves.held == {2, 3}
    service = RolloutService(engine, Metrics(CollectorRegistry()))
    body = {"prompts": PROMPTS[:1], "group_size": 2, "scale_down": "auto"}
    rollout = await service.prepare(RolloutRequest.model_validate(body))
    (moving,) = (part for part in rollout.parts if isinstance(part, MovingRollout))
    moving.watch = watch
    answering = asyncio.create_task(service.answer(rollout))
    await eventually(lambda: moves.is_restoring)
    answering.cancel()
    for _ in range(50):
        await asyncio.sleep(0)
    assert answering.cancelled()
    assert moves.held == set()


async def test_no_rank_is_freed_where_the_rest_has_no_room(engine, http: httpx.AsyncClient):
    engine.num_ranks = 2
    await engine.part(FakeMoves).drain(1, 0.0)
    body = {"prompts": PROMPTS, "group_size": 2, "scale_down": "auto"}
    answer = (await http.post("/v1/rollouts", json=body)).json()
    assert answer["freed"] is None
    assert len(answer["groups"]) == 8
    assert await states(http) == ["active", "drained"]


async def test_a_trainer_starts_when_ranks_are_free_and_the_next_rollout_waits_for_it(engine, app, monkeypatch):
    engine.num_ranks = 2
    engine.step_s = 0.002
    happened = []

    def noted(what, call):
        def wrapper(*args, **kwargs):
            happened.append(what)
            return call(*args, **kwargs)

        return wrapper

    for owner, name in [
        (freed_ranks.StreamTrainer, "begin"), (freed_ranks.StreamTrainer, "add"), (freed_ranks.StreamTrainer, "finish"),
        (freed_ranks.AsyncRolloutClient, "stream"),
    ]:  # fmt: skip
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    monkeypatch.setattr(freed_ranks, "print", lambda line: happened.append(line.split()[0]), raising=False)
    monkeypatch.setattr(freed_ranks, "STEPS", 2)
    with serving(app) as url:
        await freed_ranks.main(url)
    assert happened == ["begin", "stream", "ranks", *["add"] * freed_ranks.PROMPTS, "finish", "step"] * 2


TWO = [{"id": "a", "prompt": "one"}, {"id": "b", "prompt_token_ids": [1, 2, 3]}]
LENGTHS = {0: 4, 1: 12, 2: 13, 3: 14}
REASON = "rank 1 of the engine died"


async def rolled_out(http: httpx.AsyncClient, **fields: object) -> RolloutAnswer:
    body = {"prompts": TWO, "group_size": 3, "redundancy": 1, "sampling_params": {"seed": 7}, **fields}
    answer = await http.post("/v1/rollouts", json=body)
    assert answer.status_code == 200, answer.text
    return RolloutAnswer.model_validate_json(answer.content)


async def test_without_retry_what_had_ended_is_returned_and_the_reason_is_said(http, engine: FakeEngine) -> None:
    engine.lengths, engine.losses = LENGTHS, {"b": 8}
    whole, lost = (await rolled_out(http)).groups
    assert (whole.status, len(whole.trajectories)) == ("complete", 3)
    assert lost.status == "incomplete"
    assert lost.reason.endswith(f"(3 failed): {REASON}")
    assert [trajectory.index for trajectory in lost.trajectories] == [0]
    assert [(c.index, c.state, c.num_tokens) for c in lost.candidates] == [(i, "failed", 8) for i in (1, 2, 3)]


async def test_with_retry_the_answer_is_that_of_an_engine_that_never_died(http, engine: FakeEngine) -> None:
    engine.lengths = LENGTHS
    expected = await rolled_out(http)
    engine.losses = {"a": 2, "b": 8}
    answer = await rolled_out(http, on_engine_failure="retry")
    without_ids = [group.model_dump(exclude={"group_id"}) for group in answer.groups]
    assert without_ids == [group.model_dump(exclude={"group_id"}) for group in expected.groups]
    assert answer.usage.num_restarted == 2
    assert answer.usage.model_copy(update={"num_restarted": 0}) == expected.usage


@pytest.mark.parametrize("redundancy", [1, 0])
async def test_a_group_for_whose_retry_no_rank_is_left_is_lost_and_others_go_on(http, engine: FakeEngine, redundancy):
    """One rank died, and the others are drained. A group that had not begun is refused, as before."""
    engine.finds_no_rank = lambda order: order.prompt.id in engine.outlooks
    engine.lengths, engine.losses = LENGTHS, {"b": 8}
    whole, lost = (await rolled_out(http, redundancy=redundancy, on_engine_failure="retry")).groups
    assert (whole.status, len(whole.trajectories)) == ("complete", 3)
    assert lost.status == "incomplete"
    num, why = 3 + redundancy, f"{REASON}, and every rank is drained"
    assert lost.reason == f"0 of {num} candidates finished, group_size is 3 ({num} failed): {why}"
    assert [(candidate.index, candidate.state) for candidate in lost.candidates] == [(i, "failed") for i in range(num)]
    body = {"prompts": TWO[:1], "group_size": 3, "sampling_params": {"seed": 7}}
    assert (await http.post("/v1/rollouts", json=body)).status_code == 503


def test_a_stream_says_that_a_group_begins_anew_and_what_came_before_is_void(client, engine):
    engine.lengths, engine.losses = LENGTHS, {"b": 8}
    options = {"sampling_params": {"seed": 7}, "on_engine_failure": "retry"}
    events = list(client.stream(TWO, 3, 1, stream_tokens=1, **options))
    (restart,) = [position for position, event in enumerate(events) if isinstance(event, RestartedEvent)]
    assert (events[restart].prompt_id, events[restart].reason) == ("b", REASON)
    tokens: dict[int, list[int]] = {}
    for event in events[restart:]:
        if isinstance(event, TokensEvent) and event.prompt_id == "b":
            assert event.offset == len(tokens.setdefault(event.index, []))
            tokens[event.index] += event.token_ids
        elif isinstance(event, TrajectoryEvent) and event.prompt_id == "b":
            assert tokens[event.trajectory.index] == event.trajectory.token_ids
    (group,) = [event for event in events if isinstance(event, GroupEvent) and event.prompt_id == "b"]
    assert (group.status, group.selected) == ("complete", [0, 1, 2])
