"""The benchmark of moves on a rollout small enough for a test."""

from benchmarks.moves_simulated import WAYS, outcomes, row, table
from benchmarks.rounds_simulated.setup import MODELS
from vllm_rollout.simulator.generate import LengthDistribution


def test_every_way_stands_beside_staying():
    its = LengthDistribution(prompts=24, candidates=4, steps=2, median=300, sigma=1.0, max_tokens=4000)
    seeds = [outcomes(its, MODELS["7B/8k"].machine, seed) for seed in range(2)]
    rows = {way: row(way, seeds) for way in WAYS}
    stay = rows["stay"]
    assert (stay["time_against_staying"], stay["freed_share"], stay["moves_per_rollout"]) == (1, 0, 0)
    for way in ("consolidate", "scale-down", "both"):
        assert rows[way]["freed_share"] > 0
        assert rows[way]["busy_against_staying"] < 1
    about = {"model": "7B/8k", "between_prompts": 0.5, "num_ranks": 16}
    assert len(table([about | one for one in rows.values()]).splitlines()) == 4 + len(WAYS)
