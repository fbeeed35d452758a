"""A judge beside a server: it grades, it dies alone, and it ends with the server however that ends."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import psutil
import pytest

from tests.engine.conftest import TIMEOUT_S, Server, lives, serve_command
from vllm_rollout.parts.rewards.grading import Grade, Trajectory
from vllm_rollout.parts.rewards.grading.judge import ENGINE_MODEL, ENGINE_VARIABLE, Judge, JudgeEngine

FLAGS = "--enforce-eager --max-model-len 512 --max-num-seqs 4 --block-size 32 --dtype float32"
TEXT = "hello world"


def graded(text: str, **terms: object) -> Grade:
    async def ask() -> Grade:
        async with Judge(template="{text}", api="completions", **terms) as judge:
            return await judge.grade(Trajectory("", text), TIMEOUT_S)

    return asyncio.run(ask())


def likeliest(engine: JudgeEngine) -> list[str]:
    """Next tokens that differ in more than case and spaces, the likeliest first."""
    answer = httpx.post(
        f"{engine.url}/v1/completions",
        json={"model": ENGINE_MODEL, "prompt": TEXT, "max_tokens": 1, "logprobs": 20, "temperature": 0},
        headers={"Authorization": f"Bearer {engine.api_key}"},
        timeout=TIMEOUT_S,
    ).json()
    found = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    return list(dict.fromkeys(token.strip().casefold() for token in sorted(found, key=found.__getitem__, reverse=True)))


def test_a_judge_beside_a_server(tiny_model, tmp_path, monkeypatch) -> None:
    command = serve_command(tiny_model, "--max-model-len", "512", "--rollout-judge", tiny_model)
    with Server([*command, f"--rollout-judge-args={FLAGS}"], tmp_path / "log") as server:
        log = re.search(r"judge .* starts; its log: (\S+)", server.log.read_text())[1]
        monkeypatch.setenv(ENGINE_VARIABLE, str(Path(log).with_name("judge.json")))
        engine = JudgeEngine.of_this_server()
        assert httpx.get(f"{engine.url}/v1/models").status_code == 401

        first, second = [token for token in likeliest(engine) if token][:2]
        likely, unlikely = (graded(TEXT, choices={first: a, second: 1 - a}) for a in (1, 0))
        assert likely.status == "ok", likely.reason
        assert likely.reward + unlikely.reward == pytest.approx(1)
        assert 1 > likely.reward > 0
        spoken = graded(TEXT, pattern=r"(?s)(.+)", values={"never": 1})
        assert "is none of never" in spoken.reason

        port = engine.url.rpartition(":")[2]
        everything = psutil.process_iter(["cmdline"])
        (judge,) = [each for each in everything if {ENGINE_MODEL, port} <= set(each.info["cmdline"] or [])]
        keeper = judge.parent()
        judge.kill()
        server.wait_until(lambda: JudgeEngine.of_this_server().failure)
        refused = graded("another", choices={"x": 1})
        assert (refused.status, refused.reward) == ("error", None)
        assert "exit status -9" in refused.reason
        assert server.rollout(prompts=[{"prompt": TEXT}], group_size=2, sampling_params={"max_tokens": 4})["groups"]

        keepers = [keeper, *keeper.children(recursive=True)]
        keeper.parent().kill()
        server.wait_until(lambda: not any(map(lives, keepers)))
