"""Drafts in a real engine: the same answers in fewer steps, and the same distribution."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import run_script

LEAST_EXPECTED = 5.0
"""Smallest expected count of a cell: chi-square does not hold for rarer cells."""
ONE_IN_A_MILLION = 4.75
"""Standard deviations whose chance is one in a million."""


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


def test_a_step_without_drafts_has_nothing_to_verify(engine: dict[str, Any]) -> None:
    assert engine["alone"] == 4, "top_k of no rows at all would have ended vLLM's engine on a CPU"


def test_samples_are_distributed_as_the_model_says(engine: dict[str, Any]) -> None:
    drafted, accepted = engine["of_draws"]
    assert drafted > accepted > 2000
    over = {kind: chi_square_over_bound(engine["drawn"][kind], engine["expected"][kind]) for kind in engine["drawn"]}
    assert len(over) == 5
    assert max(over.values()) < 1, over


def chi_square_over_bound(drawn: list[int], probabilities: list[float]) -> float:
    """Chi-square by what it exceeds once in a million times (Wilson and Hilferty)."""
    cells = [(seen, probability * sum(drawn)) for seen, probability in zip(drawn, probabilities, strict=True)]
    assert sum(expected for _, expected in cells) == pytest.approx(sum(drawn))
    assert all(expected for seen, expected in cells if seen), "what the policy cannot say is not said"
    rare = [cell for cell in cells if cell[1] < LEAST_EXPECTED]
    together = (sum(seen for seen, _ in rare), sum(expected for _, expected in rare))
    cells = [cell for cell in [*cells, together] if cell[1] >= LEAST_EXPECTED]
    variance = 2 / (9 * (len(cells) - 1))
    bound = (len(cells) - 1) * (1 - variance + ONE_IN_A_MILLION * variance**0.5) ** 3
    return sum((seen - expected) ** 2 / expected for seen, expected in cells) / bound


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
