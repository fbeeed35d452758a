"""Feeds on a real engine with drafts: weights that come in flight, groups that are pruned and graded, groups that stop
at an update, ordinary requests beside them, and a server that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import LONG, Server, serve_command, with_other_weights
from vllm_rollout import AgentSession, AsyncRolloutClient, Feed, RolloutClient, RolloutError
from vllm_rollout.parts.feeds.http.answers import FeedBatch

FLAGS = ["--max-model-len", "1024", "--max-num-seqs", "32", "--dtype", "float32", "--enable-rollout-drafts"]
FLAGS += ["--rollout-reward", "odd=tests.engine.grpo_reward:odd"]
BATCH, STALENESS = 4, 2
FEED: dict[str, Any] = {
    "group_size": 2, "batch": BATCH, "max_staleness": STALENESS, "include": ["logprobs"],
    "sampling_params": {"max_tokens": 200, "min_tokens": 4, "stop_token_ids": [*range(6, 16)], "seed": 3},
}  # fmt: skip
GRADED: dict[str, Any] = {
    **FEED, "group_size": 3, "batch": 2, "redundancy": 3, "pruning": {"detection_length": 4, "min_labels": 1},
    "reward": "odd", "filter": "zero_variance",
}  # fmt: skip
STOPPED: dict[str, Any] = {
    **FEED, "batch": 1, "max_staleness": 16, "on_update": "stop",
    "sampling_params": {"max_tokens": 240, "min_tokens": 240, "seed": 3},
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Models of one shape. The weights of the last one are not finite."""
    folder = tmp_path_factory.mktemp("weights")
    other = with_other_weights(tiny_model, folder / "other", lambda each: each + 0.01)
    return [tiny_model, other, with_other_weights(tiny_model, folder / "bad", lambda each: each + torch.nan)]


@pytest.fixture
def start(tiny_model: str, tmp_path: Path) -> Iterator[Any]:
    """Starts a server with the same state as the one before."""
    started: list[Server] = []

    def start() -> Server:
        flags = [*FLAGS, "--rollout-state", str(tmp_path / "state")]
        log = tmp_path / f"server-{len(started)}.log"
        started.append(Server(serve_command(tiny_model, *flags), log, VLLM_SERVER_DEV_MODE="1"))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def prompts(first: int, count: int) -> list[dict[str, Any]]:
    return [{"id": f"q{i}", "prompt_token_ids": [20 + i, 30, 40]} for i in range(first, first + count)]


def check(batch: FeedBatch, step: int) -> list[str]:
    """Assert what a trainer relies on. Returns the ids of the batch's prompts."""
    assert (batch.version, batch.weight_version) == (step, f"step-{step}")
    for group in batch.groups:
        assert group.status == "complete"
        assert len(group.trajectories) == 2
        assert group.staleness == step - group.born <= STALENESS
        assert group.born_version == f"step-{group.born}"
        for trajectory in group.trajectories:
            spans = [int(span["version"].removeprefix("step-")) for span in trajectory.weight_versions]
            assert spans == sorted(set(spans))
            assert group.born <= spans[0] <= spans[-1] <= step
            assert trajectory.weight_versions[-1]["end"] == trajectory.num_tokens == len(trajectory.logprobs)
    return [group.prompt_id for group in batch.groups]


def pruned_at(server: Server) -> float:
    return server.counter("vllm_rollout:candidates_total", state="pruned")


def check_graded(batch: FeedBatch) -> None:
    """Assert that groups are pruned and graded, and that their rewards differ."""
    assert (len(batch.groups), batch.failed) == (2, [])
    for group in batch.groups:
        rewards = [trajectory.reward for trajectory in group.trajectories]
        assert sorted(set(rewards)) == [0.0, 1.0]
        assert group.rewards.teaches
        assert all(0 < trajectory.survival_probability <= 1 for trajectory in group.trajectories)
        assert len(group.candidates) == 3
        assert all(len(each.logprobs) == each.num_tokens for each in group.trajectories)


def stopped_with_tokens(server: Server, client: RolloutClient, weights: str) -> Feed:
    """A feed with two groups that an update to "step-0" has stopped, and that wait, because a batch is complete."""
    feed = client.feed(id="stopped", **STOPPED)
    feed.put(prompts(400, 1))
    server.wait_until(lambda: feed.refresh().num_complete == 1)
    before = server.counter("vllm:generation_tokens_total")
    feed.put(prompts(401, 2))
    server.wait_until(lambda: server.counter("vllm:generation_tokens_total") > before + 100)
    client.give_weights(weights, "step-0")
    server.wait_until(lambda: feed.refresh().num_stopped == 2)
    return feed


