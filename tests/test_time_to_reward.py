"""What is made of the records of trainings, and what an arm learns from."""

import json
from argparse import Namespace

import pytest

from benchmarks.time_to_reward import report
from benchmarks.time_to_reward.arms import ARMS, RIVALS, RandomHalf
from benchmarks.time_to_reward.report import LONGER, SYNC_S, TRAINED_TOKENS_S, Point, draw, gpu_seconds, reached, read
from benchmarks.time_to_reward.run import is_done
from examples.grpo.train import Training, parse
from vllm_rollout.server.answers import GroupAnswer, GroupRewards, Trajectory, UnselectedCandidate


def step(at: int, lengths: list[int], **more: object) -> dict:
    line = {"kind": "step", "step": at, "lengths": lengths, "other_lengths": [], "longest": max(lengths), "groups": 4}
    line |= {"learned_from": sum(lengths)}
    line |= {"usage": {"generated_tokens": sum(lengths)}, "teaching": 3, "gradient_norm": 1.0, "difference_max": 1e-5}
    return {**line, "seconds": {"rollout": 2.0, "training": 1.0}, **more}


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


@pytest.mark.parametrize(("goal", "steps"), [(0.2, 0), (0.4, 7.5), (0.5, 10), (0.55, 12), (0.9, None)])
def test_a_goal_is_reached_between_evaluations(goal, steps):
    points = [Point(at, 0, 0, 0, success) for at, success in ((0, 0.3), (5, 0.3), (10, 0.5), (15, 0.625))]
    found = reached(points, goal)
    assert (found and found.steps) == (None if steps is None else pytest.approx(steps))


def test_a_report_has_whole_trainings_and_draws_them(tmp_path):
    for name, lengths in (("plain-1", [40, 4]), ("plain-2", [40, 4]), ("plain-3", [20, 4]), ("race-1", [9, 4])):
        lines = [evaluation(0, 0.2), *(step(at, lengths) for at in range(4)), evaluation(4, 0.7)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "race-2").mkdir()
    (tmp_path / "race-2" / "record.jsonl").write_text(f'{json.dumps(evaluation(0, 0.2))}\n{{"kind"')
    assert is_done(tmp_path / "race-1" / "record.jsonl", 4)
    assert not is_done(tmp_path / "race-2" / "record.jsonl", 4)
    assert not is_done(tmp_path / "none", 4)
    runs = list(read(tmp_path))
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
    old = [{**rows[0], "runs": [{**run, "seed": run["seed"] + 2, "p99": 9.5} for run in rows[0]["runs"]]}]
    (more, same), two = report.styles_of({"one": tmp_path}, {"one": old, "two": old}, 0).values()
    assert (more["seeds"], [run["p99"] for run in more["runs"]], same) == (
        [1, 2, 3, 4, 5],
        [0.5] * 3 + [9.5] * 2,
        rows[1],
    )
    assert [row["seeds"] for row in two] == [[3, 4, 5]]
    record = {"styles": {"one": rows, "two": rows[:1]}}
    assert "| race, 8 of 16 | 1 of 1 | 3.2 |" in report.tables(record)
    draw(record, tmp_path / "it.png")
    assert (tmp_path / "it.png").stat().st_size > 10_000


def group(rewards: list[float], stopped: list[int]) -> GroupAnswer:
    said = {"num_tokens": 1, "token_ids": [5], "logprobs": [-1.0]}
    told = GroupRewards.model_construct(estimator="mean", advantages=[], teaches=False)
    return GroupAnswer.model_construct(
        prompt_id="p",
        trajectories=[Trajectory.model_construct(index=i, reward=r, **said) for i, r in enumerate(rewards)],
        candidates=[UnselectedCandidate.model_construct(index=i, state="surplus", **said) for i in stopped],
        rewards=told,
    )


def groups_of(training: type[Training], given: GroupAnswer, monkeypatch: pytest.MonkeyPatch) -> GroupAnswer:
    monkeypatch.setattr(Training, "groups", lambda self, step: iter([given]))
    arm = training.__new__(training)
    arm.args = Namespace(seed=1)
    (found,) = arm.groups(None)
    return found


def test_half_of_a_group_is_drawn_and_has_advantages_of_its_own(monkeypatch):
    found = groups_of(RandomHalf, group([1.0, 0.0] * 4, []), monkeypatch)
    assert len({trajectory.index for trajectory in found.trajectories}) == 4
    assert {other.index for other in found.candidates} == {*range(8)} - {t.index for t in found.trajectories}
    assert sum(found.rewards.advantages) == pytest.approx(0)
    assert found == groups_of(RandomHalf, group([1.0, 0.0] * 4, []), monkeypatch)


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


def test_every_arm_that_is_drawn_has_a_title_and_no_rival_is_trained_here():
    assert {*report.PICTURED, *ARMS, *RIVALS} <= {*report.TITLES}
    assert not {*ARMS} & {*RIVALS}
