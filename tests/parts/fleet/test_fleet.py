"""A client of several servers: each prompt's group comes back once, whatever dies."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.support.waiting import WAIT_S, eventually
from vllm_rollout import AsyncRolloutClient, RolloutClient, RolloutError
from vllm_rollout.kernel.http.answers import GroupEvent, RestartedEvent, TrajectoryEvent
from vllm_rollout.parts.fleet import fleet as fleet_module
from vllm_rollout.parts.moving.http.body import EngineAnswer
from vllm_rollout.parts.moving.rules.load import DEAD

URLS = [f"http://server{number}:8000" for number in range(4)]
SUMMARY = {"created": 1, "model": "m", "usage": {}, "timing": {"started_s": []}}
FAST = {"backoff_s": 0.0, "num_retries": 1}


@dataclass
class FakeServer:
    """Says what one would, a step at a time."""

    name: str
    chance: random.Random
    dies_after: float = float("inf")
    """Number of events after which every request breaks."""
    starts_again: bool = False
    version: str = "default"
    num_weight_changes: int = 0
    requests: list[tuple[str, str]] = field(default_factory=list)
    rollouts: int = 0
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    breaks_at: str = ""
    """The path of requests that find no connection."""
    refuses: set[str] = field(default_factory=set)
    events: int = 0
    slow: asyncio.Event | None = None

    @property
    def is_dead(self) -> bool:
        return self.events >= self.dies_after

    is_lethal: bool = False
    """Every rollout breaks, and it answers at once again."""

    def tick(self) -> None:
        if self.is_lethal:
            raise httpx.ReadError("it died")
        self.events += 1
        if self.is_dead:
            raise httpx.ReadError("it died")

    async def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.requests.append((request.method, path))
        if self.is_dead or path == self.breaks_at:
            raise httpx.ConnectError("refused")
        if path in self.refuses:
            error = {"message": f"{path} is refused", "type": "BadRequest", "param": "x", "code": 400}
            return httpx.Response(400, json={"error": error})
        if path == "/v1/engines":
            return httpx.Response(200, json={"engines": [self.engine()]})
        if path == "/v1/rollouts":
            return httpx.Response(200, stream=Stream(self.stream(json.loads(request.content))))
        if path == "/v1/runs" and request.method == "POST":
            run = json.loads(request.content)
            self.runs[run["id"]] = run
        if path.startswith("/v1/runs/") and path.removeprefix("/v1/runs/") not in self.runs:
            error = {"message": "no such run", "type": "NotFound", "param": None, "code": 404}
            return httpx.Response(404, json={"error": error})
        if path == "/update_weight_version":
            self.version = json.loads(request.content)["new_version"]
            self.num_weight_changes += 1
        if path.endswith("/rewards"):
            rewards = json.loads(request.content)["rewards"]
            results = [{**reward, "status": "accepted"} for reward in rewards]
            said = {"results": results, "counts": {"accepted": len(rewards)}, "threshold": 0.5, "num_training": 0}
            return httpx.Response(200, json={**said, "id": "x", "head_version": 0, "head_versions": {}})
        await asyncio.sleep(0)
        return httpx.Response(200, json={"id": "x", "object": "list", "data": []})

    def engine(self) -> dict[str, Any]:
        numbers = [
            *("num_running", "num_waiting", "num_groups", "kv_cache_usage", "num_preemptions", "num_moved_in"),
            *("num_moved_out", "moving_s", "num_moved_in_with_kv", "num_kv_blocks_in", "num_kv_fallbacks"),
            *("num_internal_errors", "num_weight_changes"),
        ]
        said = {"rank": 0, "state": "active", "kv_seconds_per_token": None, "weight_version": self.version}
        return said | dict.fromkeys(numbers, 0) | {"num_weight_changes": self.num_weight_changes}

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        self.rollouts += 1
        id, prompts = f"rollout-{self.name}-{self.rollouts}", list(body["prompts"])
        left = [(prompt, index) for prompt in prompts for index in range(body["group_size"])]
        self.chance.shuffle(left)
        ended: Counter[str] = Counter()
        for prompt, index in left:
            group = {"prompt_id": prompt["id"], "group_id": f"{id}-{prompt['id']}"}
            if self.slow is not None:
                await self.slow.wait()
            await asyncio.sleep(0)
            self.tick()
            said = {"index": index, "num_tokens": 5, "token_ids": [1] * 5, "finish_reason": "stop"}
            yield event({"type": "trajectory", **group, "trajectory": said})
            ended[prompt["id"]] += 1
            if ended[prompt["id"]] == body["group_size"]:
                self.tick()
                yield event({"type": "group", **group, **OVER, "selected": list(range(body["group_size"]))})
        self.tick()
        yield event({"type": "done", "id": id, **SUMMARY})


OVER = {
    "status": "complete",
    "prompt_token_ids": [1],
    "lengths": {"mean": 5.0, "std": 0.0, "max": 5},
    "allocation": {"num_candidates": 2, "selection": "first"},
}


def event(said: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(said)}\n\n".encode()


class Stream(httpx.AsyncByteStream):
    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._parts:
            yield part


class Servers:
    def __init__(self, seed: int = 0, count: int = 3) -> None:
        self.all = [FakeServer(str(number), random.Random(f"{seed} {number}")) for number in range(count)]
        self.urls = URLS[:count]

    async def answer(self, request: httpx.Request) -> httpx.Response:
        return await self.all[int(request.url.host.removeprefix("server"))].answer(request)

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.answer)

    def client(self) -> AsyncRolloutClient:
        return AsyncRolloutClient(self.urls, transport=self.transport, **FAST)

    def sync_client(self) -> RolloutClient:
        return RolloutClient(self.urls, transport=self.transport, **FAST)


PROMPTS = [{"id": f"p{number}", "prompt": f"{number}"} for number in range(9)]


def test_one_address_is_a_client_of_one_server_and_several_are_of_several():
    assert isinstance(AsyncRolloutClient(URLS), AsyncRolloutClient)
    assert type(AsyncRolloutClient(URLS[0])) is AsyncRolloutClient
    assert type(AsyncRolloutClient()) is AsyncRolloutClient
    for wrong in ([], [URLS[0], URLS[0] + "/v1/"]):
        with pytest.raises(ValueError, match="base_url"):
            AsyncRolloutClient(wrong)


def test_a_rollout_is_split_over_all_servers_and_answered_in_order():
    servers = Servers()
    with servers.sync_client() as client:
        answer = client.rollout(PROMPTS, 2)
        assert [group.prompt_id for group in answer.groups] == [prompt["id"] for prompt in PROMPTS]
        assert [len(group.trajectories) for group in answer.groups] == [2] * 9
        assert [server.rollouts for server in servers.all] == [1, 1, 1]
        unnamed = client.rollout(["a", "b", "c", "d"], 2)
        assert [group.prompt_id for group in unnamed.groups] == ["0", "1", "2", "3"]
        with pytest.raises(TypeError, match=r"server0.*server2"):
            client.state()


@pytest.mark.parametrize("seed", range(200))
def test_each_prompt_comes_back_once_whatever_dies(seed):
    chance, servers = random.Random(seed), Servers(seed)
    for server in chance.sample(servers.all, chance.randrange(4)):
        server.dies_after = chance.choice([0, chance.randrange(30), chance.randrange(60)])
    prompts = [{"id": f"p{number}", "prompt": "x"} for number in range(chance.randrange(1, 12))]
    number_of_calls = chance.randrange(1, 4)

    async def one(client: AsyncRolloutClient) -> None:
        groups: Counter[str] = Counter()
        trajectories: Counter[str] = Counter()
        try:
            async with aclosing(client.stream(prompts, 2)) as events:
                async for event in events:
                    match event:
                        case GroupEvent():
                            groups[event.prompt_id] += 1
                            assert trajectories[event.group_id] == 2
                        case TrajectoryEvent():
                            assert not groups[event.prompt_id]
                            trajectories[event.group_id] += 1
                        case RestartedEvent():
                            assert not groups[event.prompt_id]
                            del trajectories[event.group_id]
        except RolloutError:
            if not all(server.is_dead for server in servers.all):
                raise
        else:
            assert groups.keys() == {prompt["id"] for prompt in prompts}
            assert sum(trajectories.values()) == 2 * len(prompts)
        assert max(groups.values(), default=1) == 1

    async def run() -> None:
        async with servers.client() as client:
            await asyncio.gather(*(one(client) for _ in range(number_of_calls)))
            assert client._servers.loads == [0, 0, 0], "nothing is left of what ended"

    asyncio.run(run())


def test_a_refusal_is_raised_with_the_server_s_name_and_nothing_is_tried_elsewhere():
    servers = Servers()
    for server in servers.all:
        server.refuses = {"/v1/rollouts"}
    with (
        servers.sync_client() as client,
        pytest.raises(RolloutError, match=r"http://server\d:8000: .*refused") as raised,
    ):
        client.rollout(PROMPTS[:1], 2)
    assert (raised.value.status, raised.value.param) == (400, "x")
    assert sum(path == "/v1/rollouts" for server in servers.all for _, path in server.requests) == 1


def test_prompts_of_one_name_are_left_to_a_server_to_refuse():
    servers = Servers()
    with servers.sync_client() as client:
        client.rollout([PROMPTS[0]] * 3, 1)
    assert sum(server.rollouts for server in servers.all) == 1


def test_a_server_that_comes_back_gets_groups_again_if_its_weights_are_those_of_the_others():
    servers = Servers(count=2)
    first, second = servers.all
    with servers.sync_client() as client:
        second.dies_after = 0
        client.rollout(PROMPTS, 2)
        assert [(engine.server, engine.state) for engine in client.engines()] == [(URLS[0], "active")]
        second.dies_after = float("inf")
        client._awaited._tried_s = client._awaited._looked_s = -1e9
        client.rollout(PROMPTS, 2)
        assert [engine.state for engine in client.engines()] == ["active", "active"]
        assert second.rollouts == 1
        second.dies_after = 0
        client._awaited._looked_s = -1e9
        client.give_weights(lambda: None, "step-1")
        assert (first.version, second.version) == ("step-1", "default")
        second.dies_after = float("inf")
        client._awaited._tried_s = client._awaited._looked_s = -1e9
        client.rollout(PROMPTS, 2)
        assert [engine.state for engine in client.engines()] == ["active", "dead"], "it has old weights"
        client.give_weights(lambda: None, "step-2")
        assert (first.version, second.version) == ("step-2", "step-2")
        assert [engine.state for engine in client.engines()] == ["active", "active"]


def test_a_server_that_began_anew_between_two_looks_is_out_until_it_has_the_weights():
    servers = Servers(count=2)
    with servers.sync_client() as client:
        client.give_weights(lambda: None, "step-1")
        client.rollout(PROMPTS, 2)
        second = servers.all[1]
        second.version, second.num_weight_changes = "default", 0
        client._awaited._looked_s = -1e9
        client.rollout(PROMPTS, 2)
        assert second.rollouts == 1
        assert [engine.state for engine in client.engines()] == ["active", "dead"]
        client.give_weights(lambda: None, "step-2")
        client.rollout(PROMPTS, 2)
        assert second.rollouts == 2


def test_a_server_that_came_back_amid_a_rollout_takes_over_from_the_next_that_dies(monkeypatch):
    monkeypatch.setattr("vllm_rollout.parts.fleet.fleet.RETRY_S", -1.0)
    monkeypatch.setattr("vllm_rollout.parts.fleet.fleet.LOOK_S", -1.0)
    servers = Servers(count=2)
    first, second = servers.all

    async def run() -> None:
        async with servers.client() as client:
            await client.engines()
            first.dies_after = 0
            returned: list[str] = []
            async with aclosing(client.stream(PROMPTS, 2)) as events:
                async for event in events:
                    if isinstance(event, GroupEvent):
                        returned.append(event.prompt_id)
                        if len(returned) == 2:
                            first.dies_after, second.dies_after = float("inf"), second.events + 1
            assert sorted(returned) == [prompt["id"] for prompt in PROMPTS]

    asyncio.run(run())
    assert (first.is_dead, second.is_dead) == (False, True)


@pytest.mark.parametrize("path", ["/pause", "/update_weight_version", "/v1/weights/recompute", "/resume"])
def test_a_server_that_was_lost_amid_an_update_is_out_until_the_next(path):
    servers = Servers(count=2)
    with servers.sync_client() as client:
        servers.all[1].breaks_at = path
        client.give_weights(lambda: None, "step-1")
        servers.all[1].breaks_at, servers.all[1].version = "", "step-1"
        client._awaited._tried_s = client._awaited._looked_s = -1e9
        client.rollout(PROMPTS, 2)
        assert (servers.all[0].rollouts, servers.all[1].rollouts) == (1, 0), "it may be paused"
        client.give_weights(lambda: None, "step-2")
        client.rollout(PROMPTS, 2)
        assert servers.all[1].rollouts == 1


def test_a_prompt_that_ends_every_server_that_has_it_is_an_error_also_where_servers_begin_anew():
    servers = Servers(count=2)
    with servers.sync_client() as client:
        for server in servers.all:
            server.is_lethal = True
        with pytest.raises(RolloutError, match=r"prompt 'p0' .* 3 servers"):
            client.rollout(PROMPTS[:1], 2)


def test_a_client_may_be_closed_twice():
    client = Servers().sync_client()
    client.close()
    client.close()


def test_rewards_for_a_server_that_just_died_are_unknown_and_the_others_are_taken():
    servers = Servers(count=2)
    with servers.sync_client() as client:
        answer = client.rollout(PROMPTS, 2)
        servers.all[1].dies_after = 0
        rewards = [(group.prompt_id, 0, 1.0) for group in answer.groups]
        counts = client.post_rewards(answer.id, rewards).counts
        assert (counts.accepted, counts.unknown) in ((4, 5), (5, 4))
    servers = Servers(count=2)
    with servers.sync_client() as client:
        client.engines()
        servers.all[0].dies_after = 0
        named = client.post_named_rewards([("cmpl-1", 0, 1.0)])
        assert named.counts.accepted == 1
        assert client.runs() == []


def test_weights_go_to_all_and_no_group_begins_in_between():
    servers, is_given = Servers(), threading.Event()

    async def run() -> None:
        async with servers.client() as client:
            running = asyncio.Event()

            async def send() -> None:
                running.set()
                for _ in range(50):
                    await asyncio.sleep(0.001)
                assert not any(path == "/v1/rollouts" for server in servers.all for _, path in server.requests)
                is_given.set()

            giving = asyncio.create_task(client.give_weights(send, "step-1"))
            await running.wait()
            assert all(("POST", "/pause") in server.requests for server in servers.all)
            await asyncio.gather(client.rollout(PROMPTS, 1), giving)
            assert is_given.is_set()

    asyncio.run(run())
    for server in servers.all:
        paths = [path for method, path in server.requests if method == "POST"]
        assert paths[:4] == ["/pause", "/update_weight_version", "/v1/weights/recompute", "/resume"]
        assert paths[4:] == ["/v1/rollouts"]


def test_a_request_that_is_sent_again_waits_for_an_update_that_began_meanwhile():
    servers = Servers(count=2)
    for server in servers.all:
        server.breaks_at = "/v1/rollouts"

    async def run() -> None:
        async with servers.client() as client:
            updating = asyncio.Event()

            async def hold(seconds: float) -> None:  # between two attempts
                await updating.wait()

            async def send() -> None:
                updating.set()
                for server in servers.all:
                    server.breaks_at, server.requests = "", []
                for _ in range(50):
                    await asyncio.sleep(0.001)
                assert not any(path == "/v1/rollouts" for server in servers.all for _, path in server.requests)

            for member in client._members:
                member._sleep = hold
            rolling = asyncio.create_task(client.rollout(PROMPTS, 1))
            await eventually(lambda: any(path == "/v1/rollouts" for each in servers.all for _, path in each.requests))
            await client.give_weights(send, "step-1")
            assert len((await rolling).groups) == len(PROMPTS)

    asyncio.run(run())


@pytest.mark.parametrize("refused", ["/pause", "/v1/weights/recompute"])
def test_all_servers_go_on_if_one_refuses_a_part_of_an_update(refused):
    servers = Servers()
    servers.all[1].refuses = {refused}
    with servers.sync_client() as client, pytest.raises(RolloutError, match="server1"):
        client.give_weights(lambda: None, "step-1")
    for server in servers.all:
        assert server.requests[-1] == ("POST", "/resume")


def test_a_run_is_found_where_it_is_and_not_made_anew_while_a_server_is_silent(monkeypatch):
    monkeypatch.setattr("vllm_rollout.parts.fleet.with_rounds.client.AsyncRun", lambda client, _: client)
    monkeypatch.setattr("vllm_rollout.parts.rounds.client.run_calls.typed", lambda _: lambda response: response)
    servers = Servers()

    async def run() -> None:
        async with servers.client() as client:
            places = {await client.run(2, 2, id=f"run{number}") for number in range(3)}
            assert {place.base_url for place in places} == set(URLS[:3])
        async with servers.client() as client:
            for number in range(3):
                place = await client.run(2, 2, id=f"run{number}")
                (mine,) = [server for server in servers.all if f"run{number}" in server.runs]
                assert place.base_url == URLS[int(mine.name)]
            servers.all[1].dies_after = 0
            client._looked_s = -1e9
            (lost,) = servers.all[1].runs
            with pytest.raises(RolloutError, match=f"run '{lost}' .*server1"):
                await client.run(2, 2, id=lost)
            await client.run(2, 2)

    asyncio.run(run())


def test_leaving_a_stream_early_leaves_no_load_and_no_task():
    servers = Servers()

    async def run() -> None:
        async with servers.client() as client:
            async with aclosing(client.stream(PROMPTS, 2)) as events:
                await anext(events)
            assert client._servers.loads == [0, 0, 0]
            assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_without_any_server_the_error_names_all():
    servers = Servers(count=2)
    for server in servers.all:
        server.dies_after = 0
    calls: list[Callable[[RolloutClient], object]] = [
        lambda client: client.rollout(PROMPTS, 1),
        lambda client: client.models(),
        lambda client: client.run(1, 1),
    ]
    with servers.sync_client() as client:
        for call in calls:
            with pytest.raises(RolloutError, match=r"server0.*server1"):
                call(client)
        assert not client.health()


def test_the_last_server_may_end_after_its_last_group():
    servers = Servers(count=1)
    servers.all[0].dies_after = len(PROMPTS) * 3 + 1
    with servers.sync_client() as client:
        answer = client.rollout(PROMPTS, 2)
        assert [len(group.trajectories) for group in answer.groups] == [2] * len(PROMPTS)
        assert servers.all[0].is_dead


def test_an_exception_that_is_no_answer_of_a_server_is_raised_and_not_waited_for():
    servers = Servers(count=2)

    async def broken(body: dict[str, Any]) -> AsyncIterator[bytes]:
        raise ValueError("a fault of this program")
        yield b""

    servers.all[1].stream = broken

    async def run() -> None:
        async with servers.client() as client:
            with pytest.raises(ValueError, match="a fault of this program"):
                async with asyncio.timeout(10):
                    await client.rollout(PROMPTS, 2)

    asyncio.run(run())


WITHOUT = """
from vllm_rollout import AsyncRolloutClient, RolloutClient
for client in (RolloutClient, AsyncRolloutClient):
    assert {"drain", "rollout"} & set(dir(client)) == {"rollout"}
    try:
        client(["http://a", "http://b"])
    except ValueError as error:
        assert "base_url must be one URL, got ['http://a', 'http://b']: the part fleet" in str(error), error
        assert "take fleet out of VLLM_ROLLOUT_WITHOUT" in str(error), error
    else:
        raise AssertionError("several servers were not refused")
