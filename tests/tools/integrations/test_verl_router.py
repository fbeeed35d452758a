"""Routing of calls for one prompt. verl's own balancer is in `conformance/verl`. This small one works alike."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tools.integrations.conftest import Beside


class Balancer:
    """As verl's: a request id stays where it was, others go to the server with the fewest."""

    def __init__(self, servers: dict[str, Any]) -> None:
        self._servers = servers
        self._inflight_requests = dict.fromkeys(servers, 0)
        self._request_id_to_server: dict[str, str] = {}

    def acquire_server(self, request_id: str) -> tuple[str, Any]:
        server_id = self._request_id_to_server.get(request_id)
        if server_id not in self._servers:
            server_id = min(self._inflight_requests, key=self._inflight_requests.get)
            self._request_id_to_server[request_id] = server_id
        self._inflight_requests[server_id] += 1
        return server_id, self._servers[server_id]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        self._inflight_requests[server_id] -= 1


@pytest.fixture
def balancer(beside: Beside) -> Any:
    theirs = {"verl.workers.rollout.router": {"GlobalRequestLoadBalancer": Balancer}}
    router = beside("vllm_rollout.integrations.verl_router", theirs)
    return router.PromptBalancer({"a": 1, "b": 2}, {"router_class": "ours"})


def test_calls_for_a_prompt_meet_and_prompts_spread(balancer: Any) -> None:
    places = [[balancer.acquire_server(f"{p}-{i}", [p, 1])[0] for p in range(4)] for i in range(3)]
    assert places[0] == ["a", "b", "a", "b"]
    assert places[1] == places[2] == places[0]


def test_a_prompt_is_balanced_anew_when_nothing_of_it_is_on_its_way(balancer: Any) -> None:
    assert balancer.acquire_server("one", [1])[0] == "a"
    balancer.release_server("a", "one")
    assert balancer.acquire_server("other", [2])[0] == "a"
    assert balancer.acquire_server("again", [1])[0] == "b"


def test_the_turns_of_an_agent_stay_where_they_were(balancer: Any) -> None:
    first, _ = balancer.acquire_server("agent", [1])
    balancer.release_server(first, "agent")
    balancer.acquire_server("stranger", [2])
    assert balancer.acquire_server("agent", [1, 2, 3])[0] == first


def test_nothing_is_kept_of_calls_that_have_ended(balancer: Any) -> None:
    taken = [(f"r{i}", balancer.acquire_server(f"r{i}", [i % 3])[0]) for i in range(12)]
    taken += [("r0", balancer.acquire_server("r0", [99])[0])]
    for request_id, server_id in taken:
        balancer.release_server(server_id, request_id)
    balancer.release_server("a", "unknown")
    assert not balancer._prompts
    assert not balancer._calls


def test_a_replica_that_left_gets_no_more_calls(balancer: Any) -> None:
    balancer.acquire_server("one", [1])
    del balancer._servers["a"], balancer._inflight_requests["a"]
    assert balancer.acquire_server("two", [1])[0] == "b"
    assert balancer.acquire_server("three", [1])[0] == "b"


def test_verl_is_told_what_it_needs(balancer: Any) -> None:
    assert (balancer.require_acquire_fields(), balancer.require_release_fields()) == (["prompt_ids"], ["request_id"])
