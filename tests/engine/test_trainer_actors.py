"""The calls that trainers make on an engine of their own, as `examples/trainer_actors.py` shows them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.conftest import ENVIRONMENT, TIMEOUT_S

pytestmark = pytest.mark.versions
EXAMPLE = Path(__file__).parents[2] / "examples" / "trainer_actors.py"


@pytest.fixture(scope="module")
def ends(tiny_model: str) -> dict[str, list[tuple[int, str]]]:
    """Tokens and end of every choice, by trainer."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), tiny_model],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, "VLLM_PLUGINS": ""},
        timeout=3 * TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = {}
    for line in done.stdout.splitlines():
        name, _, choices = line.partition(": ")
        if name.startswith("like_"):
            pairs = [choice.split() for choice in choices.split(", ")]
            found[name] = [(int(tokens), end) for tokens, end in pairs]
    return found


def test_where_all_candidates_are_asked_for_the_losers_come_too(ends: dict[str, list[tuple[int, str]]]) -> None:
    won = [tokens for tokens, end in ends["like_skyrl"] if end != "surplus"]
    lost = [tokens for tokens, end in ends["like_skyrl"] if end == "surplus"]
    assert (len(won), len(lost)) == (4, 4)
    assert max(lost) <= max(won) + 50, "stopped in the step of the fourth end, as far as they began together"


@pytest.mark.parametrize("trainer", ["like_verl", "like_openrlhf"])
def test_where_so_many_are_asked_for_all_are_finished(ends: dict[str, list[tuple[int, str]]], trainer: str) -> None:
    assert len(ends[trainer]) == 4
    assert all(end in ("stop", "length") for _, end in ends[trainer])
