"""Evaluation of records of trainings, and the answers that an arm learns from."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.time_to_reward import report, trl_record
from benchmarks.time_to_reward.arms import ARMS, RIVALS, CorrectedBaseline, RandomHalf
from benchmarks.time_to_reward.report import LONGER, SYNC_S, TRAINED_TOKENS_S, Point, draw, gpu_seconds, reached, read
from benchmarks.time_to_reward.run import is_done, say_what_runs
from benchmarks.time_to_reward.trl_record import Record
from examples.grpo.task import problems
from examples.grpo.train import Training, parse
from vllm_rollout.kernel.http.answers import (
    GroupAnswer,
    GroupRewards,
    StoppedCandidate,
    Trajectory,
)


def step(at: int, lengths: list[int], **more: object) -> dict:
    line = {"kind": "step", "step": at, "lengths": lengths, "other_lengths": [], "longest": max(lengths), "groups": 4}
    line |= {"learned_from": sum(lengths)}
    line |= {"usage": {"generated_tokens": sum(lengths)}, "teaching": 3, "gradient_norm": 1.0, "difference_max": 1e-5}
    return {**line, "seconds": {"rollout": 2.0, "training": 1.0, "rewards": 0.25, "sync": 0.125}, **more}


def leave(folder: Path, lines: list[dict]) -> None:
    """Write a record as a training does."""
    folder.mkdir()
    (folder / "record.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def evaluation(at: int, success: float) -> dict:
    ends = dict.fromkeys(("length", "p99", "easy", "hard"), 0.5)
    return {"kind": "evaluation", "step": at, "success": success, "seconds_of_steps": 3.0 * at, **ends}


def test_seconds_on_a_gpu_are_those_of_a_batch_that_empties():
    plain = step(0, [1, 3])
    decode = LONGER * (1 * (0.0052 + 2 * 0.000012) + 2 * (0.0052 + 1 * 0.000012))
    assert gpu_seconds(plain) == pytest.approx(decode + LONGER * 4 / TRAINED_TOKENS_S + SYNC_S)
    deferred = step(0, [1, 3], usage={"num_deferred": 5})
    assert gpu_seconds(deferred) - gpu_seconds(plain) == pytest.approx(LONGER * 3 * 5 * 0.000012)
    stopped = step(0, [1], other_lengths=[3])
    assert gpu_seconds(plain) - gpu_seconds(stopped) == pytest.approx(LONGER * 3 / TRAINED_TOKENS_S)
    went_on = step(0, [1, 9], resumed=[0, 6], learned_from=4)  # its last three tokens
    assert gpu_seconds(went_on) == pytest.approx(gpu_seconds(plain))


@pytest.mark.parametrize(("goal", "steps"), [(0.2, 0), (0.4, 7.5), (0.5, 10), (0.55, 12), (0.9, None)])
def test_a_goal_is_reached_between_evaluations(goal, steps):
    points = [Point(at, 0, 0, 0, success) for at, success in ((0, 0.3), (5, 0.3), (10, 0.5), (15, 0.625))]
    found = reached(points, goal)
    assert (found and found.steps) == (None if steps is None else pytest.approx(steps))


def test_a_report_has_whole_trainings_and_draws_them(tmp_path):
    for name, lengths in (("plain-1", [40, 4]), ("plain-2", [40, 4]), ("plain-3", [20, 4]), ("race-1", [9, 4])):
        lines = [evaluation(0, 0.2), *(step(at, lengths) for at in range(4)), evaluation(4, 0.7)]
        leave(tmp_path / name, lines)
    (tmp_path / "race-2").mkdir()
    (tmp_path / "race-2" / "record.jsonl").write_text(f'{json.dumps(evaluation(0, 0.2))}\n{{"kind"')
    lines = [evaluation(0, 0.2), step(0, [9]), evaluation(1, 0.7)]
    leave(tmp_path / "race-3", lines)  # still runs, and was just evaluated
    assert is_done(tmp_path / "race-1" / "record.jsonl", 4)
    assert not is_done(tmp_path / "race-2" / "record.jsonl", 4)
    assert not is_done(tmp_path / "none", 4)
    runs = read(tmp_path)
    assert [(run.arm, run.seed) for run in runs] == [("plain", 1), ("plain", 2), ("plain", 3), ("race", 1)]
    rows = report.styles_of({"one": tmp_path}, {}, 0)["one"]
    plain, race = (row["to_0.6"] for row in rows)
    assert plain["steps"] == pytest.approx(3.2)
    assert plain["gpu_seconds"] > race["gpu_seconds"]
    assert plain["gpu_seconds_interval"][0] < plain["gpu_seconds_interval"][1]
    assert race["gpu_seconds_interval"] is None
    assert rows[0]["to_0.8"]["num"] == 0
    assert rows[0]["to_0.8"]["steps"] is None
    slow = [dict(run, points=[dict(point, success=0.2) for point in run["points"]]) for run in rows[0]["runs"]]
    for num_slow, expected in ((1, (2, 3.2, [3.2, None])), (2, (1, None, [3.2, None]))):
        told = report.row_of("plain", slow[:num_slow] + rows[0]["runs"][num_slow:], 0)["to_0.6"]
        assert (told["num"], told["steps"], told["steps_interval"]) == expected
    assert report.styles_of({}, {"one": rows}, 0) == {"one": rows}
    assert [each["step"] for each in rows[0]["over_time"]] == [0, 4]
    assert (rows[0]["start"], rows[0]["end"]) == (0.2, 0.7)
    waves = report.row_of("until", rows[0]["runs"], 0)["to_0.6"]
    assert (waves["seconds"], waves["gpu_seconds"]) == (plain["seconds"], None)
    assert "2.00, 0.25, 1.00, 0.12" in report.tables({"styles": {"one": rows}})
    lacking = [{name: run[name] for name in run if name != "sync_s"} for run in rows[0]["runs"]]
    old = [{**rows[0], "runs": [{**run, "seed": run["seed"] + 2, "p99": 9.5} for run in lacking]}]
    (more, same), two = report.styles_of({"one": tmp_path}, {"one": old, "two": old}, 0).values()
    assert (more["seeds"], [run["p99"] for run in more["runs"]], same) == (
        [1, 2, 3, 4, 5],
        [0.5] * 3 + [9.5] * 2,
        rows[1],
    )
    assert [row["seeds"] for row in two] == [[3, 4, 5]]
    assert [more["sync_s"], two[0]["sync_s"]] == [0.125, None]
    record = {"styles": {"one": rows, "two": rows[:1]}}
    assert "| race, 8 of 16 | 1 of 1 | 3.2 |" in report.tables(record)
    draw(record, tmp_path / "it.png")
    assert (tmp_path / "it.png").stat().st_size > 10_000


def test_trainings_of_two_policies_are_never_in_one_row(tmp_path, monkeypatch):
    for name, weights in (("one", b"1"), ("other", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    for _ in range(2):
        say_what_runs(tmp_path / "runs", str(tmp_path / "one"), ["--lr=1"])
    assert json.loads((tmp_path / "runs" / "about.json").read_text())["flags"] == ["--lr=1"]
    with pytest.raises(SystemExit, match=r"has trainings of policy \w+, .*other is \w+\. Name another folder"):
        say_what_runs(tmp_path / "runs", str(tmp_path / "other"), [])
    with pytest.raises(SystemExit, match=r"has trainings of flags \['--lr=1'\], .* Name another folder"):
        say_what_runs(tmp_path / "runs", str(tmp_path / "one"), [], one_setting=True)
    say_what_runs(tmp_path / "runs", str(tmp_path / "one"), ["--lr=1"])

    say_what_runs(tmp_path / "others", str(tmp_path / "other"), [])
    for name in ("runs", "others"):
        leave(tmp_path / name / "plain-1", [evaluation(0, 0.2), step(0, [9]), evaluation(1, 0.7)])
    words = ["--output", str(tmp_path / "it.json"), "--output-picture", str(tmp_path / "it.png")]
    for style, folder, passes in (
        ("a", "runs", True),
        ("b", "others", True),
        ("a", "runs", True),
        ("a", "others", False),
    ):
        kept = ["--with", str(tmp_path / "it.json")] if (tmp_path / "it.json").exists() else []
        monkeypatch.setattr("sys.argv", ["report", f"{style}={tmp_path / folder}", *kept, *words])
        if passes:
            report.main()
        else:
            with pytest.raises(SystemExit, match=r"'a' has trainings of policy .* Name another style"):
                report.main()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a folder of runs, such as careful=runs/careful"),
        (["careful"], "has no finished runs"),
        (["careful={empty}"], "has no finished runs"),
    ],
)
def test_a_report_of_no_runs_is_refused_and_replaces_no_file(tmp_path, monkeypatch, capsys, words, said):
    empty, result = tmp_path / "empty", tmp_path / "it.json"
    empty.mkdir()
    (empty / "about.json").write_text("{}")
    result.write_text("earlier")
    monkeypatch.setattr("sys.argv", ["report", *(word.format(empty=empty) for word in words), "--output", str(result)])
    with pytest.raises(SystemExit):
        report.main()
    assert said in capsys.readouterr().err
    assert result.read_text() == "earlier"


def test_a_report_whose_picture_cannot_be_drawn_replaces_no_file(tmp_path, monkeypatch):
    runs, result, drawn = tmp_path / "runs", tmp_path / "it.json", tmp_path / "it.png"
    runs.mkdir()
    (runs / "about.json").write_text('{"policy": "1"}')
    leave(runs / "plain-1", [evaluation(0, 0.2), step(0, [9]), evaluation(1, 0.7)])
    for file in (result, drawn):
        file.write_text("earlier")

    def fails(record: dict, path: Path) -> None:
        path.write_text("half a picture")
        raise ValueError("no picture")

    words = [f"careful={runs}", "--output", str(result), "--output-picture", str(drawn)]
    monkeypatch.setattr("sys.argv", ["report", *words])
    monkeypatch.setattr(report, "draw", fails)
    with pytest.raises(ValueError, match="no picture"):
        report.main()
    assert (result.read_text(), drawn.read_text()) == ("earlier", "earlier")


def test_a_training_in_which_nothing_taught_has_a_summary(tmp_path):
    lines = [evaluation(0, 0.5), step(0, [4], gradient_norm=0.0, teaching=0), evaluation(1, 0.5)]
    leave(tmp_path / "plain-1", lines)
    (row,) = report.styles_of({"one": tmp_path}, {}, 0)["one"]
    assert (row["gradient_norm"], row["gradient_spread"], row["end"]) == (0.0, 0.0, 0.5)


def group(rewards: list[float], stopped: list[int]) -> GroupAnswer:
    said = {"num_tokens": 1, "token_ids": [5], "logprobs": [-1.0]}
    told = GroupRewards.model_construct(estimator="mean", advantages=[], teaches=False)
    return GroupAnswer.model_construct(
        prompt_id="p",
        trajectories=[Trajectory.model_construct(index=i, reward=r, **said) for i, r in enumerate(rewards)],
        candidates=[StoppedCandidate.model_construct(index=i, state="surplus", **said) for i in stopped],
        rewards=told,
    )


def groups_of(training: type[Training], given: GroupAnswer, monkeypatch: pytest.MonkeyPatch) -> GroupAnswer:
    monkeypatch.setattr(Training, "groups", lambda self, step: iter([given]))
    arm = training.__new__(training)
    arm.args = Namespace(seed=1)
    audit = Namespace(raced_success_weight=0.5)
    arm.server = Namespace(client=Namespace(report=lambda: Namespace(audit=audit)))
    (found,) = arm.groups(None)
    return found


def test_half_of_a_group_is_drawn_and_has_advantages_of_its_own(monkeypatch):
    found = groups_of(RandomHalf, group([1.0, 0.0] * 4, []), monkeypatch)
    assert len({trajectory.index for trajectory in found.trajectories}) == 4
    assert {other.index for other in found.candidates} == {*range(8)} - {t.index for t in found.trajectories}
    assert sum(found.rewards.advantages) == pytest.approx(0)
    assert found == groups_of(RandomHalf, group([1.0, 0.0] * 4, []), monkeypatch)


@pytest.mark.parametrize(
    ("rewards", "said", "advantages"),
    [
        ([1.0, 1.0, 0.0], {}, [0.5, 0.5, -0.5]),  # two right answers stand for one, beside a wrong one
        ([1.0, 1.0, 0.0], {"audit": True}, [7.0]),
        ([1.0, 1.0], {}, [7.0]),
        ([1.0, None, 0.0, 0.0], {}, [0.8, None, -0.2, -0.2]),
    ],
)
def test_a_races_baseline_is_what_audits_say(rewards, said, advantages, monkeypatch):
    given = group(rewards, []).model_copy(update=said)
    its = given.rewards.model_copy(update={"teaches": len(set(rewards)) > 1, "advantages": [7.0]})
    found = groups_of(CorrectedBaseline, given.model_copy(update={"rewards": its}), monkeypatch)
    assert found.rewards.advantages == pytest.approx(advantages)


@pytest.mark.parametrize("name", ARMS)
def test_the_flags_of_every_arm_are_the_trainers(name):
    assert parse(["model", "output", *ARMS[name].flags.split()]).steps == 25


def test_random_pruning_is_a_random_half_whose_others_were_stopped_early():
    lines = [step(0, [10], other_lengths=[40, 8], usage={"generated_tokens": 58}), step(1, [10])]
    points = [Point(at, at * 58.0, 1.0, 999.0, 0.1 * at) for at in (0, 2)]
    made = report.randomly_pruned(report.Finished("half16", 1, points, lines, []))
    stopped = step(0, [10], other_lengths=[24, 8])
    assert [point.tokens for point in made.points] == [0, 2 * 58 - 16]
    assert made.points[1].gpu_seconds == pytest.approx(gpu_seconds(stopped) + gpu_seconds(lines[1]))
    assert (made.arm, lines[0]["usage"]["generated_tokens"]) == ("random", 58)


def test_a_training_by_trl_has_the_record_of_any_other(tmp_path, monkeypatch):
    """Each step: 1 s to send weights, 10 s of an evaluation that does not count, 3 s of rollout, 6 s of training."""
    now = [100.0]
    monkeypatch.setattr(trl_record.time, "perf_counter", lambda: now[0])
    (tmp_path / "trl_race-4").mkdir()
    record = Record(tmp_path / "trl_race-4" / "record.jsonl", group_size=2, tokens_of_loss=600)

    def lasts(what: str, seconds: float) -> None:
        with record.clock(what):
            now[0] += seconds

    def evaluated(at: int) -> None:
        lasts("evaluation", 10)
        record.evaluated(at, [(problem, 20 + at, float(at)) for problem in problems("chain", "held-out", 4)])

    for at, (lengths, rewards) in enumerate([([9, 1, 5, 5], [1, 0, 1, 1]), ([40, 20], [0, 1])]):
        record.on_step_begin()
        lasts("sync", 1)
        if at == 0:
            evaluated(0)
        lasts("rollout", 3)
        record.generated(lengths, [40], generated_tokens=sum(lengths) + 40, num_surplus=1)
        record.graded(rewards)
        now[0] += 6
        record.on_step_end()
        logs = {"grad_norm": "0.5", f"{trl_record.DIFFERENCE}/mean": 1e-6, f"{trl_record.DIFFERENCE}/max": 1e-5}
        record.on_log(None, Namespace(global_step=at + 1), None, logs=logs)
        now[0] += 7  # between steps
    record.on_log(None, Namespace(global_step=2), None, logs={"train_runtime": 1.0})
    evaluated(2)

    (run,) = report.read(tmp_path)
    first, second = run.steps
    assert first["seconds"] == {"step": 10, "rollout": 3, "sync": 1, "training": 6}
    assert (first["longest"], second["longest"]) == (40, 40)
    assert (first["groups"], first["teaching"], first["reward"]) == (2, 1, 0.75)
    assert first["gradient_norm"] == pytest.approx(0.5 * 600 / 20)
    assert gpu_seconds(first) == pytest.approx(gpu_seconds({**step(0, [9, 1, 5, 5]), "other_lengths": [40]}))
    assert [(p.steps, p.tokens, p.seconds) for p in run.points] == [(0, 0, 0), (2, 60 + 100, 20)]
    row = report.row_of("trl_race", [report.summary(run)], 0)
    assert (row["title"], row["start"], row["difference_max"]) == (RIVALS["trl_race"], 0, 1e-5)
