"""What the benchmark of two ranks works out of what a client sees, on a step by hand."""

from dataclasses import replace

import pytest

from benchmarks.two_ranks.records import (
    Look,
    MovedGroup,
    Step,
    consolidations,
    decoding_lost_share,
    standstill_s,
    undisturbed_lost_s,
)
from benchmarks.two_ranks.summary import summarize, tables
from vllm_rollout.group.cost import CostModel, PTLCurve
from vllm_rollout.group.load import TransferCost

COST = CostModel(((0.0, PTLCurve((1.0,), (0.1,))),), prefill_s_per_token=0.01, step_prefill_s=0.5)
TRANSFER = TransferCost(0.001, block_size=16)


def every(step_s: float, start: float, num: int) -> list[float]:
    return [start + step_s * n for n in range(num)]


def looks(busy_until: tuple[float, float], moved_at: float, end: float, transfer: TransferCost | None) -> list[Look]:
    return [
        Look(
            at_s,
            [at_s < until for until in busy_until],
            3 + (at_s > moved_at),
            1.0 + 0.5 * (at_s > moved_at),
            [transfer, transfer],
        )
        for at_s in every(0.1, 9.95, 1 + round(10 * (end - 9.95)))
    ]


def step(transfer: TransferCost | None = None) -> Step:
    """From 10 s on. At 12.0 the group `b` moves to rank 0, where `a` runs: both pause for a second; `c` has ended."""
    pause = every(0.1, 10.1, 20)  # up to 12.0
    return Step(
        10.0,
        15.0,
        {
            ("a", 0): [*pause, *every(0.1, 13.1, 20)],
            ("b", 0): [*pause, *every(0.1, 13.6, 10)],
            ("c", 0): every(0.1, 10.1, 15),
        },
        {("a", 0): [1] * 40, ("b", 0): [2] * 30, ("c", 0): [3] * 15},
        {"a": 50, "b": 60, "c": 70},
        {"a": "r/a", "b": "r/b", "c": "r/c"},
        looks((15.0, 12.5), 12.5, 15.05, transfer),
        [MovedGroup("r/b", 0, 0.4)],
    )


def test_a_pause_counts_for_what_it_is_longer_than_usual_ones():
    times = [*every(0.1, 0.0, 11), *every(0.1, 2.0, 11)]
    assert standstill_s(times, 1.2, 1.8) == pytest.approx(0.9)
    assert standstill_s(times, 2.2, 2.4) == pytest.approx(0.0)
    assert standstill_s(times, 5.0, 6.0) == 0.0
    assert standstill_s([1.0], 0.0, 2.0) == 0.0


def test_a_rank_is_free_from_when_it_is_seen_empty_for_good():
    its = step()
    assert its.busy_s == [pytest.approx(5.0, abs=0.06), pytest.approx(2.5, abs=0.06)]
    assert its.freed_rank_s == pytest.approx(2.5, abs=0.12)
    assert its.moving_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("transfer", "predicted_s"),
    [(None, 0.5 + 80 * 0.01), (TRANSFER, 0.5 + 8 * 0.01 + 72 * 0.001)],
)
def test_a_consolidation_has_what_it_cost_and_what_was_predicted(transfer, predicted_s):
    (found,) = consolidations(step(transfer), COST)
    assert (found.num_groups, found.num_candidates, found.move_s) == (1, 1, 0.4)
    assert found.kv_tokens == pytest.approx(60 + 20, abs=1)
    assert found.predicted_s == pytest.approx(predicted_s, abs=0.011)
    assert found.sibling_lost_s == pytest.approx(1.0)
    assert found.moved_lost_s == pytest.approx(1.5)


def test_noise_is_what_is_lost_in_the_middle():
    its = step()
    assert undisturbed_lost_s(its) == pytest.approx((1.0 + 1.5) / 2)
    assert undisturbed_lost_s(replace(its, started_s=7.5)) == pytest.approx(0.0)


def test_decoding_lost_is_a_share_of_what_all_candidates_spent():
    spent = (15.0 - 10) + (14.5 - 10) + (11.5 - 10)
    assert decoding_lost_share(step()) == pytest.approx((1.0 + 1.5) / spent, rel=0.02)


def test_ways_are_compared_within_a_repeat():
    def row(way, repeat, seconds, freed, found=()):
        return {
            "way": way, "repeat": repeat, "seconds": seconds, "busy_s": [seconds, seconds - freed],
            "freed_rank_s": freed, "num_moves": len(found), "longest_move_s": 0.2 * len(found),
            "moving_s": 0.1 * len(found), "decoding_lost_share": 0.01, "num_other_answers": 0,
            "consolidations": list(found),
            "undisturbed_lost_s": None if found else 0.02,
        }  # fmt: skip

    cost = {"kv_tokens": 100, "moved_lost_s": 0.4, "sibling_lost_s": 0.2, "predicted_s": 0.1}
    alone = cost | {"sibling_lost_s": None}
    rows = [row("off", 0, 10.0, 1.0), row("kv", 0, 11.0, 4.0, [cost]), row("off", 1, 20.0, 2.0)]
    rows += [row("kv", 1, 24.0, 8.0, [alone]), row("off", 2, 30.0, 0.0), row("kv", 2, 30.0, 1.0)]
    ways = summarize(rows)
    kv = ways["kv"]
    assert (kv["times_off"], kv["freed_more_rank_s"], kv["num_moves"]) == (pytest.approx(1.1), 3.0, 2)
    assert (kv["sibling_lost_s"], kv["measured_over_predicted"]) == (0.2, pytest.approx(2.0))
    assert kv["moving_share"] == pytest.approx(0.2 / (18 + 40 + 59))
    assert ways["off"]["sibling_lost_s"] is None
    shown = tables({"workload": {"prompts": 16, "repeats": 3}, "ways": ways})
    assert "| off | 20.00 | 1.000 |" in shown
    assert len(shown.splitlines()) == 6 + 1 + 5 + 2
    assert shown.endswith("seems to lose 0.020 s in half a second.")
