"""Rewards that the server computes while rollouts run: what comes back, is learned and is not waited for."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from vllm import SamplingParams
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind

from tests.kernel.http.conftest import events_of, http_of, make_app
from tests.kernel.http.fake_engine import FakeEngine
from tests.kernel.http.test_errors import check_error
from tests.kernel.http.test_metrics import samples
from tests.parts.pruning.fakes import FakeLearning
from tests.parts.pruning.learning_steps import PRUNING
from tests.parts.rounds.test_runs import make, play, prompts
from tests.support.waiting import eventually
from vllm_rollout.kernel import parts
from vllm_rollout.kernel.api.claims import AskedRequest
from vllm_rollout.kernel.http.answers import RolloutAnswer
from vllm_rollout.kernel.http.engine import EngineStopped
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.http.slices import SLICE_S
from vllm_rollout.kernel.rules.rewards import Grade
from vllm_rollout.parts.rewards.api.graded_answers import AnswerGrader
from vllm_rollout.parts.rewards.grading.slots import Urgency
from vllm_rollout.parts.rewards.grading.values import Trajectory
from vllm_rollout.parts.rewards.http import service
from vllm_rollout.parts.rewards.http.service import GradingService
from vllm_rollout.parts.rewards.rules.time_limits import TimeLimits

PROMPTS = [
    {"id": "a", "prompt": "1 + 1", "data": {"answer": "2"}},
    {"id": "b", "messages": [{"role": "u", "content": "x"}]},
]


def by_length(trajectory: Trajectory) -> Grade:
    """1 for an even number of tokens; FakeEngine ends each with U+2028."""
    return Grade("ok", float(trajectory.text.count("\u2028") % 2 == 0), seconds=0.5)


class FakeGraders:
    """Grades by a function, as slowly as it is told."""

    names = ("even", "other")
    limits = TimeLimits()

    def __init__(self, grade: Callable[[Trajectory], Grade] = by_length) -> None:
        self.function = grade
        self.asked: list[tuple[str, Trajectory, float | None]] = []
        self.num_cancelled = 0
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def grade(
        self, name: str, trajectory: Trajectory, *, timeout_s: float | None = None, urgency: float = 0.0, **_: Any
    ) -> Grade:
        self.asked.append((name, trajectory, timeout_s))
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return self.function(trajectory)


@pytest.fixture
def graders() -> FakeGraders:
    return FakeGraders()


@pytest.fixture
async def http(engine: FakeEngine, graders: FakeGraders) -> AsyncIterator[httpx.AsyncClient]:
    async with http_of(make_app(engine, graders=graders)) as http:
        yield http


async def roll(http: httpx.AsyncClient, status: int = 200, **body: Any) -> Any:
    request = {"prompts": PROMPTS, "group_size": 4, "redundancy": 4, "reward": "even", "sampling_params": {"seed": 2}}
    response = await http.post("/v1/rollouts", json={**request, **body})
    assert response.status_code == status, response.text
    return RolloutAnswer.model_validate_json(response.content) if status == 200 else response


async def test_each_returned_trajectory_has_its_reward_and_its_group_advantages(http, graders):
    answer = await roll(http, reward={"name": "even", "timeout_s": 7, "estimator": "mean"})
    for group in answer.groups:
        rewards = [float(trajectory.num_tokens % 2 == 0) for trajectory in group.trajectories]
        assert [trajectory.reward for trajectory in group.trajectories] == rewards
        assert {(t.reward_status, t.reward_s, t.text) for t in group.trajectories} == {("ok", 0.5, None)}
        said, mean = group.rewards, sum(rewards) / 4
        assert (said.name, said.num_rewards, said.mean, said.estimator) == ("even", 4, mean, "mean")
        assert said.advantages == [reward - mean for reward in rewards]
        assert said.teaches == (len(set(rewards)) > 1)
    assert {group.rewards.teaches for group in answer.groups} == {True}
    assert answer.usage.num_rewards == 8 == len(graders.asked)  # nobody that lost was graded
    assert {(name, timeout_s) for name, _, timeout_s in graders.asked} == {("even", 7)}
    asked = {str(trajectory.prompt): trajectory.data for _, trajectory, _ in graders.asked}
    assert asked == {"1 + 1": {"answer": "2"}, "[{'role': 'u', 'content': 'x'}]": None}


async def test_the_texts_of_many_prompts_are_made_in_slices(http, graders, monkeypatch):
    made = []

    def prompt_text(engine: FakeEngine, prompt: Any) -> str:
        time.sleep(SLICE_S)
        made.append(prompt.id)
        return f"text {prompt.id}"

    monkeypatch.setattr(FakeEngine, "prompt_text", prompt_text)
    prompts = [{"prompt_token_ids": [7, number]} for number in range(100)]
    rolling, made_by_turn = asyncio.create_task(roll(http, prompts=prompts, group_size=1, redundancy=0)), [0]
    while not rolling.done():
        await asyncio.sleep(0)
        made_by_turn.append(len(made))
    assert max(after - before for before, after in pairwise(made_by_turn)) == 1
    assert {trajectory.prompt for _, trajectory, _ in graders.asked} == {f"text {number}" for number in range(100)}


async def test_a_stream_has_a_reward_after_each_trajectory_and_a_group_after_its_rewards(http):
    events = await events_of(http, "/v1/rollouts", prompts=PROMPTS, group_size=4, redundancy=4, reward="even")
    for prompt_id in ("a", "b"):
        seen: dict[int, float | None] = {}
        for event in events:
            if event.get("prompt_id") != prompt_id:
                continue
            if event["type"] == "trajectory":
                seen[event["trajectory"]["index"]] = event["trajectory"]["reward"]
            elif event["type"] == "reward":
                assert seen[event["index"]] is None
                seen[event["index"]] = event["reward"]
            elif event["type"] == "group":
                assert sorted(seen) == event["selected"]
                assert event["rewards"]["num_rewards"] == 4
        assert set(seen.values()) <= {0.0, 1.0}


async def test_who_may_still_lose_is_graded_at_its_end_and_dropped_when_it_has_lost(http, engine, graders):
    engine.lengths = {0: 2, 1: 3, 2: 4, 3: 5, 4: 6, 5: 30}
    graders.may_end.clear()
    rollout = asyncio.create_task(roll(http, prompts=PROMPTS[:1], redundancy=2, early_stop=False, selection="shortest"))
    await eventually(lambda: graders.num_cancelled)
    graders.may_end.set()
    (group,) = (await rollout).groups
    assert [trajectory.index for trajectory in group.trajectories] == [0, 1, 2, 3]
    assert graders.num_cancelled == len(graders.asked) - 4 > 0
    assert group.rewards.num_rewards == 4


@pytest.mark.parametrize(
    ("status", "counter"),
    [("timeout", "num_reward_timeouts"), ("error", "num_reward_errors")],
)
async def test_one_that_is_not_graded_well_costs_its_siblings_nothing(http, graders, status, counter):
    def grade(trajectory: Trajectory) -> Grade:
        even = by_length(trajectory)
        return even if even.reward else Grade(status, 0.0 if status == "timeout" else None, "so it is")

    graders.function = grade
    answer = await roll(http)
    bad = [t for group in answer.groups for t in group.trajectories if t.num_tokens % 2]
    assert {(t.reward_status, t.reward, t.reward_reason) for t in bad} == {
        (status, 0.0 if status == "timeout" else None, "so it is")
    }
    assert getattr(answer.usage, counter) == len(bad) > 0
    if status != "timeout":
        for group in answer.groups:
            missing = [advantage is None for advantage in group.rewards.advantages]
            assert missing == [t.reward is None for t in group.trajectories]


async def test_a_grader_that_raises_gives_an_error(http, graders):
    def grade(trajectory: Trajectory) -> Grade:
        raise RuntimeError("oh")

    graders.function = grade
    answer = await roll(http)
    assert {t.reward_reason for group in answer.groups for t in group.trajectories} == {
        "grading failed: RuntimeError: oh"
    }


async def test_the_server_learns_from_its_own_rewards(http, graders):
    answer = await roll(http, pruning={**PRUNING, "mode": "shadow"}, redundancy=0, sampling_params={"min_tokens": 20})
    entries = [
        {"prompt_id": group.prompt_id, "index": t.index, "reward": t.reward}
        for group in answer.groups
        for t in group.trajectories
    ]
    receipt = (await http.post(f"/v1/rollouts/{answer.id}/rewards", json={"rewards": entries})).json()
    assert {result["status"] for result in receipt["results"]} == {"duplicate"}


async def test_names_of_rewards_are_told_and_too_many_trajectories_are_refused(http, graders, monkeypatch):
    response = await roll(http, 400, reward="odd")
    check_error(response, 400, "reward", ["even, other", "--rollout-reward"])
    monkeypatch.setattr(service, "MAX_PROMISED", 8)
    graders.may_end.clear()
    first = asyncio.create_task(roll(http))
    await eventually(lambda: len(graders.asked) >= 8)
    response = await roll(http, 429)
    check_error(response, 429, "reward", ["8 trajectories"])
    assert int(response.headers["retry-after"]) > 0
    other = asyncio.create_task(roll(http, reward="other"))  # who is slow holds up its own only
    await eventually(lambda: len(graders.asked) >= 16)
    graders.may_end.set()
    await asyncio.gather(first, other)
    await roll(http)
    assert (await samples(http))["grades_total.even.ok"] == 16


async def test_a_client_that_leaves_stops_what_is_graded_for_it(http, engine, graders):
    graders.may_end.clear()
    leaving = asyncio.create_task(roll(http))
    await eventually(lambda: len(graders.asked) >= 8)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await eventually(lambda: graders.num_cancelled >= 8, every_s=0.01)
    graders.may_end.set()
    assert (await roll(http)).usage.num_rewards == 8


@pytest.mark.parametrize(
    ("grades", "filtered"), [((None,) * 9, 0), ((1.0, *(None,) * 8), 0), ((1.0, 1.0, *(None,) * 7), 2)]
)
async def test_a_grader_that_fails_takes_no_prompt_out_of_its_run(http, graders, grades, filtered):
    run = {"id": "a", "group_size": 4, "prompts_per_round": 2, "prompt_speculation": 1, "response_speculation": 1}
    await http.post("/v1/runs", json={**run, "filter": "zero_variance", "reward": "even"})
    seen: Counter[str] = Counter()

    def grade(trajectory: Trajectory) -> Grade:
        seen[str(trajectory.prompt)] += 1
        reward = dict(enumerate(grades, 1)).get(seen[str(trajectory.prompt)])
        return Grade("error", reason="down") if reward is None else Grade("ok", reward)

    graders.function = grade
    asked = {"prompts": [{"id": id, "prompt": id} for id in "ab"], "sampling_params": {"seed": 2}}
    answer = (await http.post("/v1/runs/a/rounds", json=asked)).json()
    assert (len(answer["filtered"]), len(answer["groups"])) == (filtered, 2 - filtered)


async def test_a_deferred_group_launches_nobody_in_place_of_a_void_one(http, engine, graders):
    graders.function = lambda t: Grade("void") if t.prompt == "question 5" else by_length(t)
    engine.lengths = {index: index + 1 for index in range(64)}
    await make(http, reward="even", group_size=2, response_speculation=1.0, prompt_speculation=1.5)
    answer = await play(http, prompts=prompts(0, 6))
    assert answer["deferred"] == ["q4", "q5"]  # ties go to the first
    assert engine.num_launched == 12


def first_ones(*rewards: float | None) -> Callable[[Trajectory], Grade]:
    """Grades by the number of tokens, which is the index + 1 in these tests; None is void, and so are all others 1."""

    def grade(trajectory: Trajectory) -> Grade:
        index = trajectory.text.count("\u2028") - 1
        reward = rewards[index] if index < len(rewards) else 1.0
        return Grade("void", reason="no") if reward is None else Grade("ok", reward)

    return grade


async def group_of(http: httpx.AsyncClient, **fields: Any) -> Any:
    (group,) = (await roll(http, prompts=PROMPTS[:1], sampling_params={}, **fields)).groups
    return group


async def test_who_was_dropped_is_graded_when_its_place_comes_free(http, engine, graders):
    engine.lengths = {0: 1, 1: 2, 2: 3, 3: 30}
    may_end = {0: asyncio.Event(), 1: asyncio.Event(), 2: asyncio.Event(), 3: asyncio.Event()}

    async def grade(name: str, trajectory: Trajectory, **_: Any) -> Grade:
        index = trajectory.text.count("\u2028") - 1
        graders.asked.append(index)
        await may_end[min(index, 3)].wait()
        return Grade("void", reason="no") if index == 1 else Grade("ok", 1.0)

    graders.grade = grade
    rollout = asyncio.create_task(group_of(http, group_size=2, redundancy=2, early_stop=False))
    await eventually(lambda: len(graders.asked) >= 3 and (not engine.num_running))
    may_end[1].set()  # who comes next had been dropped
    await eventually(lambda: graders.asked.count(2) >= 2)
    for event in may_end.values():
        event.set()
    assert [t.index for t in (await rollout).trajectories] == [0, 2]


async def test_a_stream_says_that_a_void_trajectory_is_out(http, engine, graders):
    engine.lengths = {index: index + 1 for index in range(64)}
    graders.function = first_ones(None)
    events = await events_of(http, "/v1/rollouts", prompts=PROMPTS[:1], group_size=2, reward="even")
    told = [(e["type"], e.get("index"), e.get("candidate", {}).get("index")) for e in events]
    assert told.index(("reward", 0, None)) < told.index(("candidate", None, 0))
    (group,) = [event for event in events if event["type"] == "group"]
    assert group["selected"] == [1, 2]


async def test_a_client_that_leaves_amid_launches_leaves_nothing_running(http, engine, graders):
    engine.lengths = {index: 2 if index < 4 else 4000 for index in range(64)}
    graders.function = lambda trajectory: Grade("void")
    leaving = asyncio.create_task(roll(http, group_size=4, redundancy=0))
    await eventually(lambda: engine.num_launched > 8)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await eventually(lambda: not engine.num_running, every_s=0.01)


async def test_a_group_for_whose_refill_no_rank_is_left_is_lost_and_others_go_on(http, engine, graders):
    engine.finds_no_rank = lambda order: "+" in order.group_id
    graders.function = lambda t: Grade("void") if t.prompt == "1 + 1" else Grade("ok", 1.0)
    lost, whole = (await roll(http, group_size=2, redundancy=0)).groups
    assert (whole.status, len(whole.trajectories)) == ("complete", 2)
    assert lost.status == "incomplete"
    assert lost.reason.endswith("(2 void, 2 failed): every rank is drained")


async def test_a_group_may_have_at_least_as_many_candidates_as_it_begins_with(http):
    check_error(await roll(http, 400, max_candidates=7), 400, "max_candidates", ["may begin with 8", "got 7"])
    assert (await roll(http, max_candidates=8)).usage.num_candidates == 16
    if parts.has("shaping"):
        check_error(await roll(http, 400, redundancy="auto", max_candidates=4), 400, "max_candidates", ["got 4"])


@pytest.mark.parametrize("name", ["none", "n" * 300])
def test_an_openai_request_for_an_unknown_reward_is_told_its_field_and_all_names(graders, name):
    grader = AnswerGrader(GradingService(graders, Metrics(CollectorRegistry())), None, None)
    with pytest.raises(VLLMValidationError, match=r"even, other, got 'n.{,300}$") as error:
        grader.claim(asked_for(name))
    assert str(error.value).startswith("vllm_xargs.rollout_reward: ")
    assert error.value.parameter == "vllm_xargs.rollout_reward"


def test_an_openai_request_beside_too_many_answers_to_grade_is_told_to_wait(graders):
    grading = GradingService(graders, Metrics(CollectorRegistry()))
    grading.promise("even", service.MAX_PROMISED)
    with pytest.raises(GracefulHTTPError, match=r"^vllm_xargs\.rollout_reward: .* Wait until") as error:
        AnswerGrader(grading, None, None).claim(asked_for("even"))
    assert error.value.http_status == 429


def asked_for(name: str, **xargs: str) -> AskedRequest:
    params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
    return AskedRequest({}, params, "a", {"rollout_reward": name, **xargs}, {})


class ChanceGraders:
    """Grades by chance, after a few turns of the loop."""

    names = ("chance",)
    limits = TimeLimits()

    def __init__(self, chance: random.Random, success: float, trouble: float) -> None:
        self._chance, self._success, self._trouble = chance, success, trouble
        self.running: list[Trajectory] = []

    async def grade(
        self, name: str, trajectory: Trajectory, *, timeout_s: float | None = None, urgency: Urgency, **_: Any
    ) -> Grade:
        self.running.append(trajectory)
        try:
            for _ in range(self._chance.randrange(20)):
                await asyncio.sleep(0)
        finally:
            self.running.remove(trajectory)
        if self._chance.random() < self._trouble:
            status = self._chance.choice(["void", "error", "timeout"])
            return Grade(status, 0.0 if status == "timeout" else None, status)
        return Grade("ok", float(self._chance.random() < self._success))


async def test_grades_of_candidates_that_were_forgotten_are_counted_and_told(http, engine, caplog, monkeypatch) -> None:
    asked = {"pruning": {**PRUNING, "mode": "shadow"}, "redundancy": 0, "sampling_params": {"min_tokens": 20}}
    posted: list[Any] = []

    async def forgotten(self, rollout_id: str, rewards: list) -> None:
        posted.extend(rewards)

    monkeypatch.setattr(FakeLearning, "post_rewards", forgotten)
    answer = await roll(http, **asked)
    assert posted
    assert [f"{len(posted)} rewards teach nothing" in each for each in answer.warnings].count(True) == 1
    assert "4 rewards of rollout-" in caplog.text
    metrics = (await http.get("/metrics")).text
    assert re.search(rf'rewards_total{{status="unknown"}} {len(posted)}\.0', metrics)
    caplog.clear()

    async def dead(self, rollout_id: str, rewards: list) -> None:
        raise EngineStopped("it is dead", status=503)

    monkeypatch.setattr(FakeLearning, "post_rewards", dead)
    assert not any("teach nothing" in each for each in (await roll(http, **asked)).warnings)
    assert "teach nothing" not in caplog.text


async def rolled(seed: int, success: float, trouble: float, losses: dict[str, int], body: dict[str, Any]) -> None:
    engine = FakeEngine(losses=dict(losses), failures={3: 2})
    graders = ChanceGraders(random.Random(seed), success, trouble)
    app = make_app(engine, graders=graders)
    async with http_of(app) as http:
        if body.pop("stream"):
            events = await events_of(http, "/v1/rollouts", **body)
            groups = [event for event in events if event["type"] == "group"]
            assert events[-1]["type"] == "done", events[-1]
            usage = events[-1]["usage"]
            assert len(groups) == len(body["prompts"])
        else:
            response = await http.post("/v1/rollouts", json=body)
            assert response.status_code == 200, response.text
            answer = RolloutAnswer.model_validate_json(response.content)
            usage = answer.usage.model_dump()
            for group in answer.groups:
                check(group, body)
    assert engine.num_running == 0
    assert graders.running == []
    assert usage["generated_tokens"] == usage["returned_tokens"] + usage["wasted_tokens"]


def check(group: Any, body: dict[str, Any]) -> None:
    indices = [each.index for each in (*group.trajectories, *group.candidates)]
    assert len(indices) == len(set(indices))
    assert len(indices) <= body["max_candidates"]
    assert (len(group.trajectories) == body["group_size"]) == (group.status == "complete")
    assert all(t.reward_status in ("ok", "timeout", "error") for t in group.trajectories)
    assert [a is None for a in group.rewards.advantages] == [t.reward is None for t in group.trajectories]


@pytest.mark.thorough
@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    success=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    trouble=st.sampled_from([0.0, 0.1, 0.9]),
    early_stop=st.booleans(),
    group_size=st.integers(2, 5),
    redundancy=st.integers(0, 3),
    more=st.integers(0, 12),
    stream=st.booleans(),
    loss=st.none() | st.integers(0, 10),
)
def test_a_graded_rollout_keeps_its_promises(
    seed, success, trouble, early_stop, group_size, redundancy, more, stream, loss
):
    body = {
        "prompts": [{"id": id, "prompt": id} for id in "ab"],
        "group_size": group_size,
        "redundancy": redundancy,
        "early_stop": early_stop,
        "max_candidates": group_size + redundancy + more,
        "reward": "chance",
        "on_engine_failure": "retry" if seed % 2 else "fail",
        "sampling_params": {"seed": seed % 1000},
        "stream": stream,
    }
    losses = {} if loss is None else {"a": loss}
    asyncio.run(asyncio.wait_for(rolled(seed, success, trouble, losses, body), 60))
