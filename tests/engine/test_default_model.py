"""`vllm-rollout serve` without a MODEL: the embedded default, through our own client.

It runs without any part: the kernel alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.engine.conftest import Server
from vllm_rollout import RolloutClient
from vllm_rollout.kernel.parts import WITHOUT, installed_parts

FLAGS = ("--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "32")


@pytest.fixture(scope="module")
def server(default_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Server(
        [sys.executable, "-m", "vllm_rollout.cli", "serve", *FLAGS], log, **{WITHOUT: ",".join(installed_parts())}
    ) as server:
        yield server


def test_the_default_model_is_served_under_its_name(server: Server) -> None:
    with RolloutClient(server.url) as client:
        assert client.models() == ["smollm2-135m-instruct"]
    assert "vllm_rollout 0.1.0 on vLLM 0.32" in server.log.read_text()


def test_a_chat_race_returns_text_that_ended_by_itself(server: Server) -> None:
    # Greedy: what a small model says when it samples depends on the seed and on the CPU's rounding.
    question = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
    with RolloutClient(server.url) as client:
        answer = client.rollout(
            [question], group_size=2, redundancy=4, sampling_params={"max_tokens": 200, "temperature": 0},
            include=["text", "logprobs"],
        )  # fmt: skip
    (group,) = answer.groups
    assert group.status == "complete"
    assert all(trajectory.finish_reason == "stop" for trajectory in group.trajectories)
    assert all(trajectory.mean_confidence is None for trajectory in group.trajectories), "no part looks at logits"
    assert all("Paris" in (trajectory.text or "") for trajectory in group.trajectories)
    assert answer.usage.generated_tokens == answer.usage.returned_tokens + answer.usage.wasted_tokens
    assert answer.usage.num_surplus + answer.usage.num_finished == 6


def test_siblings_share_a_short_chat_prompt(server: Server) -> None:
    # The block size chosen on CPU is 32: vLLM's default of 128 would share nothing here.
    question = [{"role": "user", "content": "Tell me a story about a fox and a crow. " * 4}]
    before = server.counter("vllm:prefix_cache_hits_total")
    with RolloutClient(server.url) as client:
        client.rollout([question], group_size=4, sampling_params={"max_tokens": 2})
    assert server.counter("vllm:prefix_cache_hits_total") - before >= 3 * 64
