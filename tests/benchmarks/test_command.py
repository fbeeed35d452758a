"""The command of a result."""

import sys

from benchmarks.common import ROOT, command_line


def test_a_command_has_no_path_of_this_machine(monkeypatch):
    program = str(ROOT / "benchmarks" / "asynchronous" / "report.py")
    words = [program, "/somewhere/runs", "--output", str(ROOT / "benchmarks/a.json"), "--seed", "3"]
    monkeypatch.setattr(sys, "argv", words)
    assert command_line() == "python -m benchmarks.asynchronous.report runs --output benchmarks/a.json --seed 3"
