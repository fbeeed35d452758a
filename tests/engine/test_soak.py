"""A part of the soak: all kinds of clients at once, on a server of their own."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from benchmarks.soak.clients import KINDS
from benchmarks.soak.run import MAX_GROWTH_MIB, NUM_CLIENTS, soak

SECONDS = 20.0


def test_no_client_hurts_another(tmp_path: Path) -> None:
    arguments = argparse.Namespace(
        seconds=SECONDS, clients=NUM_CLIENTS, seed=1, kinds=list(KINDS), max_growth_mib=MAX_GROWTH_MIB
    )
    result = soak(arguments, tmp_path, Console(quiet=True))
    assert result["violations"] == []
    assert result["num_violations"] == result["num_answers_500_or_above"] == 0
    assert result["num_disconnected"] > 0
    assert sum(result["answers_by_status"].values()) >= NUM_CLIENTS
