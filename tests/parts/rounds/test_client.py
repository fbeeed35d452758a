"""Runs in the clients."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import httpx
import pytest

from vllm_rollout import RolloutClient, RolloutError


def test_the_example_of_rounds_runs(server_url, capsys):
    folder = Path(__file__).parents[3] / "examples"
    runpy.run_path(str(folder / "rounds.py"))["main"](server_url)
    assert "50 prompts back, 0 wait" in capsys.readouterr().out


def test_a_run_that_is_made_by_a_request_that_is_sent_again_is_one_run() -> None:
    ids: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        ids.append(json.loads(request.content)["id"])
        if len(ids) == 1:
            raise httpx.ConnectError("the answer was lost")
        return httpx.Response(418)

    with RolloutClient(transport=httpx.MockTransport(answer)) as client, pytest.raises(RolloutError, match="418"):
        client.run(2, 4)
    assert (len(ids), len(set(ids))) == (2, 1)
