"""The benchmark of receipts: what it counts as an error, and that its result is what its rollouts say."""

import json

import pytest

from benchmarks.common import ROOT
from benchmarks.receipts import SIGMAS, errors_of, summary, tables

RESULT = json.loads((ROOT / "benchmarks/results/receipts.json").read_text())


def test_an_error_is_relative_to_what_waiting_took():
    raced = {"generated_tokens": 100, "saved_tokens": 60, "seconds": 2.0, "waiting_seconds": 9.0, "saved_seconds": 7.0}
    waited = {"generated_tokens": 150, "saved_tokens_error": 0.25, "seconds": 10.0}
    assert errors_of({"raced": raced, "waited": waited}) == pytest.approx(
        {"saved_tokens": 0.2, "check": 0.25, "waiting_seconds": -0.1, "saved_seconds": -0.125}
    )


def test_the_result_is_what_its_rollouts_say():
    assert summary(RESULT["rollouts"]) == RESULT["errors"]
    assert [row["sigma"] for row in RESULT["errors"]] == list(SIGMAS)
    assert len(tables(RESULT).splitlines()) > len(SIGMAS)
