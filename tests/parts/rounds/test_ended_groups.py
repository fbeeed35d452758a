"""Rounds that are interrupted when some of their groups are complete: those come back as they were."""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from tests.kernel.http.conftest import events_of, make_app
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.rewards.test_grading import FakeGraders
from tests.parts.rounds.test_run_faults import locked
from tests.parts.rounds.test_runs import ROUNDS, look, make, play, prompts
from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.parts.rewards.grading.values import Trajectory
from vllm_rollout.parts.rounds.http.body import RoundRequest
from vllm_rollout.parts.rounds.http.stored import EndedGroup

KEY = {"idempotency_key": "k"}
IDS = {f"q{number}" for number in range(6)}


@pytest.fixture
def graders() -> FakeGraders:
    return FakeGraders()


@pytest.fixture
def app(engine: FakeEngine, graders: FakeGraders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    monkeypatch.setattr("vllm_rollout.private_database.BUSY_TIMEOUT_S", 0.0)
    return make_app(engine, database=tmp_path / "runs.sqlite", graders=graders)


async def leave_after(app: FastAPI, num_groups: int, **body: Any) -> dict[str, Any]:
    """Begin a round and leave it when so many of its groups are over; their answers, by prompt."""
    service = app.state.run_service
    begun = await service.begin("a", RoundRequest(**KEY, **body))
    groups = {}
    async with aclosing(begun.events) as events:
        async for event in events:
            if event.type == "group":
                groups[event.prompt_id] = event.group_id
            if len(groups) == num_groups:
                break
        if begun.live.ended is not None:
            await begun.live.ended.written()
    return groups


def names(answer: dict[str, Any]) -> dict[str, str]:
    return {group["prompt_id"]: group["group_id"] for group in answer["groups"]}


@pytest.mark.parametrize("kind", ["short", "long"])
async def test_groups_that_were_over_come_back_as_they_were_and_the_others_run(app, http, engine, graders, kind):
    await make(http, reward="even")
    before = await leave_after(app, 3, prompts=prompts(0, 6 if kind == "short" else 4), kind=kind)
    num_launched, num_graded = engine.num_launched, len(graders.asked)
    answer = await play(http, **KEY)
    assert before.items() <= names(answer).items()
    assert len(answer["groups"]) == 4
    size = {"short": 3, "long": 2}[kind]
    assert engine.num_launched - num_launched == size * {"short": 3, "long": 1}[kind]
    graded_again = {trajectory.prompt for _, trajectory, _ in graders.asked[num_graded:]}
    assert not graded_again & {id.replace("q", "question ") for id in before}
    assert all(t["reward_status"] == "ok" for group in answer["groups"] for t in group["trajectories"])
    usage = answer["usage"]
    assert usage["generated_tokens"] + usage["resumed_tokens"] == usage["returned_tokens"] + usage["wasted_tokens"]
    states = ("finished", "pruned", "surplus", "deferred", "failed")
    assert usage["num_candidates"] == sum(usage[f"num_{state}"] for state in states)
    assert usage["num_rewards"] >= 8
    assert usage["resumed_tokens"] > 0
    assert (usage["num_deferred"] > 0) == (kind == "short")  # one more ends the race
    assert (await look(http))["totals"]["num_returned"] == 4
    assert await play(http, **KEY) == answer


async def test_a_round_of_which_all_groups_were_over_runs_nothing(app, http, engine):
    await make(http)
    before = await leave_after(app, 4, prompts=prompts(0, 6), reserve=prompts(6, 2))
    num_launched = engine.num_launched
    answer = await play(http, **KEY)
    assert names(answer) == before
    assert engine.num_launched == num_launched
    assert (sorted(answer["deferred"]), answer["unstarted"]) == (sorted(IDS - before.keys()), ["q6", "q7"])
    assert (await look(http))["queue"] == answer["deferred"]


async def test_it_is_told_again_why_they_have_no_reward(app, http, graders):
    graders.function = lambda trajectory: Grade("error", reason="it is broken")
    await make(http, reward="even")
    await leave_after(app, 4, prompts=prompts(0, 6))
    (warning,) = (await play(http, **KEY))["warnings"]
    assert warning.startswith("8 of 8")
    assert "it is broken" in warning


async def test_what_was_scored_in_them_is_counted_and_nobody_is_told_that_nothing_was(app, http, engine):
    engine.lengths = dict.fromkeys(range(8), 20)
    await make(http, pruning={"detection_length": 4, "mode": "shadow"}, prompt_speculation=1.0)
    whole = await play(http, prompts=prompts(8, 4))
    await leave_after(app, 4, prompts=prompts(0, 4))
    answer = await play(http, **KEY)
    assert answer["usage"]["num_scored"] == whole["usage"]["num_scored"] > 0
    assert [warning for warning in answer["warnings"] if "nothing was scored" in warning] == []


async def test_a_stream_has_their_events_again(app, http):
    await make(http)
    before = await leave_after(app, 2, prompts=prompts(0, 6))
    events = await events_of(http, ROUNDS, **KEY)
    first = [event["type"] for event in events[:9]]
    assert first == ["round", *["trajectory"] * 2, "candidate", "group", *["trajectory"] * 2, "candidate", "group"]
    assert {event["prompt_id"]: event["group_id"] for event in (events[4], events[8])} == before


async def test_other_weights_run_all_groups_anew(app, http, engine):
    await make(http)
    engine.weight_version = "v1"
    before = await leave_after(app, 3, prompts=prompts(0, 6))
    engine.weight_version = "v2"
    answer = await play(http, **KEY)
    assert not before.items() & names(answer).items()
    assert answer["usage"]["resumed_tokens"] == 0
    assert answer["weight_version"] == "v2"


async def test_filtered_groups_stay_filtered(app, http, graders):
    seen, filtered = Counter(), ["q1", "q4"]

    def grade(trajectory: Trajectory) -> Grade:
        """All the same for some prompts, in turn for others."""
        seen[trajectory.prompt] += 1
        return Grade(
            "ok", float(trajectory.prompt.replace("question ", "q") in filtered or seen[trajectory.prompt] % 2)
        )

    graders.function = grade
    await make(http, reward="even", filter="zero_variance", redundancy=0)
    before = await leave_after(app, 5, prompts=prompts(0, 6), reserve=prompts(6, 3))
    num_graded = Counter(seen)
    events = await events_of(http, ROUNDS, **KEY)
    told = [(event["type"], event["prompt_id"]) for event in events if event["type"] in ("group", "filtered")]
    assert {id for type, id in told if type == "filtered"} == set(filtered)
    assert all(told.index(("group", id)) < told.index(("filtered", id)) for id in filtered)
    answer = await play(http, **KEY)
    assert (len(answer["groups"]), answer["filtered"]) == (4, filtered)
    assert {id: name for id, name in before.items() if id not in filtered}.items() <= names(answer).items()
    assert not {id.replace("q", "question ") for id in before} & (seen - num_graded).keys()


async def test_a_group_is_told_before_it_is_filtered_by_its_grades(http, graders):
    graders.function = lambda trajectory: Grade("ok", 1.0)
    await make(http, reward="even", filter="zero_variance", redundancy=0)
    events = await events_of(http, ROUNDS, prompts=prompts(0, 6), stream=True)
    told = [(event["type"], event["prompt_id"]) for event in events if event["type"] in ("group", "filtered")]
    filtered = [id for type, id in told if type == "filtered"]
    assert filtered
    assert all(told.index(("group", id)) < told.index(("filtered", id)) for id in filtered)


async def test_posted_rewards_filter_anew(app, http):
    await make(http, filter="zero_variance")
    before = await leave_after(app, 2, prompts=prompts(0, 6), stream=True)
    assert (await look(http))["open_round"]["state"] == "interrupted"
    begun = await app.state.run_service.begin("a", RoundRequest(**KEY, stream=True))
    async with aclosing(begun.events) as events:
        async for event in events:
            if event.type == "group":
                assert event.group_id not in before.values()
                break


async def test_what_cannot_be_read_runs_anew(app, http):
    await make(http)
    before = await leave_after(app, 3, prompts=prompts(0, 6))
    app.state.run_service._store._db.execute("UPDATE ended SET body = x'00' WHERE number = ?", (int(min(before)[1:]),))
    answer = await play(http, **KEY)
    assert len(answer["groups"]) == 4
    assert len(before.items() & names(answer).items()) == 2


async def test_a_group_without_all_its_trajectories_runs_anew(app, http, engine):
    await make(http)
    engine.failures = dict.fromkeys(range(64), 1)
    before = await leave_after(app, 3, prompts=prompts(0, 4), kind="long")
    engine.failures = {}
    answer = await play(http, **KEY)
    assert {group["status"] for group in answer["groups"]} == {"complete"}
    assert not before.items() & names(answer).items()


async def test_a_round_that_is_not_ones_own_any_more_keeps_nothing(app, http):
    await make(http)
    await leave_after(app, 1, prompts=prompts(0, 6))
    store = app.state.run_service._store
    store.keep_ended("a", "other.1", {0: EndedGroup(None, b""), 1: EndedGroup(None, b"")})
    store.keep_ended("gone", "other.1", {0: EndedGroup(None, b"")})
    assert store._db.execute("SELECT COUNT(*) FROM ended").fetchone() == (1,)


async def test_a_disk_that_takes_no_group_holds_nobody_up(app, http):
    await make(http)
    service = app.state.run_service
    begun = await service.begin("a", RoundRequest(**KEY, prompts=prompts(0, 6)))
    groups = []
    async with aclosing(begun.events) as events:
        with locked(service._store):
            async for event in events:
                groups += [event.group_id] if event.type == "group" else []
                if len(groups) == 3:
                    break
            await begun.live.ended.written()
    answer = await play(http, **KEY)
    assert len(answer["groups"]) == 4
    assert not set(groups) & set(names(answer).values())


@pytest.mark.parametrize("how", ["closed", "given up", "deleted"])
async def test_they_are_gone_with_their_round(app, http, how):
    await make(http)
    await leave_after(app, 3, prompts=prompts(0, 6))
    if how == "closed":
        await play(http, **KEY)
    elif how == "given up":
        await http.delete(f"{ROUNDS}/0")
    else:
        await http.delete("/v1/runs/a")
    assert app.state.run_service._store._db.execute("SELECT COUNT(*) FROM ended").fetchone() == (0,)
