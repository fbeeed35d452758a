"""Pruning in the clients, and the loop of a trainer that posts rewards."""

import runpy
from pathlib import Path

import pytest

from vllm_rollout import AsyncRolloutClient, RolloutClient


@pytest.mark.parametrize("cls", [RolloutClient, AsyncRolloutClient])
def test_a_client_has_the_methods_of_pruning(cls):
    assert {*dir(cls)} >= {"quality_head", "set_quality_head", "report", "state", "vote"}


def test_the_example_of_a_trainers_loop_runs(server_url, capsys):
    folder = Path(__file__).parents[3] / "examples"
    runpy.run_path(str(folder / "trainer_loop.py"))["main"](server_url, 2)
    out = capsys.readouterr().out
    assert "step 1: " in out
    assert "cold start" in out
    assert "confidence: 0 positive" in out  # the fake engine cannot add
    assert "0 of 8 groups teach" in out