"""


def test_clients_without_these_parts_lack_their_methods_and_refuse_several_servers():
    left_out = {**os.environ, "VLLM_ROLLOUT_WITHOUT": "fleet,moving"}
    subprocess.run([sys.executable, "-c", WITHOUT], check=True, timeout=WAIT_S, env=left_out)


class TwoRanks(FakeServer):
    """A server of two ranks, of which one may have died, and that may have forgotten its rollouts."""

    rank_died = forgot = False
    num_posted = 0

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/engines":
            other = EngineAnswer.of(1, DEAD).model_dump() if self.rank_died else {**self.engine(), "rank": 1}
            return httpx.Response(200, json={"engines": [self.engine(), other]})
        if request.url.path.endswith("/rewards"):
            if self.forgot:
                error = {"message": "no such rollout", "type": "NotFound", "param": None, "code": 404}
                return httpx.Response(404, json={"error": error})
            self.num_posted += len(json.loads(request.content)["rewards"])
        return await super().answer(request)


def fleet_of(servers: list[TwoRanks]) -> AsyncRolloutClient:
    by_url = dict(zip(URLS, servers, strict=False))

    async def handle(request: httpx.Request) -> httpx.Response:
        return await by_url[f"{request.url.scheme}://{request.url.netloc.decode()}"].answer(request)

    return AsyncRolloutClient(list(by_url), transport=httpx.MockTransport(handle), **FAST)


async def test_a_server_that_has_lost_a_rank_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "LOOK_S", 0.0)
    servers = [TwoRanks(str(i), random.Random(i)) for i in range(2)]
    async with fleet_of(servers) as client:
        await client.give_weights(lambda: None, "step-1")
        servers[0].rank_died = True
        for _ in range(3):
            answer = await client.rollout([{"prompt_token_ids": [1]}] * 4, 2)
            assert [group.status for group in answer.groups] == ["complete"] * 4
        assert {each.server for each in await client.engines() if each.state == "active"} == {*URLS[:2]}
        servers[1].rank_died = True
        assert len((await client.rollout([{"prompt_token_ids": [1]}] * 4, 2)).groups) == 4


@pytest.mark.parametrize("which", [0, 1])
async def test_rewards_reach_the_servers_that_know_their_rollout(which: int) -> None:
    servers = [TwoRanks(str(i), random.Random(i)) for i in range(2)]
    async with fleet_of(servers) as client:
        answer = await client.rollout([{"prompt_token_ids": [1]}] * 4, 2)
        servers[which].forgot = True
        rewards = [{"prompt_id": group.prompt_id, "index": 0, "reward": 1.0} for group in answer.groups]
        counts = (await client.post_rewards(answer.id, rewards)).counts
        assert counts.unknown == 4 - servers[1 - which].num_posted
        assert servers[1 - which].num_posted > 0
