"""Redundancy "auto", dual-end with patience, what the answer says of them, and what ranks are told to expect."""

import asyncio
from collections.abc import Sequence
from contextlib import closing

import httpx
import pytest

from tests.kernel.http.conftest import DEADLINE_S, make_app
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.moving.fakes import FakeMoves
from tests.parts.shaping.fakes import FakeShaping
from tests.parts.shaping.steps import lengths_of
from tests.support.waiting import eventually, wait_until
from vllm_rollout.kernel.http import gauges
from vllm_rollout.kernel.http.engine import Outlook, RequestError
from vllm_rollout.parts.moving.rules.load import ArrivedKV
from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve
from vllm_rollout.parts.shaping.rules.drift import StepDrift
from vllm_rollout.parts.shaping.rules.history import LengthHistory, ObservedLength

FLAT = CostModel(((100.0, PTLCurve((1.0, 64.0), (0.01, 0.011))),))
"""A step costs nearly the same for 64 candidates as for one: redundancy is cheap."""
STEEP = CostModel(((100.0, PTLCurve((1.0, 64.0), (0.001, 0.064))),))
"""Each candidate adds as much as the first one."""


def body(*ids: str, **fields) -> dict:
    prompts = [{"id": id, "prompt": f"prompt {id}"} for id in ids]
    return {"prompts": prompts, "group_size": 4, "redundancy": "auto", "sampling_params": {"seed": 3}, **fields}


def seen(engine: FakeEngine, key: str, *lengths: int, times: int = 3) -> None:
    for _ in range(times):
        seen_lengths = [ObservedLength(length, censored=False) for length in lengths]
        lengths_of(engine).observe(f"id:{key}", seen_lengths)


