"""`--rollout-record` writes a trace that can be replayed."""

import asyncio
import json
import os
from contextlib import aclosing
from io import FileIO
from pathlib import Path

import httpx
import pytest

from tests.kernel.http.conftest import http_of, make_app, serving
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.rewards.test_grading import FakeGraders
from tests.support.waiting import eventually, wait_until
from vllm_rollout import AsyncRolloutClient
from vllm_rollout.kernel.http.plan_port import RolloutPart
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.rules.rewards import Reward
from vllm_rollout.parts.page.http.recorder import TraceRecorder
from vllm_rollout.parts.page.recording import file as trace_file
from vllm_rollout.parts.page.recording.file import read_trace
from vllm_rollout.parts.shaping.rules.trace import TracedCandidate


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def app(engine: FakeEngine, path: Path):
    return make_app(engine, recorder=TraceRecorder(path))


def body(*ids: str, **fields) -> dict:
    prompts = [{"id": id, "prompt": f"prompt {id}"} for id in ids]
    return {
        "prompts": prompts,
        "group_size": 2,
        "redundancy": 2,
        "sampling_params": {"seed": 3, "max_tokens": 30},
        **fields,
    }


async def post(app, *bodies: dict) -> list[dict]:
    async with http_of(app) as http:
        return [(await http.post("/v1/rollouts", json=each)).json() for each in bodies]


async def test_a_rollout_is_one_row(engine, app, path):
    engine.lengths = {0: 40, 1: 10, 2: 25, 3: 20}
    (answer, _) = await post(app, body("a", "b"), body("c", early_stop=False))
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["rollout_id"] == answer["id"]
    assert (first["model"], first["group_size"], first["max_tokens"]) == ("fake-model", 2, 30)
    assert [prompt["id"] for prompt in first["prompts"]] == ["a", "b"]
    prompt = first["prompts"][0]
    times = [prompt.pop("started_s"), *sorted(prompt.pop("ended_s")), prompt.pop("over_s"), first["seconds"]]
    assert times == sorted(times)
    assert prompt == {
        "id": "a", "position": 0, "prompt_tokens": 8, "lengths": [20, 10, 20, 20], "status": "complete",
        "ends": ["surplus", "stop", "surplus", "stop"], "selected": [1, 3],
    }  # fmt: skip
    assert (first["state"], first["num_prompts"], first["num_candidates"]) == ("over", 2, 8)
    assert second["prompts"][0]["ends"] == ["length", "stop", "stop", "stop"]
    assert "text" not in path.read_text()
    trace = read_trace(path)
    assert (trace.models, trace.group_size) == (("fake-model",), 2)
    assert trace.prompts[2].candidates == (
        TracedCandidate(30, "length"), TracedCandidate(10), TracedCandidate(25), TracedCandidate(20),
    )  # fmt: skip


async def test_a_group_for_whose_retry_no_rank_is_left_is_recorded(engine, app, path):
    engine.losses, engine.finds_no_rank = {"b": 3}, lambda order: order.prompt.id in engine.outlooks
    (answer,) = await post(app, body("a", "b", redundancy=0, on_engine_failure="retry"))
    assert [group["status"] for group in answer["groups"]] == ["complete", "incomplete"]
    (row,) = map(json.loads, path.read_text().splitlines())
    assert (row["prompts"][1]["lengths"], row["prompts"][1]["ends"]) == ([0, 0], ["failed", "failed"])
    trace = read_trace(path)
    assert (len(trace.prompts), trace.num_failed) == (1, 2)


async def test_scores_and_accepted_rewards_are_recorded(engine, app, path):
    engine.lengths = dict.fromkeys(range(4), 20)
    shadow = {"detection_length": 5, "mode": "shadow"}
    (answer,) = await post(app, body("a", pruning=shadow, early_stop=False))
    rewards = [{"prompt_id": "a", "index": index, "reward": float(index)} for index in (0, 3, 3)]
    async with http_of(app) as http:
        posted = await http.post(f"/v1/rollouts/{answer['id']}/rewards", json={"rewards": rewards})
    assert posted.json()["counts"]["accepted"] == 2
    assert json.loads(path.read_text().splitlines()[0])["detection_length"] == 5
    candidates = read_trace(path).prompts[0].candidates
    assert [candidate.reward for candidate in candidates] == [0.0, None, None, 3.0]
    assert all(candidate.score is not None for candidate in candidates)


