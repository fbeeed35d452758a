"""Several API processes: who is asked for sessions, runs and the page. The first one is a real server on a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from tests.support.waiting import eventually
from vllm_rollout.kernel import parts
from vllm_rollout.kernel.http import boundary
from vllm_rollout.kernel.xargs import NAMES
from vllm_rollout.parts.front_ends.http import first as module
from vllm_rollout.parts.front_ends.http.first import FirstProcess, HandOn

JOINING = "/v1/completions"


class Seen:
    """Requests that the first process has received."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes, dict[str, str], bytes]] = []
        self.left = asyncio.Event()

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.api_route("/v1/rollouts/events", methods=["GET"])
        async def events(request: Request) -> StreamingResponse:
            async def forever() -> AsyncIterator[bytes]:
                try:
                    for number in range(10_000):
                        yield b"data: %d\n\n" % number
                        await asyncio.sleep(0.01)
                finally:
                    self.left.set()

            return StreamingResponse(forever(), media_type="text/event-stream")

        @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
        async def any_other(request: Request) -> dict[str, str]:
            target = request.scope["raw_path"] + b"?" + request.scope["query_string"]
            seen = (request.method, target, dict(request.headers), await request.body())
            self.requests.append(seen)
            return {"by": "first"}

        return app


@pytest.fixture
async def first(tmp_path: Path) -> AsyncIterator[Seen]:
    seen = Seen()
    server = uvicorn.Server(
        uvicorn.Config(seen.app(), uds=str(tmp_path / "first.sock"), lifespan="off", log_level="error")
    )
    serving = asyncio.create_task(server._serve())
    await eventually(lambda: server.started, every_s=0.01)
    yield seen
    server.should_exit = server.force_exit = True
    await serving


def lacks_key(scope: Scope) -> bool:
    """These requests have the wrong one; without any, the server has none."""
    return Headers(scope=scope).get("authorization") == "Bearer wrong"


@pytest.fixture
def other(tmp_path: Path) -> Iterator[httpx.AsyncClient]:
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
    async def answer(request: Request) -> dict[str, str]:
        return {"by": "itself", "body": (await request.body()).decode()}

    way = HandOn(app, FirstProcess(tmp_path / "first.sock", tmp_path / "sessions"), lacks_key)
    return httpx.AsyncClient(transport=httpx.ASGITransport(way), base_url="http://test")


OF_PARTS = [
    ("sessions", "POST", "/v1/groups"),
    ("sessions", "GET", "/v1/groups/a"),
    ("sessions", "POST", "/v1/sessions/a.0/finish"),
    ("rounds", "POST", "/v1/runs"),
    ("rounds", "DELETE", "/v1/runs/a/rounds/3"),
    ("feeds", "POST", "/v1/feeds/a/batches"),
    ("feeds", "POST", "/update_weight_version"),
    ("feeds", "POST", "/finish_weight_update"),
    ("feeds", "POST", "/v1/weights/adapter_version"),
    ("page", "GET", "/rollouts"),
    ("page", "GET", "/rollouts/assets/page.js"),
]


@pytest.mark.parametrize(
    ("method", "path", "by"),
    [
        *((method, path, "first") for part, method, path in OF_PARTS if parts.has(part)),
        ("POST", "/v1/rewards", "first"),
        ("POST", "/v1/rollouts/rollout-1/rewards", "first"),
        ("GET", "/v1/rollouts/state", "first"),
        ("GET", "/v1/rollouts/watch", "first"),
        ("POST", "/v1/rollouts", "itself"),
        ("GET", "/v1/engines", "itself"),
        ("GET", "/v1/runsome", "itself"),
        ("POST", "/v1/votes", "itself"),
        ("POST", JOINING, "itself"),
    ],
)
async def test_who_answers(first: Seen, other: httpx.AsyncClient, method: str, path: str, by: str) -> None:
    response = await other.request(method, path)
    assert (response.json()["by"], len(first.requests)) == (by, int(by == "first"))


async def test_it_is_asked_as_the_client_has_asked(first: Seen, other: httpx.AsyncClient) -> None:
    body = b'{"reward": 1}' * 100_000
    headers = {"authorization": "Bearer k", "x-session-id": "a b", "connection": "close"}
    path = "/v1/rollouts/a%2Fb%20c/rewards?x=%C3%A4&y"
    await other.post(path, content=body, headers=headers)
    ((method, target, seen, sent),) = first.requests
    assert (method, target, sent) == ("POST", path.encode(), body)
    assert {name: seen[name] for name in ("authorization", "x-session-id", "content-length")} == {
        "authorization": headers["authorization"],
        "x-session-id": headers["x-session-id"],
        "content-length": str(len(body)),
    }
    assert seen["host"] == "test"
    del other.headers["accept-encoding"]
    await other.get("/v1/rollouts/a")
    assert first.requests[-1][3] == b""
    assert first.requests[-1][2].keys() == {"host", "accept", "user-agent"}, "nothing that the client has not said"


def field(name: str) -> dict[str, Any]:
    return {"vllm_xargs": {NAMES[name]: "a"}}