async def rollout(http: httpx.AsyncClient, request: dict) -> dict:
    answer = await asyncio.wait_for(http.post("/v1/rollouts", json=request), DEADLINE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_without_a_profile_the_budget_is_half_as_many_again_and_says_so(http):
    answer = await rollout(http, body("a", "b"))
    assert [group["allocation"]["num_candidates"] for group in answer["groups"]] == [6, 6]
    assert answer["budget"] == {
        "total": 12, "lower": 8, "upper": 16, "optimum": None, "rho": None, "seconds_per_candidate": None,
        "base_s": None, "tradeoff": 1.0, "source": "default",
    }  # fmt: skip
    (warning,) = answer["warnings"]
    assert "vllm-rollout profile" in warning
    assert "--rollout-profile" in warning


async def test_a_server_that_has_seen_nothing_says_that_of_its_budget(engine, http):
    engine.part(FakeShaping).cost_model = FLAT
    answer = await rollout(http, body("a", "b"))
    assert answer["budget"]["source"] == "default"
    assert answer["warnings"] == [
        "redundancy auto took 12 candidates, half as many again as wanted: this server has not seen any lengths yet."
    ]


async def test_the_profile_decides_the_budget(engine, http):
    seen(engine, "a", 50, 60, 300, 900)
    engine.part(FakeShaping).cost_model = FLAT
    generous = (await rollout(http, body("a", "b")))["budget"]
    engine.part(FakeShaping).cost_model = STEEP
    frugal = (await rollout(http, body("a", "b")))["budget"]
    assert generous["source"] == frugal["source"] == "profile"
    assert generous["total"] == generous["upper"] == 16
    assert frugal["total"] < 16
    assert frugal["optimum"] == pytest.approx(frugal["rho"] * frugal["base_s"] / frugal["seconds_per_candidate"])


async def test_where_few_have_places_answers_that_are_alike_get_no_spares(engine, http):
    engine.max_num_seqs = 8
    names = [str(number) for number in range(24)]
    for name in names:
        seen(engine, name, 70, 80, 100, 140)
    answer = await rollout(http, body(*names))
    assert (answer["budget"]["source"], answer["budget"]["total"]) == ("places", 96)
    assert {group["allocation"]["num_candidates"] for group in answer["groups"]} == {4}
    assert answer["warnings"] == []
    waited_for = await rollout(http, body(*names, early_stop=False))
    assert (waited_for["budget"]["source"], waited_for["budget"]["total"]) == ("default", 144)


async def test_a_dual_end_that_is_nowhere_applied_is_said(engine, http):
    seen(engine, "calm", 50, 51, 52, 53, times=30)
    seen(engine, "wild", 10, 60, 300, 900)
    engine.part(FakeShaping).cost_model = FLAT
    answer = await rollout(http, body("wild", selection={"dual_end": {}}))
    assert [group["allocation"]["selection"] for group in answer["groups"]] == ["shortest"]
    (warning,) = answer["warnings"]
    assert "by yourself" in warning
    assert (await rollout(http, body("wild", selection="shortest")))["warnings"] == []


async def test_stopped_candidates_are_censored_and_failed_ones_are_left_out(engine, http):
    engine.lengths = dict.fromkeys(range(5), 30) | {0: 10, 1: 12, 2: 11}
    engine.failures = {2: 4}
    await rollout(http, body("a", group_size=2, redundancy=3))
    history = lengths_of(engine).of("id:a")
    assert history.mean > 12, "two that finished after 10 and 12 tokens, two that were stopped at 12"


async def test_a_server_without_room_for_spare_candidates_says_so():
    engine = FakeEngine(max_num_seqs=4)
    transport = httpx.ASGITransport(make_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await rollout(http, body("a", selection={"dual_end": {}}))
    (group,) = answer["groups"]
    assert group["allocation"]["num_candidates"] == 4
    assert not group["allocation"]["at_upper_bound"]
    assert group["allocation"]["selection"] == "dual_end"
    assert "--max-num-seqs (4)" in answer["warnings"][0]


async def test_a_fixed_redundancy_has_no_budget(http):
    answer = await rollout(http, body("a", redundancy=1))
    assert answer["budget"] is None
    assert answer["groups"][0]["allocation"] == {
        "num_candidates": 5, "weight": None, "std_tokens": None, "at_upper_bound": False, "extreme": False,
        "selection": "first",
    }  # fmt: skip


async def test_the_budget_comes_with_the_last_event_of_a_stream(http):
    answer = await http.post("/v1/rollouts", json=body("a", "b", stream=True))
    assert '"budget":{"total":12' in answer.text.splitlines()[-2]


async def test_metrics_tell_lengths_allocations_and_drift(engine, http):
    seen(engine, "calm", 50, 51, 52, 53)
    seen(engine, "wild", 10, 60, 300, 900)
    engine.part(FakeShaping).drift = [StepDrift(16, 31, 32, 0.030, 0.020)]
    await rollout(http, body("calm", "wild"))
    metrics = (await http.get("/metrics")).text
    assert "vllm_rollout:prompts_at_upper_bound_total 1.0" in metrics
    assert "vllm_rollout:allocated_candidates_sum 12.0" in metrics
    assert 'vllm_rollout:step_time_drift_ratio{batch_sizes="16-31"} 1.5' in metrics
    dataset = lengths_of(engine).dataset()
    assert f'vllm_rollout:length_mean_tokens{{adapter=""}} {dataset.mean}' in metrics
    assert f'vllm_rollout:length_std_tokens{{adapter=""}} {dataset.std}' in metrics


async def test_an_engine_that_dies_while_it_is_told_of_lengths_does_not_spoil_the_answer(engine, http, monkeypatch):
    async def observe_lengths(*_: object) -> None:
        raise RequestError("the engine has stopped", status=503)

    monkeypatch.setattr(FakeShaping, "observe_lengths", observe_lengths)
    answer = await rollout(http, body("a"))
    assert answer["groups"][0]["status"] == "complete"


@pytest.fixture
def held_back(monkeypatch) -> dict[str, asyncio.Event]:
    """The engine hears of these prompts' lengths only when their event is set."""
    held: dict[str, asyncio.Event] = {}
    observe = FakeShaping.observe_lengths

    async def observe_lengths(part: FakeShaping, key: str, lengths: Sequence[ObservedLength], adapter: str) -> None:
        if key in held:
            await held[key].wait()
        await observe(part, key, lengths, adapter)

    monkeypatch.setattr(FakeShaping, "observe_lengths", observe_lengths)
    return held


async def until_idle(engine: FakeEngine, num_candidates: int) -> None:
    """Until that many candidates have ended, and everybody has had a turn since."""
    await eventually(lambda: engine.num_ended >= num_candidates)
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_rollout_waits_for_its_own_lengths_only(engine, http, held_back):
    held_back["id:slow"] = asyncio.Event()
    slow = asyncio.create_task(rollout(http, body("slow", redundancy=0)))
    await until_idle(engine, 4)
    assert not slow.done()
    assert (await rollout(http, body("quick", redundancy=0)))["groups"][0]["status"] == "complete"
    held_back["id:slow"].set()
    assert (await slow)["groups"][0]["status"] == "complete"


async def test_a_client_that_goes_while_the_engine_is_told_of_lengths_takes_nobody_with_it(engine, http, held_back):
    held_back |= {"id:a": asyncio.Event(), "id:b": asyncio.Event()}
    gone, stays = (asyncio.create_task(rollout(http, body(id, redundancy=0))) for id in "ab")
    await until_idle(engine, 8)
    gone.cancel()
    await asyncio.wait([gone])
    for event in held_back.values():
        event.set()
    assert (await stays)["groups"][0]["status"] == "complete"
    history = lengths_of(engine)
    assert history.of("id:b").num_groups == 1
    assert history.of("id:a").num_groups == 1, "it ended, so it teaches, whoever heard of it"


async def test_metrics_tell_what_moved_to_each_rank_and_what_groups_the_engine_holds(engine, http, monkeypatch):
    monkeypatch.setattr(gauges, "REPORT_INTERVAL_S", 0.0)
    engine.groups = dict.fromkeys("abc")
    engine.num_ranks = 2
    engine.part(FakeMoves).arrived[1] = 0.25, ArrivedKV(2, 24, 1)
    await rollout(http, body("a", redundancy=0))
    metrics = (await http.get("/metrics")).text
    for name, value in (
        ("moving_seconds", 0.25), ("groups_moved_in_with_kv", 2.0), ("kv_blocks_moved_in", 24.0),
        ("kv_move_fallbacks", 1.0), ("internal_errors", 0.0), ("weight_changes", 0.0),
    ):  # fmt: skip
        assert f'vllm_rollout:{name}_total{{rank="0"}} 0.0' in metrics
        assert f'vllm_rollout:{name}_total{{rank="1"}} {value}' in metrics
    assert 'vllm_rollout:groups_held{state="running"} 3.0' in metrics
    assert 'vllm_rollout:groups_held{state="idle"} 0.0' in metrics


async def test_several_ranks_are_told_what_to_expect_of_each_group(engine, http):
    engine.num_ranks = 2
    seen(engine, "a", 30, 34, 38)
    of_a, dataset = lengths_of(engine).of("id:a"), lengths_of(engine).dataset()
    for redundancy in (0, "auto"):
        engine.memories.base["shaping"] = LengthHistory()
        seen(engine, "a", 30, 34, 38)
        await rollout(http, body("a", "b", redundancy=redundancy, sampling_params={"seed": 3, "max_tokens": 90}))
        tokens = {id: len(f"prompt {id}") for id in "ab"}
        assert engine.outlooks == {
            "a": Outlook(of_a, tokens["a"], 90),
            "b": Outlook(dataset, tokens["b"], 90),
        }


async def test_what_a_rollout_teaches_does_not_predict_its_own_groups(engine, http):
    engine.num_ranks, engine.num_launch_places = 2, 6
    await rollout(http, body("a", "b", "c"))
    assert [its.lengths for its in engine.outlooks.values()] == [None] * 3
    await rollout(http, body("a", "b", "c"))
    assert all(its.lengths is not None for its in engine.outlooks.values())


async def test_one_rank_needs_no_predictions(engine, http):
    seen(engine, "a", 30, 34, 38)
    await rollout(http, body("a", redundancy=0))
    assert engine.outlooks == {"a": None}


def test_what_the_candidates_of_a_client_that_leaves_had_become_is_learned(client, engine):
    engine.lengths = {0: 3, **dict.fromkeys(range(1, 4), 4000)}
    engine.step_s = 0.001
    with closing(client.stream([{"id": "q", "prompt": "p"}], 4, stream_tokens=5)) as events:
        next(event for event in events if event.type == "tokens" and event.offset >= 20)
    wait_until(lambda: engine.num_running == 0)
    wait_until(lambda: lengths_of(engine).of("id:q") is not None)
    # One of 3 tokens, and three that were longer than the 20 and more that they had become.
    assert lengths_of(engine).of("id:q").mean > 25
