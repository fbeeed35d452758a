"""Access without a key: each route of vLLM's app and ours is called.

Routes that vLLM alone leaves open, in its development mode most of all, are vLLM's. Our open routes are named here."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from tests.kernel.api.conftest import ADMIN_KEY, API_KEY
from vllm_rollout.kernel.http.clients import ADMIN_HEADER

pytestmark = pytest.mark.anyio

OPEN_TO_ANYONE = {
    ("GET", "/liveness"),  # tells whether the engine hangs
    *(("GET", path) for path in ("/rollouts", "/rollouts/assets/{path:path}")),  # files without data
}
OPEN_TO_THE_API_KEY = {
    *(("POST", f"/v1/{name}") for name in ("rollouts", "votes", "rollouts/{rollout_id}/rewards", "rewards")),
    *(("GET", f"/v1/quality_head{name}") for name in ("", "/report", "/detection_lengths")),
    *(("GET", f"/v1/{name}") for name in ("rollouts/prompts", "rollouts/state", "engines", "engines/advice")),
    *(("GET", f"/v1/rollouts/watch{texts}") for texts in ("", "/{rollout_id}/{position}")),
    *((method, "/v1/runs") for method in ("GET", "POST")),
    *((method, "/v1/runs/{run_id}") for method in ("GET", "DELETE")),
    *((method, "/v1/feeds") for method in ("GET", "POST")),
    *((method, "/v1/feeds/{feed_id}") for method in ("GET", "DELETE")),
    *(("POST", f"/v1/feeds/{{feed_id}}/{name}") for name in ("prompts", "batches")),
    ("GET", "/v1/feeds/{feed_id}/events"),
    ("POST", "/v1/groups"),
    *((method, "/v1/groups/{group_id:name}") for method in ("GET", "DELETE")),
    *(("GET", f"/v1/sessions/{name}") for name in ("events", "{session_id:name}")),
    ("POST", "/v1/sessions/{session_id:name}/finish"),
    ("POST", "/v1/runs/{run_id}/rounds"),
    ("DELETE", "/v1/runs/{run_id}/rounds/{number}"),
}
BODIES: dict[tuple[str, str], Any] = {
    ("POST", "/update_weights"): {"weight_dir": "/weights"},
}
"""With which a route is ours, or asks another one."""


async def let_in(app: FastAPI, refusal: int = 401, **headers: str) -> set[tuple[str, str]]:
    """Method and path of every route that does not answer so."""
    found = set()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)  # nothing is behind what lets us in
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as http:
        for route in (route for route in app.routes if isinstance(route, APIRoute)):
            for method in route.methods:
                asked = method, route.path
                path = re.sub(r"\{.*?\}", "0", route.path)
                answer = await http.request(method, path, json=BODIES.get(asked, {}))
                if answer.status_code != refusal:
                    found.add(asked)
    return found


def routes_of(app: FastAPI) -> set[tuple[str, str]]:
    return {(method, route.path) for route in app.routes if isinstance(route, APIRoute) for method in route.methods}


async def test_without_a_key_nobody_gets_in_where_it_is_not_said(app_of):
    await assert_no_key_opens(app_of)


async def assert_no_key_opens(app_of, *trainers):
    found = await let_in(app_of(*trainers)) - await let_in(app_of(ours=False))
    assert found <= OPEN_TO_ANYONE


async def test_with_the_api_key_alone_nobody_changes_what_all_are_served_by(app_of):
    assert ("POST", "/v1/rollouts") in await opened_by_the_api_key(app_of)


async def opened_by_the_api_key(app_of, *trainers):
    app = app_of(*trainers)
    found = await let_in(app, authorization=f"Bearer {API_KEY}")
    ours = routes_of(app) - routes_of(app_of(ours=False))
    assert found & ours == (OPEN_TO_ANYONE | OPEN_TO_THE_API_KEY) & ours
    return found


async def test_the_admin_key_opens_in_the_header_of_ours_and_as_a_bearer_token(app_of):
    await assert_the_admin_key_opens_all(app_of())


async def assert_the_admin_key_opens_all(app):
    everything = routes_of(app)
    assert await let_in(app, authorization=f"Bearer {API_KEY}", **{ADMIN_HEADER: ADMIN_KEY}) == everything
    assert await let_in(app, authorization=f"Bearer {ADMIN_KEY}") == everything


async def test_a_page_of_another_site_gets_in_nowhere_also_with_the_keys(app_of):
    await assert_another_site_gets_in_nowhere(app_of())


async def assert_another_site_gets_in_nowhere(app):
    keys = {"authorization": f"Bearer {ADMIN_KEY}", ADMIN_HEADER: ADMIN_KEY}
    assert await let_in(app, 403, origin="https://evil.example", **keys) == set()
