"""`vllm-rollout export`: which numbers a rollout has, and that TensorBoard and trackio themselves read them back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.parts.page.session_rows import VOID, session_group
from tests.support.waiting import WAIT_S
from vllm_rollout.cli import app as cli
from vllm_rollout.extras import install_command
from vllm_rollout.parts.page.recording.rows import RewardRow, RolloutRow
from vllm_rollout.parts.page.watching import export
from vllm_rollout.parts.page.watching.scalars import add_rewards, scalars

RACED = {
    "id": "q",
    "lengths": [100, 200, 400, 500, 500],
    "ends": ["stop", "stop", "stop", "length", "surplus"],
    "status": "complete",
    "moves": [[0.0, 0], [1.0, 1], [2.0, 0]],
    "started_s": 0.0,
    "ended_s": [1.0, 2.0, 4.0, 5.0, 5.0],
    "selected": [0, 1, 2, 3],
}
GRADED = {"id": "g", "lengths": [7, 9], "rewards": [1.0, None], "status": "incomplete"}
PRECISION = 1e-6
"""Relative precision of TensorBoard's numbers."""


def row(id: str, *prompts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"rollout_id": id, "group_size": 4, "max_tokens": 500, "prompts": prompts or (RACED,), **more}


def posted(id: str, *rewards: tuple[str, int, float]) -> dict[str, Any]:
    return {"rollout_id": id, "rewards": [dict(zip(("prompt_id", "index", "reward"), r, strict=True)) for r in rewards]}


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Two rollouts, three rounds of which the first ran again, and a row that was being written."""
    rows = [
        row("a", began=1000.0, seconds=5.5),
        row("r0", began=2000.0, seconds=1.0, run="../up", round=7, kind="short", state="left"),
        row("r1", began=3000.0, seconds=2.0, run="../up", round=7, kind="short"),
        row("r2", began=4000.0, seconds=4.0, run="../up", round=8, kind="long"),
        row("b", GRADED, began=5000.0, seconds=3.0),
        posted("b", ("g", 1, 0.0)),
    ]
    path = tmp_path / "here" / "it.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(each) + "\n" for each in rows) + '{"rollout_id": "c", "pro')
    return path


def run(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["export", *map(str, arguments)])
    return result.exit_code, result.output + str(result.exception or "")


def test_a_rollout_has_numbers_for_what_is_known_of_it() -> None:
    told = scalars(RolloutRow.model_validate(row("a", RACED, GRADED, seconds=5.5)))
    table = {
        "time": {"seconds": 5.5},
        "tokens": {"generated": 1716, "returned": 1216, "wasted": 500, "stopped": 500, "resumed": 0},
        "lengths": {"median": 150, "p99": 500, "max": 500},
        "rewards": {"mean": 1.0, "std": 0.0, "success": 1.0, "groups_that_teach": 0.0},
        "ends": {"stop": 5, "length": 1, "surplus": 1, "pruned": 0, "deferred": 0, "failed": 0, "num_stopped": 1},
        "groups": {"complete": 1, "incomplete": 1, "moves": 2},
    }
    expected = {f"{part}/{name}": value for part, values in table.items() for name, value in values.items()}
    assert {name: told.get(name) for name in expected} == expected
    assert told.keys() - expected == {"tokens/saved"}  # without the times of all groups nobody knows more


def test_a_receipt_that_was_written_is_told_as_it_is() -> None:
    receipt = {"seconds": 2.0, "bubble": 0.25, "waiting_seconds": 9.0, "saved_seconds": 7.0, "saved_tokens_error": -0.1}
    receipt["queue_seconds"] = 1.5
    told = scalars(RolloutRow.model_validate(row("a", receipt=receipt)))
    times = ("seconds", "bubble", "waiting_seconds", "saved_seconds", "queue_seconds")
    assert [told[f"time/{name}"] for name in times] == [2.0, 0.25, 9.0, 7.0, 1.5]
    assert told["tokens/saved_error"] == -0.1
    assert not any(name.startswith("rewards/") for name in told)


def test_posted_rewards_are_those_of_their_rollout_and_the_last_one_counts() -> None:
    rewards = RewardRow.model_validate(posted("b", ("g", 1, 1.0), ("g", 1, 0.4), ("g", 2, 9.0), ("x", 0, 9.0)))
    told = scalars(add_rewards(RolloutRow.model_validate(row("b", GRADED)), [rewards]), threshold=0.3)
    names = ("mean", "std", "success", "groups_that_teach")
    assert [told[f"rewards/{name}"] for name in names] == pytest.approx([0.7, 0.3, 1.0, 1.0])


def test_tensorboard_reads_it_back_and_writing_again_replaces_it(recording: Path, tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "out"
    out.mkdir()
    (out / "events.out.tfevents.1.another").write_bytes(b"")
    for _ in range(2):
        status, said = run(recording, "--to", "tensorboard", "--output", out)
        assert (status, "4 rollouts written" in said, "1 broken row" in said) == (0, True, True)
    assert {path.name for path in tmp_path.iterdir()} == {"here", "out"}
    assert len(list(out.rglob("events.*"))) == 3  # the other program's, ours, and that of the run below
    (out / "events.out.tfevents.1.another").unlink()
    (folder,) = (path for path in out.iterdir() if path.is_dir())
    for where, expected in (
        (out, [(1005.5, 0, 5.5), (5003.0, 1, 3.0)]),
        (folder, [(3002.0, 7, 2.0), (4004.0, 8, 4.0)]),
    ):
        read = accumulators.EventAccumulator(str(where)).Reload()
        assert [(event.wall_time, event.step, event.value) for event in read.Scalars("time/seconds")] == expected
    read = accumulators.EventAccumulator(str(out), {accumulators.HISTOGRAMS: 0}).Reload()
    whole = {tag: read.Scalars(tag)[0].value for tag in read.Tags()["scalars"] if read.Scalars(tag)[0].step == 0}
    assert whole == pytest.approx(scalars(RolloutRow.model_validate(row("a", seconds=5.5))), rel=PRECISION)
    assert [event.value for event in read.Scalars("rewards/mean")] == [0.5]
    histogram = read.Histograms(export.HISTOGRAM)[0].histogram_value
    assert (histogram.min, histogram.max, histogram.num, sum(histogram.bucket)) == (100, 500, 4, 4)


def test_runs_with_names_that_are_alike_have_folders_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    curves = export.Curves()
    for name in ("exp.1", "exp:1", "exp_1"):
        curves.by_run[name][0] = export.Point(1.0, {"time/seconds": 1.0}, None)
    for _ in range(2):
        export.to_tensorboard(curves, tmp_path)
        assert len(list(tmp_path.rglob("events.*"))) == len({path.parent for path in tmp_path.rglob("events.*")}) == 3


def test_trackio_reads_it_back_and_writing_again_replaces_it(recording: Path, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}

    def python(*arguments: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=WAIT_S
        )

    def tell(*question: str) -> Any:
        asked = "from trackio.cli import main; main()"
        return json.loads(python("-c", asked, *question, "--project", "p", "--json").stdout)

    command = ("-m", "vllm_rollout.cli", "export", recording, "--to", "trackio", "--project", "p")
    for _ in range(2):
        done = python(*command)
        assert done.returncode == 0, done.stderr
    assert sorted(tell("list", "runs")["runs"]) == ["it", "it-../up"]
    seconds = tell("get", "metric", "--run", "it", "--metric", "time/seconds")["values"]
    assert [(each["timestamp"], each["step"], each["value"]) for each in seconds] == [
        ("1970-01-01T00:16:45.500000+00:00", 0, 5.5),
        ("1970-01-01T01:23:23+00:00", 1, 3.0),
    ]
    rounds = tell("get", "metric", "--run", "it-../up", "--metric", "time/seconds")["values"]
    assert [(each["step"], each["value"]) for each in rounds] == [(7, 2.0), (8, 4.0)]
    (lengths, _) = tell("get", "metric", "--run", "it", "--metric", export.HISTOGRAM)["values"]
    assert (lengths["value"]["_type"], sum(lengths["value"]["values"])) == ("trackio.histogram", 4)
    mine = "import trackio; run = trackio.init('p', 'mine', embed=False); run.log({'loss': 1.0}); trackio.finish()"
    assert python("-c", mine).returncode == 0
    refused = python(*command, "--name", "mine")
    assert (refused.returncode, "another program's" in refused.stderr) == (1, True)
    assert len(tell("get", "metric", "--run", "mine", "--metric", "loss")["values"]) == 1


def test_groups_of_sessions_have_curves_of_their_own(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    path, out = tmp_path / "it.jsonl", tmp_path / "out"
    late = {"name": "g1", "rewards": [{"index": 1, "reward": 0.0}]}
    rows = [session_group("g1"), row("a", seconds=5.5), late, session_group("g2", VOID, selected=[])]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    status, said = run(path, "--to", "tensorboard", "--output", out)
    assert (status, "1 rollout and 2 groups of sessions written" in said) == (0, True)
    read = accumulators.EventAccumulator(str(out / "groups_of_sessions")).Reload()
    told = {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    assert [told[name] for name in ("tokens/generated", "tokens/wasted", "tokens/stopped", "ends/void")] == [
        [(0, 90), (1, 0)], [(0, 30), (1, 0)], [(0, 30), (1, 0)], [(0, 1), (1, 1)],
    ]  # fmt: skip
    only = {"rewards/mean": 0.5, "lengths/median": 60, "sessions/turns": 2, "sessions/seconds_between_turns": 2}
    assert {name: told[name] for name in only} == {name: [(0, value)] for name, value in only.items()}
    assert told["tokens/cached_share_of_prompts"] == [(0, pytest.approx(224 / 360))]
    assert [event.wall_time for event in read.Scalars("time/seconds")] == [1009.0, 1009.0]
    path.write_text(json.dumps(rows[0]))
    assert "\n1 group of sessions written" in "\n" + run(path, "--to", "tensorboard", "--output", out)[1]


def test_what_cannot_be_done_says_what_to_do(recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(recording, "--to", "trackio", "--output", "x")[0] == 2
    monkeypatch.setattr(export, "find_spec", lambda package: None)
    for target in ("tensorboard", "trackio"):
        assert install_command(target) in run(recording, "--to", target)[1]
    monkeypatch.setattr(export, "find_spec", lambda package: package)
    (tmp_path / "prompts.jsonl").write_text('{"prompt_id": "q", "lengths": [1]}\n{broken\n')
    for path, reason in (
        ("prompts.jsonl", "holds no rollout and no sessions; first of 1 broken rows"),
        ("none.jsonl", "No such file"),
    ):
        status, said = run(tmp_path / path, "--to", "tensorboard", "--output", tmp_path / "out")
        assert (status, reason in said) == (1, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["tensorboard", "trackio"])
def test_rewards_that_an_earlier_version_took_do_not_end_it(tmp_path: Path, target: str) -> None:
    pytest.importorskip(target)
    huge = [1.7e308, -1.7e308, 1e300, None, 0.0]
    rows = [
        row("a", {**RACED, "rewards": huge}, began=1.0, seconds=1.0),
        row("b", {**RACED, "rewards": [1e100] * 5}, began=2.0, seconds=1.0),
        row("c", GRADED, began=3.0, seconds=1.0),
        posted("c", ("g", 1, -1e308)),
        row("d", began=4.0, seconds=1.0),
    ]
    path = tmp_path / "it.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    run = subprocess.run(
        [sys.executable, "-m", "vllm_rollout.cli", "export", str(path), "--to", target],
        capture_output=True, text=True, timeout=WAIT_S, cwd=tmp_path,
        env={**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "4 rollouts written" in run.stdout
