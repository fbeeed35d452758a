"""The demo of training, around a trainer that leaves its record at once."""

import json
import subprocess
from pathlib import Path

import matplotlib.pyplot  # noqa: F401  # its first import runs a program that lists fonts
import pytest
from typer.testing import CliRunner

from vllm_rollout.cli import app
from vllm_rollout.demo.training import run as demo
from vllm_rollout.demo.training.curve import Answer, Curve, seconds_to, shown_answers
from vllm_rollout.demo.training.options import WAYS, TrainingOptions

ANSWERS = [["? a 1 b 2 :", "a 1 b 2 = 3 wait [dim] $x$" * 90, 400, 0.0], ["? a 3 :", "answer 3", 2, 1.0]]


def test_both_ways_are_trained_and_drawn(tmp_path, monkeypatch, capsys):
    asked = []

    def trains(command, **_):
        asked.append(command[2:])
        if command[2] == "examples.grpo.train":
            output = Path(command[4])
            output.mkdir(parents=True)
            step = {"kind": "step", "usage": {"generated_tokens": 500}}
            is_raced = "--race" in command
            ends = [(0, 0.2, 0.0), (4, 0.4, 10.0), (8, 0.7 if is_raced else 0.6, 18.0 if is_raced else 40.0)]
            lines = [{"kind": "start"}, step, step]
            lines += [
                {"kind": "evaluation", "step": at, "success": s, "seconds_of_steps": t, "p99": 77, "answers": ANSWERS}
                for at, s, t in ends
            ]
            (output / "record.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("VLLM_ROLLOUT_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", trains)
    demo.run(TrainingOptions(8, tmp_path / "it.png"))
    assert [words[0] for words in asked] == ["examples.grpo.pretrain", *["examples.grpo.train"] * len(WAYS)]
    assert asked[0][1] == str(tmp_path / "grpo")
    assert {words[1] for words in asked[1:]} == {str(tmp_path / "grpo" / "careful")}
    assert {words[2] for words in asked[1:]} == {str(tmp_path / "it" / folder) for folder, _ in WAYS.values()}
    assert (tmp_path / "it.png").stat().st_size > 10_000
    out = capsys.readouterr().out
    assert "seconds to 0.60" in out
    assert "1,000" in out


def test_a_trainer_that_fails_ends_the_demo(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ROLLOUT_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 3))
    with pytest.raises(RuntimeError, match="pretrain ended with 3"):
        demo.run(TrainingOptions(8, tmp_path / "it.png"))


@pytest.mark.parametrize(("success", "seconds"), [(0.4, 10), (0.5, 15), (0.6, 20), (0.9, None), (0.1, None)])
def test_a_success_is_reached_between_evaluations(success, seconds):
    curve = Curve("", (0.0, 10.0, 20.0), (0.2, 0.4, 0.6), 1.0, 1, ())
    found = seconds_to(curve, success)
    assert found == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--train", "--steps", "0"], "--steps must be at least 1"),
        (["--train", "--group-size", "4"], "--group-size is not for --train"),
        (["--steps", "4"], "--steps is for --train"),
        (["--train", "--output", "curve.foo"], "--output must end in .png, got curve.foo"),
        (["--output", "/nowhere/curve.png"], "there is no folder /nowhere"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(words, said):
    assert said in str(CliRunner().invoke(app, ["demo", *words]).exception)


def test_without_a_checkout_it_says_where_it_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="Run it in a checkout"):
        TrainingOptions()


def test_the_problem_is_shown_that_was_thought_about_longest_and_not_solved():
    solved, unsolved, longer = (Answer(name, "x", n, r) for name, n, r in (("1", 9, 1.0), ("2", 1, 0.0), ("3", 5, 0.0)))
    curve = Curve("", (), (), 1.0, 1, ((solved, unsolved), (unsolved, solved), (longer, solved)))
    assert shown_answers(curve) == (longer, solved)
    assert shown_answers(Curve("", (), (), 1.0, 1, ((solved, unsolved),))) == (solved, unsolved)