def check_going_on(feed: Feed) -> None:
    """Assert that stopped groups go on under the weights of now, with every token of before."""
    assert (feed.info.num_stopped, feed.info.waits_for) == (2, "trainer")
    (whole,) = feed.batch().groups
    assert (whole.prompt_id, [len(each.weight_versions) for each in whole.trajectories]) == ("q400", [1, 1])
    for batch in (feed.batch(), feed.batch()):
        (group,) = batch.groups
        assert (group.prompt_id in ("q401", "q402"), group.born_version) == (True, "early")
        for trajectory in group.trajectories:
            first, *between, last = trajectory.weight_versions
            assert (first["version"], first["start"], last["version"]) == ("early", 0, "step-6")
            assert [span["version"] for span in between] in ([], ["step-0"])  # a step between update and stop
            assert 0 < first["end"] <= trajectory.num_resumed_tokens == last["start"] <= first["end"] + 1
            assert last["end"] == 240
            assert len(trajectory.logprobs) == len(trajectory.token_ids) == trajectory.num_tokens == 240
    feed.delete()


def batch_of_agents(url: str) -> FeedBatch:
    """The batch of a feed whose agent asks one question."""

    async def run(session: AgentSession) -> float:
        await session.chat([{"role": "user", "content": "hello"}], max_tokens=8)
        return 1.0

    async def train() -> FeedBatch:
        feed_of = {"id": "agents", "sessions": {"cut_turn": "goes_on"}}
        async with AsyncRolloutClient(url) as client, client.feed(2, 1, **feed_of) as feed, feed.agents(run):
            await feed.put(prompts(500, 1))
            return await feed.batch()

    return asyncio.run(train())


def test_batches_come_while_weights_change_and_others_are_served_and_after_a_kill(
    start: Any, folders: list[str]
) -> None:
    server = start()
    with closing(RolloutClient(server.url)) as client, ThreadPoolExecutor(2) as others:
        client.give_weights(folders[0], "early")
        stopped = stopped_with_tokens(server, client, folders[0])
        feed = client.feed(id="kept", **FEED, redundancy=2)
        feed.put(prompts(0, 48))
        graded = client.feed(id="graded", **GRADED)
        graded.put(prompts(300, 120))
        body = {"prompt": "hello", "n": 2, **LONG, "max_tokens": 300}
        beside = [others.submit(server.http.post, "/v1/completions", json=body)]
        beside.append(others.submit(server.rollout, prompts=prompts(100, 3), group_size=2, redundancy=1))
        seen = []
        for step in range(6):
            batch = feed.batch(key=f"batch-{step}")
            seen += check(batch, step)
            assert len(batch.groups) == BATCH
            assert batch.max_staleness == min(step, STALENESS)  # places are always taken
            if step < 5:
                check_graded(graded.batch())
            client.give_weights(folders[step % 2], f"step-{step + 1}", kv="keep" if step % 3 else "recompute")
        assert beside[0].result().status_code == 200
        assert [group["status"] for group in beside[1].result()["groups"]] == ["complete"] * 3
        server.wait_until(lambda: bool(feed.refresh().num_complete))
        while not (graded.refresh().totals.num_filtered and pruned_at(server)):  # until its prompts are used up
            check_graded(graded.batch(timeout_s=60))
        graded.delete()
        assert stopped.refresh().num_stopped == 2
        assert server.counter("vllm:spec_decode_num_draft_tokens_total") > 0
    os.killpg(server._process.pid, signal.SIGKILL)

    server = start()
    with closing(RolloutClient(server.url)) as client:
        feed = client.feed(id="kept", **FEED, redundancy=2)
        assert feed.batch(key="batch-5") == batch
        assert (feed.info.version, feed.info.num_batches) == (6, 6)
        client.give_weights(folders[1], "step-6")
        check_going_on(client.feed(id="stopped", **STOPPED))
        for step in range(6, 12):
            seen += check(feed.batch(), step)
            client.give_weights(folders[step % 2], f"step-{step + 1}", kv="keep")
        assert not feed.batch(drain=True).groups
        assert sorted(seen) == sorted(each["id"] for each in prompts(0, 48))
        client.give_weights(folders[2], "step-13")
        feed.put(prompts(200, 6))
        agents = ThreadPoolExecutor(1).submit(batch_of_agents, server.url)
        server.wait_until(lambda: feed.refresh().waits_for == "weights")
        with pytest.raises(RolloutError, match="weights with a new name"):
            feed.batch(timeout_s=1)
        server.wait_until(lambda: server.http.get("/v1/feeds/agents").json().get("waits_for") == "weights")
        client.give_weights(folders[0], "step-14")
        for_agents = agents.result()
        assert ([each.status for each in for_agents.groups], for_agents.failed) == (["complete"], [])
        assert "NaN or infinite" in for_agents.warnings[0]
        batch = feed.batch()
        assert (len(batch.groups), batch.failed) == (BATCH, [])
        assert "NaN or infinite" in batch.warnings[0]
        feed.delete()
        server.wait_until_idle()
        assert server.http.get("/v1/engines").status_code == 200
