"""A page of another site uses no server that it reaches through its user's browser; what is no browser goes on."""

from __future__ import annotations

import re

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from fastapi.routing import APIRoute
from starlette.testclient import TestClient, WebSocketDenialResponse

from tests.kernel.http.conftest import make_app
from tests.kernel.http.fake_engine import FakeEngine
from vllm_rollout.kernel.http.origins import AllowedHosts, OwnPages

pytestmark = pytest.mark.anyio

KEYLESS = AllowedHosts(["rollout.example.com"], ["https://app.example.com"], bound="gpu7.example.com", has_key=False)
KEYED = AllowedHosts(has_key=True)
ANYBODY = AllowedHosts(["*"], has_key=False)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "[::1]:8000", "10.1.2.3", "localhost:8000", "LOCALHOST", "vllm:8000", "a.localhost",
     "node3.local", "rollout.default.svc.cluster.local:80", "gpu7.example.com:8000", "gpu7.example.com.",
     "rollout.example.com", None],
)  # fmt: skip
def test_clients_that_are_no_browser_call_by_addresses_and_by_names_of_their_own_network(host: str | None) -> None:
    assert KEYLESS.refusal(host, None) is None


def test_a_name_that_a_stranger_may_have_registered_is_refused_where_there_is_no_key() -> None:
    for origin in (None, "http://rebound.example:8000"):  # for the browser it is the server's own
        refusal = KEYLESS.refusal("rebound.example:8000", origin)
        assert refusal is not None
        assert (refusal.status, refusal.param) == (403, "host")
        for remedy in ("rebound.example:8000", "IP address", "--rollout-allowed-hosts", "--api-key"):
            assert remedy in str(refusal)
    assert KEYED.refusal("gpu.example.com", None) is None
    assert ANYBODY.refusal("rebound.example", None) is None


@pytest.mark.parametrize("hosts", [KEYLESS, KEYED])
@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://localhost:3000",
        "http://127.0.0.1",
        "null",
        "",
        "http://127.0.0.1:8000.evil.example",
    ],
)
def test_pages_of_other_origins_are_refused(hosts: AllowedHosts, origin: str) -> None:
    refusal = hosts.refusal("127.0.0.1:8000", origin)
    assert refusal is not None
    assert (refusal.status, refusal.param) == (403, "origin")
    assert "--rollout-allowed-hosts" in str(refusal)
    assert "--allowed-origins" in str(refusal)


def test_the_own_page_and_pages_that_were_allowed_are_not() -> None:
    for host in ("127.0.0.1:8000", "localhost:9000", "[::1]:8000", "Rollout.example.com"):
        assert KEYLESS.refusal(host, f"http://{host}".lower()) is None
    assert KEYED.refusal("gpu.example.com", "https://gpu.example.com") is None, "behind a proxy that ends TLS"
    for origin in ("https://app.example.com", "https://rollout.example.com:444"):
        assert KEYLESS.refusal("127.0.0.1:8000", origin) is None
    assert ANYBODY.refusal("127.0.0.1", "https://evil.example") is None


@pytest.fixture
def app() -> FastAPI:
    app = make_app(FakeEngine())
    app.add_middleware(OwnPages)
    app.state.allowed_hosts = AllowedHosts(has_key=False)

    @app.websocket("/socket")
    async def socket(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("private")

    return app


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"host": "evil.example"},
        {"origin": "http://evil.example", "host": "evil.example"},
    ],
)
async def test_every_route_refuses_them(app: FastAPI, headers: dict[str, str]) -> None:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as http:
        routes = [route for route in app.routes if isinstance(route, APIRoute)]
        assert len(routes) > 2
        for route in routes:
            for method in route.methods:
                response = await http.request(method, re.sub(r"\{.*?\}", "0", route.path), json={})
                assert response.status_code == 403, (method, route.path)
                assert response.json()["error"]["param"] in ("origin", "host")


def test_so_do_websockets(app: FastAPI) -> None:
    client = TestClient(app, base_url="http://localhost")
    with client.websocket_connect("/socket", headers={"host": "localhost"}) as socket:
        assert socket.receive_text() == "private"
    for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}):
        with pytest.raises(WebSocketDenialResponse) as refused, client.websocket_connect("/socket", headers=headers):
            pass
        assert refused.value.status_code == 403
