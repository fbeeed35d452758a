"""Drafts in a real engine: the same answers in fewer steps, and the same distribution."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import run_script

CRITICAL = 131.0
"""Of chi-square with 63 degrees of freedom: one in a million."""


@pytest.fixture(scope="module")
def engine(tiny_model: str) -> dict[str, Any]:
    return run_script("drafting_engine.py", tiny_model)


def test_greedy_answers_are_those_without_drafts(engine: dict[str, Any]) -> None:
    drafted, accepted = engine["of_greedy"]
    assert drafted >= accepted > 300, "earlier answers of the prompt were the same"
    assert [row[:3] for row in engine["first"]] == [row[:3] for row in engine["without"]]
    for got, wanted in zip(engine["with"], engine["without"], strict=True):
        assert got[:3] == wanted[:3]
        assert [list(position) for position in got[3]] == [list(position) for position in wanted[3]]
        for ours, theirs in zip(got[3], wanted[3], strict=True):
            assert ours == pytest.approx(theirs, abs=2e-3)
    assert {row[2] for row in engine["with"]} == {"length", "stop"}


def test_samples_are_distributed_as_the_model_says(engine: dict[str, Any]) -> None:
    drafted, accepted = engine["of_draws"]
    assert drafted > accepted > 500
    expected = [probability * sum(engine["drawn"]) for probability in engine["expected"]]
    assert sum(expected) == pytest.approx(sum(engine["drawn"]))
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in zip(engine["drawn"], expected, strict=True))
    assert statistic < CRITICAL


def test_what_is_seen_of_a_candidate_is_of_its_own_tokens(engine: dict[str, Any]) -> None:
    assert engine["of_scored"][1] > 20
    assert [row[:3] for row in engine["scored"]] == [row[:3] for row in engine["whole"]]
    for _, _, _, confidence, expected in engine["whole"] + engine["scored"]:
        assert confidence == pytest.approx(expected, rel=1e-3)
    for shown in (each for its in engine["shown"] for each in its.values()):
        assert shown["hidden_error"] < 1e-3
        assert shown["logit"][0] == pytest.approx(shown["logit"][1], abs=1e-2)
        assert shown["mean"][0] == pytest.approx(shown["mean"][1], rel=1e-3)
    assert all("0" in shown for shown in engine["shown"]), "each is scored at its end"
    assert any("7" in shown for shown in engine["shown"])