async def test_which_requests_join_what_it_has(first: Seen, other: httpx.AsyncClient, tmp_path: Path) -> None:
    async def asked(body: dict[str, Any], header: str | None, path: str = JOINING) -> str:
        headers = {} if header is None else {"x-session-id": header}
        by: str = (await other.post(path, json=body, headers=headers)).json()["by"]
        return by

    assert await asked({}, None) == "itself"
    if parts.has("sessions"):
        assert await asked(field("session"), None) == "first"
    assert await asked(field("group_id"), None) == "itself", "a joined request, which any process takes"
    assert await asked(field("group_id"), "a") == "first"
    assert await asked(field("group_size"), None) == "first", "whose siblings only one process can tell"
    both = {**field("group_size")["vllm_xargs"], **field("group_id")["vllm_xargs"]}
    assert await asked({"vllm_xargs": both}, None) == "itself"
    assert await asked({}, "a") == "itself", "harnesses send the header to servers that have never had a group"
    (tmp_path / "sessions").touch()
    assert await asked({}, "a") == "first"
    assert await asked({}, None) == "itself"
    for path in ("/v1/chat/completions", "/inference/v1/generate"):
        assert (await asked({}, None, path), await asked({}, "a", path)) == ("itself", "first")
    assert await asked({}, "a", "/v1/embeddings") == "itself"


async def test_what_is_read_to_look_for_a_turn_is_not_lost(other: httpx.AsyncClient) -> None:
    async def in_pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"piece "

    assert (await other.post(JOINING, content=in_pieces())).json()["body"] == "piece " * 3


@pytest.mark.parametrize("path", [JOINING, "/v1/rewards"])
async def test_without_the_key_nothing_is_read(tmp_path: Path, path: str) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("read")

    async def send(message: Message) -> None:
        sent.append(message)

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 401})

    headers = [(b"authorization", b"Bearer wrong"), (b"content-length", b"10")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    await HandOn(refuse, FirstProcess(tmp_path / "-", tmp_path / "-"), lacks_key)(scope, receive, send)
    assert [message["status"] for message in sent] == [401]


async def test_a_body_above_the_limit_is_answered_by_the_first_process_as_it_would_answer_itself(
    first: Seen, other: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece, or in many. No more of it is held than the limit and a piece."""
    monkeypatch.setattr(boundary, "MAX_BODY_BYTES", 1000)
    monkeypatch.setattr(boundary, "_AHEAD", held := boundary.HeldBodies(1500))
    most = 0

    async def in_pieces() -> AsyncIterator[bytes]:
        nonlocal most
        for _ in range(100):
            yield b"x" * 100
            most = max(most, held.num_bytes)

    for content, size in ((b"x" * 1001, 1001), (in_pieces(), 10_000)):
        answer = await other.post(JOINING, content=content)
        assert (answer.status_code, answer.json()["by"]) == (200, "first")
        assert first.requests[-1][3] == b"x" * size
        assert held.num_bytes == 0
    assert most <= 1100


async def test_what_is_read_to_find_who_answers_is_bounded_and_counts_until_it_is_taken(
    other: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundary, "MAX_BODY_BYTES", 1000)
    monkeypatch.setattr(boundary, "_AHEAD", held := boundary.HeldBodies(1500))
    more, goes_on = asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b"x" * 900
        more.set()
        await goes_on.wait()
        yield b"y"

    slow = asyncio.create_task(other.post(JOINING, content=slowly()))
    await asyncio.wait_for(more.wait(), 10)
    await eventually(lambda: held.num_bytes == 900)
    answer = await other.post(JOINING, content=b"z" * 700)
    assert (answer.status_code, answer.headers["retry-after"], held.num_bytes) == (503, "1", 900)
    assert (await other.post(JOINING, content=b"z" * 500)).json()["body"] == "z" * 500
    goes_on.set()
    assert (await slow).json()["body"] == "x" * 900 + "y"
    assert held.num_bytes == 0


async def test_a_first_process_that_ends_amid_a_request_is_said_so(tmp_path: Path, other: httpx.AsyncClient) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    server = await asyncio.start_unix_server(hang_up, str(tmp_path / "first.sock"))
    answer = await other.post("/v1/rewards", json={})
    assert (answer.status_code, "ended amid the request" in answer.json()["error"]["message"]) == (502, True)
    server.close()


async def test_a_stream_passes_as_it_comes_and_ends_when_its_reader_leaves(first: Seen, tmp_path: Path) -> None:
    leaves = asyncio.Event()
    sent: list[Message] = []
    received: list[Message] = [{"type": "http.request", "body": b""}]

    async def receive() -> Message:
        if received:
            return received.pop()
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) > 3:
            leaves.set()

    scope = {"type": "http", "method": "GET", "path": "/v1/rollouts/events", "headers": [], "query_string": b""}
    await asyncio.wait_for(FirstProcess(tmp_path / "first.sock", tmp_path / "-").answer(scope, receive, send), 10)
    await asyncio.wait_for(first.left.wait(), 10)
    assert (sent[0]["status"], sent[1]["body"]) == (200, b"data: 0\n\n")
    assert [name for name, _ in sent[0]["headers"]] == [b"content-type"]


async def test_a_client_that_leaves_amid_its_body_is_no_request(first: Seen, tmp_path: Path) -> None:
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    sent: list[Message] = []

    async def receive() -> Message:
        return next(messages)

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-length", b"10")]
    scope = {"type": "http", "method": "POST", "path": "/v1/rewards", "headers": headers, "query_string": b""}
    await FirstProcess(tmp_path / "first.sock", tmp_path / "-").answer(scope, receive, send)
    assert (sent, first.requests) == ([], [])


@pytest.mark.thorough
async def test_one_that_is_not_there_yet_is_called_again(
    other: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    response = await other.get("/v1/rollouts/a")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert "does not answer yet" in response.json()["error"]["message"]
    assert module.NUM_TRIES > 1
