"""The command of a result, and that it makes the result again where nothing is measured."""

import json
import sys

from benchmarks import roofline
from benchmarks.common import ROOT, command_line


def test_a_command_has_no_path_of_this_machine(monkeypatch):
    program = str(ROOT / "benchmarks" / "asynchronous" / "report.py")
    words = [program, "/somewhere/runs", "--output", str(ROOT / "benchmarks/a.json"), "--seed", "3"]
    monkeypatch.setattr(sys, "argv", words)
    assert command_line() == "python -m benchmarks.asynchronous.report runs --output benchmarks/a.json --seed 3"


def test_bounds_are_computed_again_as_they_were(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["roofline", "--output", str(tmp_path / "it.json")])
    roofline.main()
    again, kept = (
        json.loads(path.read_text()) for path in (tmp_path / "it.json", ROOT / "benchmarks/results/roofline.json")
    )
    assert again["rows"] == kept["rows"]
