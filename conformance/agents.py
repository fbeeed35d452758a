"""Shared by the checks of agents: a group of sessions whose ends are known in advance, and the server's view of it.

Two sessions finish, two lose amid a turn, and two lose while they wait for their tool, then ask again. Runs in the
trainers' environments: standard library and httpx. Invariant: agents act by the trainer's own code, and this file
decides only which of them waits for which event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import httpx

from conformance.checks import metric

Role = Literal["finishes", "in a turn", "at its tool"]
ROLES: tuple[Role, ...] = ("finishes", "finishes", "in a turn", "in a turn", "at its tool", "at its tool")
GROUP_SIZE = ROLES.count("finishes")
TURNS = 3
SHORT, LONG = 24, 1500
"""Tokens at which turns are cut. The server must stop long turns before that."""
QUESTION, TOOL_SAYS = "What is 17 + 25?", "The calculator says 42."
PATIENCE_S = 120.0
Tool = Callable[[], Awaitable[None]]
T = TypeVar("T")


class Sessions:
    """A group of sessions at a server, whose names belong to the client with this API key."""

    def __init__(self, url: str, *, api_key: str | None = "EMPTY") -> None:
        self._http = httpx.Client(base_url=url, timeout=60, trust_env=False)
        if api_key is not None:
            self._http.headers["authorization"] = f"Bearer {api_key}"
        self._url = url
        self.id = ""
        self.num_requests_before = self._num_requests()

    def declare(self) -> list[str]:
        """Declare the group. Returns the ids of its sessions, one per role."""
        fields = {"group_size": GROUP_SIZE, "redundancy": len(ROLES) - GROUP_SIZE, "cut_turn": "goes_on"}
        said = self._http.post("/v1/groups", json=fields).raise_for_status().json()
        self.id = said["id"]
        return said["to_begin"]

    def read(self) -> dict[str, Any]:
        """The group as the server sees it. Without sessions until the first turn has declared it."""
        answer = self._http.get(f"/v1/groups/{self.id}")
        if answer.status_code == httpx.codes.NOT_FOUND:
            return {"status": "running", "sessions": []}
        return answer.raise_for_status().json()

    def declared_by(self, requests: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """The groups that these requests (`conformance.recording`) declared, as they are now."""
        for request in requests:
            if request["path"] == "/v1/groups":
                self.id = request["body"]["id"]
                yield self.read()

    def trajectory(self, session_id: str) -> dict[str, Any]:
        return self._http.get(f"/v1/sessions/{session_id}").raise_for_status().json()

    def finish(self, session_id: str, reward: float) -> None:
        self._http.post(f"/v1/sessions/{session_id}/finish", json={"reward": reward}).raise_for_status()

    async def until(self, is_so: Callable[[Mapping[str, Any]], bool]) -> None:
        """Wait until the group meets the condition. Raises: AssertionError with the group after PATIENCE_S."""
        ends = time.monotonic() + PATIENCE_S
        while not is_so(said := self.read()):
            assert time.monotonic() < ends, said
            await asyncio.sleep(0.05)

    def assert_raced(self, ids: Mapping[str, Role]) -> dict[str, Any]:
        """Assert that losers stopped amid turns and that their later requests missed the engine. Returns numbers."""
        said = self.read()
        of = {session["id"]: session for session in said["sessions"]}
        assert said["status"] == "complete", said
        assert sorted(said["selected"]) == sorted(id for id, role in ids.items() if role == "finishes"), said
        for id, role in ids.items():
            assert of[id]["state"] == ("finished" if role == "finishes" else "surplus"), said
            assert of[id]["num_turns"] == (TURNS if role == "finishes" else 1), said
            assert role != "in a turn" or 0 < of[id]["num_tokens"] < LONG, said
        num_requests = self._num_requests() - self.num_requests_before
        assert num_requests == sum(session["num_turns"] for session in of.values()), (num_requests, said)
        return {
            "generated_tokens": said["generated_tokens"],
            "returned_tokens": said["returned_tokens"],
            "stopped_after_tokens": [of[id]["num_tokens"] for id, role in ids.items() if role == "in a turn"],
        }

    def _num_requests(self) -> int:
        """Requests that the engine has ended so far."""
        return int(metric(self._url, "vllm:request_success_total"))


async def race(group: Sessions, ids: Mapping[str, Role], play: Callable[[str, Role, Tool], Awaitable[T]]) -> list[T]:
    """Play every session by `play(id, role, tool)`, the trainer's agent, which awaits the tool between its turns.

    Long turns begin when all other sessions are where they should be. Finishers finish when the long turns have begun.
    So no turn ends before it is to be stopped, however slow the agents are.
    """
    places = {"finishes": ("between_turns", TURNS), "at its tool": ("between_turns", 1), "in a turn": ("turn", 0)}

    def are_there(said: Mapping[str, Any], roles: Collection[Role]) -> bool:
        at = {session["id"]: (session["state"], session["num_turns"]) for session in said["sessions"]}
        return all(at.get(id) == places[role] for id, role in ids.items() if role in roles)

    async def agent(id: str, role: Role) -> T:
        async def tool() -> None:
            if role == "at its tool":
                await group.until(lambda said: said["status"] != "running")

        if role == "in a turn":
            await group.until(lambda said: are_there(said, ("finishes", "at its tool")))
        result = await play(id, role, tool)
        if role == "finishes":
            await group.until(lambda said: are_there(said, ("in a turn",)))
            group.finish(id, 1.0)
        return result

    return list(await asyncio.gather(*(agent(id, role) for id, role in ids.items())))
