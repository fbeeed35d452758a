"""vLLM's router from the registry, before two emulated servers of ours: where requests go, and what a kill costs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from conformance.checks import Kit, Server, check, main, metric
from vllm_rollout import RolloutClient
from vllm_rollout.process import free_port

DEVICE = {"step": {"ms": 20}, "lengths": {"log_normal": {"mean": 60, "sigma": 0.8}}}
FORCED = {"emulate_lengths": 200}
LONG = {"max_tokens": 250, "extra_args": FORCED}
"""Fields of an answer that takes four seconds, so that a kill comes amid it."""
AFFINE = ("consistent_hash", "sticky_least_loaded")
"""Policies that send requests with the same header to the same server."""
SPREADING = ("round_robin", "power_of_two", "cache_aware")
UNMET = "vllm_rollout:joined_groups_unmet_total"
NUM_SIBLINGS, GROUP_SIZE = 8, 4
Answers = list[tuple[int, Any]]


@check("unmodified")
def a_race_in_one_request_works_under_every_policy(kit: Kit) -> str:
    servers = two_servers(kit)
    for policy in (*AFFINE, *SPREADING, "random"):
        with router(servers, policy) as url:
            for stream in (False, True):
                body = {**rollout_body("one"), "stream": stream}
                answer = httpx.post(f"{url}/v1/rollouts", json=body, timeout=60)
                assert answer.status_code == 200, answer.text
                assert answer.text.count('"status":"complete"') == 1
            answer = httpx.post(f"{url}/v1/completions", json=completion(servers[0], redundancy=4), timeout=60)
            assert len(answer.json()["choices"]) == GROUP_SIZE
    return f"/v1/rollouts, streamed or not, and n with rollout_redundancy, under {len(AFFINE + SPREADING) + 1} policies"


@check("unmodified")
def joined_requests_meet_by_x_correlation_id(kit: Kit) -> str:
    servers = two_servers(kit)
    for policy in AFFINE:
        with router(servers, policy) as url:
            for name in ("one", "two"):
                group = f"{policy}-{name}"
                reasons = asyncio.run(joined(url, servers[0], group, {"X-Correlation-ID": group}))
                assert raced(reasons), (policy, reasons)
                apart = asyncio.run(joined(url, servers[0], f"{group}-apart"))
                assert sum(apart.values()) == NUM_SIBLINGS
    return f"under {' and '.join(AFFINE)}, with a request id of each sibling's own beside it"


@check("unmodified")
def siblings_that_are_spread_run_to_their_end_and_the_servers_say_so(kit: Kit) -> dict[str, Any]:
    servers = two_servers(kit)
    unmet = [metric(server.url, UNMET) for server in servers]
    for policy in SPREADING:
        with router(servers, policy) as url:
            reasons = asyncio.run(joined(url, servers[0], f"spread-{policy}", {"X-Correlation-ID": policy}))
            assert not raced(reasons), (policy, reasons)
    for _ in range(60):
        now = [metric(server.url, UNMET) for server in servers]
        if [after - before for after, before in zip(now, unmet, strict=True)] == [len(SPREADING)] * 2:
            break
        time.sleep(1)
    else:
        raise AssertionError(f"{UNMET}: {unmet} before, {now} after")
    said = [Path(server.log).read_text().count("X-Correlation-ID of each request") for server in servers]
    assert said == [1, 1], said
    return {"detail": f"under {', '.join(SPREADING)}: each group counts once at each server, the log says it once"}


@check("unmodified")
def x_session_id_makes_siblings_turns_of_one_session(kit: Kit) -> str:
    servers = two_servers(kit)
    with router(servers, "consistent_hash") as url:
        answers = asyncio.run(siblings(url, servers[0], "session", {"X-Session-ID": "session"}))
    refused = [text for status, text in answers if status == 409]
    assert refused, answers
    assert all("X-Correlation-ID" in text for text in refused), refused[0]
    return f"{len(refused)} of {NUM_SIBLINGS} are a 409, which names the header that makes no session"


@check("unmodified")
def what_a_server_keeps_is_not_found_through_the_router(kit: Kit) -> str:
    """The router finds a run at every second request only. RolloutClient with both addresses always finds it."""
    servers = two_servers(kit)
    with router(servers, "round_robin") as url:
        made = httpx.post(f"{url}/v1/runs", json={"id": "kept", "group_size": 2, "prompts_per_round": 2}, timeout=30)
        assert made.status_code == 201, made.text
        found = {httpx.get(f"{url}/v1/runs/kept", timeout=30).status_code for _ in range(4)}
        assert found == {200, 404}, found
    with RolloutClient([server.url for server in servers]) as client:
        run = client.run(2, 2, id="kept")
        assert {run.refresh().id for _ in range(4)} == {"kept"}
        run.delete()
    return "a run is a 404 at every second request under round_robin; RolloutClient with both addresses finds it"


@check("unmodified")
def a_killed_server_costs_answers_and_returns_none_twice(kit: Kit) -> dict[str, Any]:
    """The router repeats OpenAI requests that were not answered, and passes an error on for our endpoints."""
    servers = two_servers(kit)
    with router(servers, "round_robin") as url:
        seen = asyncio.run(killed(url, kit, servers))
        statuses = {name: Counter(status for status, _ in its) for name, its in seen.items()}
        assert statuses["n"] == {200: 4}, statuses
        assert [len(answer["choices"]) for _, answer in seen["n"]] == [GROUP_SIZE] * 4
        assert statuses["rollouts"].keys() <= {200, 502}, statuses
        for status, text in seen["streams"]:
            assert text.count("event: done") == (status == 200)
        later = [httpx.post(f"{url}/v1/rollouts", json=rollout_body("later"), timeout=60) for _ in range(4)]
        assert [answer.status_code for answer in later].count(502) == 2, later
        for status, answer in seen["rollouts"]:
            if status == 200:
                assert len(answer["groups"][0]["trajectories"]) == GROUP_SIZE
        kit.restart(servers[1])
    return {
        "detail": "n was raced again elsewhere, 4 of 4. Rollouts at the killed server are a 502, and their streams are "
        "cut. Later ones are a 502, too, until the router's health check has noticed"
    }


@check("unmodified")
def our_client_loses_no_prompt_by_a_kill(kit: Kit) -> dict[str, Any]:
    servers = two_servers(kit)
    with RolloutClient([server.url for server in servers]) as client:
        prompts = [{"id": f"p{n}", "prompt": f"What is {n} + 1?"} for n in range(12)]
        returned: Counter[str] = Counter()
        restarted, is_killed = 0, False
        for event in client.stream(prompts, GROUP_SIZE, 4, sampling_params=LONG):
            if event.type == "group":
                returned[event.prompt_id] += 1
            restarted += event.type == "restarted"
            if returned and not is_killed:
                kit.kill(servers[1])
                is_killed = True
        assert returned == {prompt["id"]: 1 for prompt in prompts}
        assert [engine.state for engine in client.engines()] == ["active", "dead"]
        kit.restart(servers[1])
    return {"detail": f"12 of 12 groups come back once, {restarted} of them begun anew", "restarted": restarted}


def two_servers(kit: Kit) -> list[Server]:
    device = kit.folder / "device.json"
    device.write_text(json.dumps(DEVICE))
    return [kit.server(flags=["--rollout-emulate", str(device)], number=number) for number in range(2)]


@contextmanager
def router(servers: Sequence[Server], policy: str) -> Iterator[str]:
    port, metrics = free_port(), free_port()
    command = [
        sys.executable, "-m", "vllm_router.launch_router", "--worker-urls", *(server.url for server in servers),
        "--policy", policy, "--port", str(port), "--prometheus-port", str(metrics), "--log-level", "warning",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=sys.stderr)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            assert process.poll() is None, f"the router ended with {process.returncode}"
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def rollout_body(prompt: str, sampling: Mapping[str, Any] | None = None) -> dict[str, Any]:
    prompts = [{"id": prompt, "prompt": prompt}]
    return {
        "prompts": prompts,
        "group_size": GROUP_SIZE,
        "redundancy": 4,
        "sampling_params": sampling or {"max_tokens": 60},
    }


def completion(server: Server, redundancy: int, **fields: Any) -> dict[str, Any]:
    xargs = {"rollout_redundancy": redundancy}
    fields = {"prompt": "x", "max_tokens": 60, **fields}
    return {"model": model_of(server), "n": GROUP_SIZE, "vllm_xargs": xargs, **fields}


def model_of(server: Server) -> str:
    return httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"][0]["id"]


async def siblings(url: str, server: Server, group: str, headers: Mapping[str, str]) -> Answers:
    """Requests of one group, each with a seed and an id of its own."""
    model = model_of(server)
    xargs = {"rollout_group_id": group, "rollout_group_size": GROUP_SIZE, "rollout_num_candidates": NUM_SIBLINGS}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def one(number: int) -> tuple[int, Any]:
            body = {"model": model, "prompt": f"What is {group}?", "max_tokens": 1000, "vllm_xargs": xargs}
            ids = {"X-Request-Id": f"{group}-{number}", **headers}
            answer = await http.post("/v1/completions", json={**body, "seed": number}, headers=ids)
            return answer.status_code, answer.text

        return list(await asyncio.gather(*map(one, range(NUM_SIBLINGS))))


async def joined(url: str, server: Server, group: str, headers: Mapping[str, str] | None = None) -> Counter[str]:
    answers = await siblings(url, server, group, headers or {})
    assert {status for status, _ in answers} == {200}, answers
    return Counter(json.loads(text)["choices"][0]["finish_reason"] for _, text in answers)


def raced(reasons: Counter[str]) -> bool:
    return reasons["abort"] == NUM_SIBLINGS - GROUP_SIZE


async def killed(url: str, kit: Kit, servers: Sequence[Server]) -> dict[str, Answers]:
    """Four requests of each kind, of which two are at a server that is killed."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def post(path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
            try:
                answer = await http.post(path, json=body)
            except httpx.RemoteProtocolError as error:
                return 0, str(error)
            is_json = answer.headers.get("content-type", "").startswith("application/json")
            return answer.status_code, answer.json() if is_json else answer.text

        requests: dict[str, list[asyncio.Task[tuple[int, Any]]]] = {"n": [], "rollouts": [], "streams": []}
        for number in range(4):
            long = rollout_body(f"long {number}", LONG)
            body = completion(servers[0], 4, prompt=f"long {number}", max_tokens=250)
            body["vllm_xargs"] |= FORCED
            requests["n"].append(asyncio.create_task(post("/v1/completions", body)))
            requests["rollouts"].append(asyncio.create_task(post("/v1/rollouts", long)))
            requests["streams"].append(asyncio.create_task(post("/v1/rollouts", {**long, "stream": True})))
        await asyncio.sleep(1.5)
        await asyncio.to_thread(kit.kill, servers[1])
        return {name: list(await asyncio.gather(*its)) for name, its in requests.items()}


if __name__ == "__main__":
    main()
