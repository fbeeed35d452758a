"""verl's replica with our scheduler. verl itself is in `conformance/verl`; here its two modules are small ones that
work as far as ours touches them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import httpx
import pytest

from tests.parts.sessions.turns import Turns
from tests.tools.integrations.conftest import Beside
from vllm_rollout import AsyncLLM
from vllm_rollout.parts.in_process.api.rollouts import Rollouts


@dataclass
class TokenOutput:
    token_ids: list[int]
    stop_reason: str


class Registry:
    def __init__(self) -> None:
        self.loaders: dict[str, Any] = {}

    def register(self, name: str, loader: Any) -> None:
        self.loaders[name] = loader


class HttpServer:
    """As verl's: takes keys out of the sampling parameters, and tells what was asked of its engine."""

    lengths = (2, 2, 2, 2)
    """Tokens of the candidates, as they are asked for; they end in this order."""

    def __init__(self, n: int, custom: dict[str, Any] | None) -> None:
        self.config = SimpleNamespace(n=n, custom=custom, prompt_length=4, response_length=6, max_model_len=64)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._post_init("0")

    def _post_init(self, devices: str) -> None:
        self.devices = devices

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        engine_kwargs["theirs"] = 1

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any) -> Any:
        extra_args = sampling_params.pop("extra_args", {})
        sampling_params.pop("logprobs")
        self.asked.append((request_id, extra_args))
        number = len(self.asked)
        await asyncio.sleep(0.001 * number)
        is_surplus = len(self.asked) > 2 and request_id == "r0"
        return TokenOutput([1] * self.lengths[number - 1], "aborted" if is_surplus else "completed")


@pytest.fixture
def verl(beside: Beside) -> ModuleType:
    replica = type("vLLMReplica", (), {"__init__": lambda self, rank: None})
    return beside("vllm_rollout.integrations.verl", {
        "verl.workers.rollout.replica": {"TokenOutput": TokenOutput, "RolloutReplicaRegistry": Registry()},
        "verl.workers.rollout.vllm_rollout.vllm_async_server": {"vLLMHttpServer": HttpServer, "vLLMReplica": replica},
    })  # fmt: skip


def test_importing_it_registers_another_replica_under_verls_name(verl: ModuleType) -> None:
    loader = verl.RolloutReplicaRegistry.loaders["vllm"]
    replica = loader()
    assert replica.__mro__[1].__name__ == "vLLMReplica"
    assert "RolloutServer" in repr(replica(0).server_class)


def test_the_engine_gets_our_scheduler_unless_another_is_asked_for(verl: ModuleType) -> None:
    server = verl.load_server()(2, None)
    for given, scheduler in (({}, verl.SCHEDULER_CLS), ({"scheduler_cls": "mine"}, "mine")):
        kwargs = dict(given)
        server._preprocess_engine_kwargs(kwargs)
        assert kwargs == {"scheduler_cls": scheduler, "theirs": 1}


def ask(server: Any, n: int, **sampling: Any) -> list[TokenOutput]:
    params = [{"temperature": 1.0, "logprobs": True, **sampling} for _ in range(n)]

    async def all_of_them() -> list[TokenOutput]:
        calls = [
            server.generate([1, 2], each, f"r{index}", image_data=None, priority=index)
            for index, each in enumerate(params)
        ]
        return await asyncio.gather(*calls)

    return asyncio.run(all_of_them())


def test_so_many_calls_as_samples_get_spare_candidates_and_finished_answers(verl: ModuleType) -> None:
    server = verl.load_server()(2, {"rollout_redundancy": 2})
    outputs = ask(server, 2)
    assert [output.stop_reason for output in outputs] == ["completed"] * 2
    assert [request_id for request_id, _ in server.asked] == ["r0", "r1", "r1-spare1", "r1-spare2"]
    ids = {extra_args["rollout_group_id"] for _, extra_args in server.asked}
    assert len(ids) == 1
    assert server.asked[0][1]["rollout_num_candidates"] == 4


@pytest.mark.parametrize(("sampling", "prompt_length", "limit"), [
    ({}, 2, 6), ({}, 7, 3), ({"max_tokens": 9}, 2, 9), ({"max_new_tokens": 9}, 2, 9), ({"max_tokens": 99}, 4, 60),
    ({"max_tokens": 0}, 2, 1),
])  # fmt: skip
def test_a_candidate_that_was_cut_is_known_by_the_limit_that_verl_gives_it(
    verl: ModuleType, sampling: dict[str, Any], prompt_length: int, limit: int
) -> None:
    assert verl.limit_of(verl.load_server()(2, None).config, prompt_length, sampling) == limit
    ends = [verl.end_of((TokenOutput([1] * length, "completed"), limit)) for length in (limit - 1, limit)]
    assert ends == ["finished", "truncated"]
    assert verl.end_of((TokenOutput([1] * limit, "aborted"), limit)) == "stopped"


def test_an_agent_loop_gets_a_truncated_candidate_before_a_stopped_one(
    verl: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = verl.load_server()(2, {"rollout_redundancy": 2})
    monkeypatch.setattr(server, "lengths", (2, 6, 2, 6))  # the first of them is stopped
    outputs = ask(server, 2)
    assert [len(output.token_ids) for output in outputs] == [2, 6]
    assert [output.stop_reason for output in outputs] == ["completed"] * 2


@pytest.mark.parametrize(
    ("custom", "sampling"), [(None, {}), ({}, {}), ({"rollout_redundancy": 2}, {"temperature": 0})]
)
def test_without_spare_candidates_calls_are_verls(verl: ModuleType, custom: Any, sampling: dict[str, Any]) -> None:
    server = verl.load_server()(2, custom)
    ask(server, 2, **sampling)
    assert server.asked == [("r0", {}), ("r1", {})]


@pytest.mark.parametrize("value", [-1, 1.5, "8", True])
def test_a_bad_redundancy_is_refused_when_the_server_is_made(verl: ModuleType, value: Any) -> None:
    with pytest.raises(ValueError, match=r"^rollout\.custom\.rollout_redundancy must be an integer of at least 0"):
        verl.load_server()(2, {"rollout_redundancy": value})


async def test_a_loops_session_is_finished_in_the_engines_own_service(verl: ModuleType, turns: Turns) -> None:
    engine = create_autospec(AsyncLLM, instance=True)  # it has no attribute that an AsyncLLM lacks
    engine.rollouts.return_value = Rollouts(turns.app, engine)
    server = verl.load_server()(2, {"rollout_sessions": True})
    server.engine = engine
    xargs = {"rollout_group_id": "g", "rollout_group_size": 1, "rollout_session": "s"}
    http = httpx.AsyncClient(transport=httpx.ASGITransport(turns.app), base_url="http://test")
    (await http.post("/v1/completions", json={"prompt": "a", "logprobs": 0, "vllm_xargs": xargs})).raise_for_status()
    assert await server.finish_session("s") == "finished"
