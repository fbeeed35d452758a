"""Requests without our fields, and groups whose race never fires, get stock vLLM's tokens."""

from __future__ import annotations

import pytest

from tests.engine.conftest import run_script


@pytest.fixture(scope="module")
def runs(tiny_model: str) -> dict[str, list]:
    ours = run_script("generate.py", "ours", tiny_model)
    return {"stock": run_script("generate.py", "stock", tiny_model)["untagged"], **ours}


def test_untagged_requests_are_identical_to_stock(runs: dict[str, list]) -> None:
    assert len(runs["stock"]) >= 200
    assert runs["untagged"] == runs["stock"]


def test_groups_without_redundancy_are_identical_to_stock(runs: dict[str, list]) -> None:
    assert runs["tagged"] == runs["stock"]
