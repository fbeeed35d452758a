"""The benchmark of the placement on rollouts small enough for a test."""

from dataclasses import replace

import pytest

from benchmarks.placement_simulated import WAYS, over_all, row, seconds, table
from benchmarks.rounds_simulated.setup import MODELS
from vllm_rollout.simulator.generate import LengthDistribution


def test_every_way_stands_beside_placing_by_candidates():
    its = LengthDistribution(
        prompts=24, candidates=4, steps=4, median=300, sigma=0.3, prompt_sigma=1.5, max_tokens=4000
    )
    machine = replace(MODELS["14B/16k"].machine, num_ranks=4)
    seeds = [seconds(its, machine, seed) for seed in range(3)]
    about = {"model": "14B/16k", "between_prompts": 0.75, "prompts": 24}
    rows = [about | row(way, seeds) for way in WAYS]
    assert [one["time_against_candidates"] for one in rows if one["way"] == "candidates"] == [1]
    assert len(table(rows).splitlines()) == 4 + len(WAYS)
    means = {way: its["mean"] for way, its in over_all(rows).items()}
    assert means["real"] < 1
    assert means["predicted"] < 1


def test_one_rank_leaves_nothing_to_choose():
    its = LengthDistribution(prompts=6, candidates=2, steps=4, median=100, max_tokens=400)
    its_s = seconds(its, replace(MODELS["7B/8k"].machine, num_ranks=1), 0)
    assert list(its_s.values()) == pytest.approx([its_s["candidates"]] * len(WAYS))
