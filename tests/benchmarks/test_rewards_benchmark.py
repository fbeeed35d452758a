"""The benchmark of rewards: what is drawn is what a program does, and what is made of measured rounds."""

import time
from contextlib import suppress

import pytest

from benchmarks.rewards.fated import FOREVER_S, TestCase, name_of
from benchmarks.rewards.rounds import SHAPES, WAYS, Graded, Round, Workload, results_of, row_of, tables

ITS = Workload(num_prompts=4, group_size=8, num_processes=2, scale=0.2, seed=1)


@pytest.mark.parametrize(("hanging", "right", "kinds"), [
    (0.0, 1.0, {"right"}), (0.0, 0.0, {"wrong"}), (1.0, 0.5, {"hangs"}), (0.3, 0.5, {"right", "wrong", "hangs"}),
])  # fmt: skip
def test_a_program_does_what_was_drawn(monkeypatch, hanging, right, kinds):
    slept, seen = [], set()
    monkeypatch.setattr(time, "sleep", slept.append)
    case = TestCase("q", 0.5, 0.3, hanging, right)
    for text in map(str, range(20)):
        kind, seconds = case.fate(text)
        seen.add(kind)
        passed = False
        with suppress(AssertionError):
            exec(compile(case.source, "test.py", "exec"), {"answer": name_of(text)})
            passed = True
        assert passed == (kind == "right")
        assert slept.pop() == (FOREVER_S if kind == "hangs" else seconds)
    assert seen == kinds


def test_a_right_run_that_is_killed_is_seen():
    answers = [(name, str(i)) for name in ITS.cases for i in range(50)]
    right = [answer for answer in answers if ITS.cases[answer[0]].fate(answer[1])[0] == "right"]
    graded = [Graded(*answer, 0.0, "timeout" if answer in right[:3] else "ok", 1.0) for answer in answers]
    row = row_of(ITS, Round(2.0, 3.0, graded))
    assert (row["num_graded"], row["num_right"], row["num_right_killed"]) == (200, len(right), 3)
    assert row["num_right_unrewarded"] == len(right)
    assert 0 < row["num_hanging"] < 40


def test_ratios_are_taken_within_an_epoch_and_the_first_does_not_count():
    seconds = {"after": [99.0, 6.0, 12.0], "async": [1.0, 3.0, 4.0], "learned": [1.0, 1.0, 4.0]}
    graded = row_of(ITS, Round(1.0, 1.0, [Graded("0", str(i), 1.0, "ok", 1.0) for i in range(20)]))
    rows = [
        {**graded, "shape": shape, "way": way, "epoch": epoch, "round_s": seconds[way][epoch]}
        for shape in SHAPES
        for way in WAYS
        for epoch in range(3)
    ]
    results = results_of(rows)
    assert {key: ratio["median"] for key, ratio in results[0]["ratios"].items()} == {
        "after/async": 2.5, "async/learned": 2.0, "after/learned": 4.5,
    }  # fmt: skip
    workload = {"scale": 0.2, "prompts": 4, "group_size": 8, "processes": 2}
    shown = tables({"workload": workload, "results": results})
    assert "2.50 (2.25 to 2.75)" in shown