@pytest.mark.parametrize("pruning", [{}, {"pruning": {"detection_length": 5, "mode": "shadow"}}])
async def test_rewards_that_come_while_their_round_runs_are_in_its_row_and_told(engine, app, path, pruning):
    """As a trainer posts them that filters: before there is a row."""
    engine.lengths, engine.step_s = dict.fromkeys(range(4), 20), 0.001
    told = []

    async def look(url: str) -> None:
        async with httpx.AsyncClient(timeout=30) as http, http.stream("GET", f"{url}/v1/rollouts/watch") as feed:
            async for line in feed.aiter_lines():
                told.append(line)

    with serving(app) as url:
        async with AsyncRolloutClient(url) as client:
            looking = asyncio.create_task(look(url))
            run = await client.run(
                2, 2, filter="zero_variance", sampling_params={"seed": 3, "max_tokens": 30}, **pruning
            )
            async with aclosing(run.stream([{"id": id, "prompt": id} for id in "abc"])) as events:
                async for event in events:
                    if event.type == "round":
                        rollout_id = event.id
                    elif event.type == "group":
                        rewards = [
                            {"prompt_id": event.prompt_id, "index": index, "reward": float(number)}
                            for number, index in enumerate(event.selected)
                        ]
                        await client.post_rewards(rollout_id, rewards)
            await asyncio.to_thread(wait_until, lambda: path.exists() and '"prompts"' in path.read_text())
            await asyncio.to_thread(wait_until, lambda: any('"state":"over"' in line for line in told))
            looking.cancel()
    assert len(path.read_text().splitlines()) == 1
    traced = read_trace(path).prompts
    rewarded = [sorted(c.reward for c in prompt.candidates if c.reward is not None) for prompt in traced]
    assert rewarded.count([0.0, 1.0]) == 2
    (row,) = [json.loads(line.removeprefix("data: ")) for line in told if '"state":"over"' in line]
    assert sum(reward == 1.0 for prompt in row["prompts"] for reward in prompt["rewards"] or ()) == 2


async def test_what_the_server_grades_is_in_the_row_once(engine, path):
    app = make_app(engine, recorder=TraceRecorder(path), graders=FakeGraders())
    fields = {"pruning": {"detection_length": 2, "mode": "shadow"}, "sampling_params": {"min_tokens": 20}}
    await post(app, body("a", reward="even", **fields))
    (line,) = path.read_text().splitlines()
    row = json.loads(line)["prompts"][0]
    (prompt,) = read_trace(path).prompts
    assert [prompt.candidates[index].reward for index in row["selected"]] == [
        float(row["lengths"][index] % 2 == 0) for index in row["selected"]
    ]
    assert row["reward_status"].count("ok") == 2


async def test_groups_that_were_over_when_the_client_left_are_recorded(engine, app, path):
    engine.lengths = dict.fromkeys(range(4), 20)
    engine.step_s = 0.001
    with serving(app) as url:
        async with AsyncRolloutClient(url) as client:
            prompts = [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y"}]
            sampling = {"seed": 3, "min_tokens": 5}
            async with aclosing(client.stream(prompts, 2, 2, sampling_params=sampling)) as events:
                async for event in events:
                    if event.type == "group":
                        break
        # In a thread: the connection is closed by this loop.
        await asyncio.to_thread(wait_until, lambda: path.read_text() != "")
    (row,) = (json.loads(line) for line in path.read_text().splitlines())
    assert {prompt["id"] for prompt in row["prompts"]} <= {"a", "b"}
    assert row["prompts"]


async def test_a_client_that_leaves_while_its_rollout_ends_does_not_interrupt_that(app, path):
    class Slow(RolloutPart):
        """A part whose end takes a while."""

        def __init__(self) -> None:
            self.reached, self.goes_on = asyncio.Event(), asyncio.Event()

        async def close(self) -> None:
            self.reached.set()
            await self.goes_on.wait()

    service = app.state.rollout_service
    rollout = await service.prepare(RolloutRequest.model_validate(body("a")))
    slow = Slow()
    rollout.parts = [*rollout.parts, slow]
    answering = asyncio.create_task(service.answer(rollout))
    await slow.reached.wait()
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    slow.goes_on.set()
    async with asyncio.timeout(10):
        await eventually(lambda: path.stat().st_size)
    assert [prompt.id for prompt in read_trace(path).prompts] == ["a"]
    assert service.active == {}


async def test_a_full_disk_spoils_no_rollout_and_what_comes_when_there_is_room_is_recorded(
    engine, path, caplog, monkeypatch
):
    recorder = TraceRecorder(path)
    app = make_app(engine, recorder=recorder)
    room = 0

    def write(file: FileIO, data: bytes) -> int:
        if not room:
            raise OSError(28, "No space left on device")
        return os.write(file.fileno(), data[:room])  # a part, as a disk takes that is nearly full

    monkeypatch.setattr(trace_file, "write_some", write)
    answers = await post(app, body("a"), body("b"))
    assert [answer["groups"][0]["status"] for answer in answers] == ["complete"] * 2
    (record,) = caplog.records
    assert "No space left" in record.message
    assert "--rollout-record" in record.message
    room = 7
    answers += await post(app, body("c"))
    recorder.rewards_posted(answers[0]["id"], [Reward("a", 0, 1.0, True)])  # of a rollout that is not there
    recorder.rewards_posted(answers[2]["id"], [Reward("c", 0, 1.0, True)])
    assert [prompt.id for prompt in read_trace(path).prompts] == ["c"]
    assert "goes on; 2 rows are missing" in caplog.records[1].message
    assert len(caplog.records) == 2


def test_a_path_that_cannot_be_written_is_known_at_start(tmp_path):
    with pytest.raises(FileNotFoundError):
        TraceRecorder(tmp_path / "missing" / "trace.jsonl")
