"""The clocks of the ablation: what is hidden behind a rollout, what is added to a step, and what is made of it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ablation import (
    COLORS,
    ROWS,
    Answer,
    Group,
    Rewarder,
    Round,
    Trainer,
    lateness_s,
    row_of,
    rows_of,
    stages_of,
    trained_at,
)
from benchmarks.rewards.rounds import PAPER, Workload
from vllm_rollout.parts.emulation.step_log import LoggedStep

TRAINER = Trainer(tokens_per_s=10.0, weights_s=0.5)
REWARDS = Workload(num_prompts=3, group_size=4, num_processes=2, scale=1.0, seed=1)
AFTER, GRADED, STREAM = (
    row for row in ROWS if row.title in {"+ moves", "+ rewards as answers end", "+ stream trainer"}
)


@pytest.mark.parametrize(
    ("groups", "free_s", "share", "end"),
    [
        ([(1, 10), (2, 10)], 10, 0.0, 12),  # nothing is free: all of it after the rollout's end at 10
        ([(1, 10), (2, 10)], 0, 0.5, 5),  # twice as long on half of the devices, one after the other
        ([(2, 10), (1, 10)], 4, 0.5, 8),  # what came before they were free waits
        ([(9, 20)], 0, 0.5, 11.5),  # half a second of two before the end, on half of the devices
        ([(1, 10), (13, 10)], 0, 1.0, 14),  # a reward that comes after the end
        ([], 10, 0.0, 10),
    ],
)
def test_groups_are_trained_on_freed_devices_and_after_the_rollout_on_all(groups, free_s, share, end):
    assert trained_at([Group(*each) for each in groups], 10.0, free_s, share, 10.0) == pytest.approx(end)


def text_that(kind, prompt_id="0"):
    return next(str(i) for i in range(1000) if REWARDS.cases[prompt_id].fate(str(i))[0] == kind)


def seconds_of(text, prompt_id="0"):
    return REWARDS.cases[prompt_id].fate(text)[1]


def test_answers_are_graded_in_the_order_in_which_they_end_as_soon_as_there_is_a_place():
    right, wrong = text_that("right"), text_that("wrong")
    answers = [Answer(1.0, "0", 5, wrong), Answer(0.0, "0", 5, right), Answer(1.5, "0", 5, right)]
    fixed = replace(PAPER, shortest_s=PAPER.longest_s)
    first, second = seconds_of(right), 1.0 + seconds_of(wrong)
    expected = [first, second, max(1.5, min(first, second)) + seconds_of(right)]
    assert Rewarder(REWARDS, fixed).graded_at(answers) == pytest.approx(expected)


def test_what_hangs_ends_at_a_limit_that_right_answers_have_taught():
    hangs = [Answer(0.0, "0", 5, text_that("hangs"))]
    learned = [seconds for i in range(4) for kind, seconds in [REWARDS.cases["0"].fate(f"an epoch before/{i}")]
               if kind == "right"]  # fmt: skip
    assert Rewarder(REWARDS, PAPER).graded_at(hangs) == [max(2.0, 1.5 * max(learned))]
    assert Rewarder(REWARDS, replace(PAPER, shortest_s=30.0)).graded_at(hangs) == [30.0]


ended = st.tuples(st.floats(0, 10), st.sampled_from("012"), st.integers(1, 300), st.text("ab", max_size=4))


@pytest.mark.thorough
@given(st.lists(ended.map(lambda each: Answer(*each)), min_size=1), st.floats(0, 1), st.integers(0, 4))
def test_streaming_never_makes_the_rest_of_a_step_longer_and_hides_no_more_than_there_is(answers, free, num_free):
    its = Round("short", num_free=num_free, answers=answers)
    its.free_s = free * its.rollout_s
    graded, streamed = (stages_of(its, row, Rewarder(REWARDS, PAPER), TRAINER, 4) for row in (GRADED, STREAM))
    work_s = sum(each.tokens for each in answers) / TRAINER.tokens_per_s
    assert graded["training"] == pytest.approx(work_s)
    assert 0 <= streamed["training"] <= work_s + 1e-9
    assert streamed["training"] + streamed["rewards"] + its.rollout_s - its.free_s + 1e-9 >= work_s
    assert {**graded, "training": 0} == {**streamed, "training": 0}


def test_what_is_not_returned_is_not_trained_on_but_takes_a_place():
    mine = Answer(1.0, "0", 50, text_that("right"))
    others = [Answer(0.0, "1", 90, text_that("hangs", "1"), False)] * 2
    alone, beside = (
        stages_of(Round("short", answers=each), GRADED, Rewarder(REWARDS, PAPER), TRAINER, 4)
        for each in ([mine], [mine, *others])
    )
    assert alone["training"] == beside["training"] == pytest.approx(5)
    assert beside["rewards"] > alone["rewards"] == pytest.approx(seconds_of(mine.text))


def test_a_row_is_seconds_per_group_as_if_the_host_were_never_late():
    text = text_that("right")
    rounds = [
        Round(kind, late_s=late_s, answers=[Answer(at_s, name, 5, text) for name in names for _ in range(4)])
        for kind, late_s, at_s, names in (("short", 1.0, 4.0, "0"), ("long", 0.0, 9.0, "012"))
    ]
    row = row_of(rounds, AFTER, REWARDS, TRAINER, 4)
    assert row["stages"]["rollout"] == pytest.approx((3 + 9) / 4)
    assert (row["stages"]["training"], row["stages"]["weights"]) == pytest.approx((2.0, 0.25))
    assert row["group_s"] == pytest.approx(sum(row["stages"].values()))
    assert row["measured_group_s"] == pytest.approx(row["group_s"] + 1 / 4)
    assert (row["late_share"], row["training_hidden"]) == pytest.approx((1 / 13, 0.0))


def test_factors_are_within_a_seed():
    others = {"training_hidden": 0.0, "preemptions": 1, "late_share": 0.1, "measured_group_s": 9.0}
    measured = [
        {"row": row.title, "seed": seed, "group_s": each, "stages": dict.fromkeys(COLORS, 1.0), **others}
        for row, both in zip(ROWS, [(8.0, 6.0), (4.0, 2.0), (1.0, 2.0)], strict=False)
        for seed, each in enumerate(both)
    ]
    found = rows_of({"measured": measured})
    assert [row["factors"] for row in found] == [[1, 1], [2, 3], [8, 3]]
    assert [row["steps"] for row in found] == [[1, 1], [2, 3], [4, 1]]
    assert found[1]["preemptions"] == 2


def test_lateness_is_of_ranks_that_worked_until_the_end():
    def log(*spans):
        return [LoggedStep(start, start, end, end, 0.0, n > 0, 1, 1, 1, 0) for n, (start, end) in enumerate(spans)]

    before, waited = log((0, 50)), log((100, 101), (104, 105), (110, 120))
    assert lateness_s([before + waited, log((100, 103))], 100, 120) == 3 + 5
    assert lateness_s([waited, log((100, 119.5))], 100, 120) == 4
