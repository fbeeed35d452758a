"""Forecast of round times at each tensor-parallel size, and the first size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.rounds.rules.planner import SLOWER
from vllm_rollout.parts.rounds.with_shaping.rules.forecast import (
    EXPECTED_SHARE,
    EngineSize,
    ExpectedRound,
    Forecast,
    choose_start,
    expected_round,
    forecast,
)
from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve, rollout_time
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.race import PoolCandidate, Race
from vllm_rollout.simulator.rank import run_races

COST = CostModel(
    (
        (0.0, PTLCurve((1.0, 64.0), (0.004, 0.008))),
        (1000.0, PTLCurve((1.0, 64.0), (0.005, 0.016))),
    ),
    prefill_s_per_token=1e-5,
    step_prefill_s=1e-3,
    max_num_seqs=32,
)
LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


def faster(factor: float) -> CostModel:
    curves = tuple((c, PTLCurve(p.batch_sizes, tuple(s / factor for s in p.seconds))) for c, p in COST.curves)
    return CostModel(curves, COST.prefill_s_per_token / factor, max_num_seqs=COST.max_num_seqs)


def simulated(lengths: list[int], prompt_tokens: int, kv_tokens: int) -> Forecast:
    """Forecast by the simulator for the same candidates, each a group of its own."""
    pools = [[PoolCandidate(length, "stop", length, False, None, None)] for length in lengths]
    races = [Race(str(i), GroupPlan(1), pool, prompt_tokens, None, None, None, 4096) for i, pool in enumerate(pools)]
    run = run_races(Machine(COST, kv_capacity_tokens=kv_tokens), races)
    return Forecast(run.seconds, run.num_preemptions)


@given(LENGTHS, st.integers(0, 100))
def test_with_room_for_everybody_it_is_the_time_of_the_rollout(lengths, prompt_tokens):
    expected = ExpectedRound(lengths, len(lengths), prompt_tokens)
    found = forecast(EngineSize(COST, 10**9), expected)
    assert found.num_preemptions == 0
    assert found.seconds == pytest.approx(rollout_time(lengths, COST, prompt_tokens))


@given(LENGTHS, st.integers(1, 100), st.integers(500, 8000))
def test_under_pressure_it_is_what_the_simulator_says(lengths, prompt_tokens, kv_tokens):
    found = forecast(EngineSize(COST, kv_tokens), ExpectedRound(lengths, len(lengths), prompt_tokens))
    wanted = simulated(lengths, prompt_tokens, kv_tokens)
    assert found.num_preemptions == wanted.num_preemptions
    assert found.seconds == pytest.approx(wanted.seconds)


@given(LENGTHS, st.integers(0, 100), st.integers(1, 3000), st.data())
def test_it_ends_with_what_is_wanted_however_little_fits(lengths, prompt_tokens, kv_tokens, data):
    num_wanted = data.draw(st.integers(1, len(lengths)))
    group_size = data.draw(st.integers(1, 16))
    engine = EngineSize(COST, kv_tokens)
    part = forecast(engine, ExpectedRound(lengths, num_wanted, prompt_tokens, group_size))
    whole = forecast(engine, ExpectedRound(lengths, len(lengths), prompt_tokens, group_size))
    assert 0 < part.seconds <= whole.seconds
    assert part.num_preemptions <= whole.num_preemptions


def test_siblings_share_the_prompt():
    lengths, engine = [100] * 20, EngineSize(COST, 20 * 150)
    alone = forecast(engine, ExpectedRound(lengths, 20, 200))
    shared = forecast(engine, ExpectedRound(lengths, 20, 200, group_size=10))
    assert shared.num_preemptions == 0 < alone.num_preemptions
    assert shared.seconds < 0.6 * alone.seconds


@given(
    LENGTHS,
    st.dictionaries(st.sampled_from((1, 2, 4, 8)), st.tuples(st.floats(0.5, 8), st.integers(1, 8000)), min_size=1),
)
def test_the_start_is_the_smallest_size_that_is_as_fast_as_any(lengths, machines):
    engines = {size: EngineSize(faster(factor), kv_tokens) for size, (factor, kv_tokens) in machines.items()}
    choice = choose_start(engines, ExpectedRound(lengths, len(lengths)))
    best = min(each.seconds for each in choice.forecasts.values())
    assert choice.forecasts[choice.size].seconds <= SLOWER * best
    assert all(each.seconds > SLOWER * best for size, each in choice.forecasts.items() if size < choice.size)


def test_a_size_that_preempts_is_not_begun_at():
    expected = expected_round(64, 64, 2048, mean_tokens=400, std_tokens=300)
    slow, quick = faster(1.0), faster(1.04)
    roomy = choose_start({1: EngineSize(slow, 10**6), 2: EngineSize(quick, 10**6)}, expected)
    assert (roomy.size, roomy.forecasts[1].num_preemptions) == (1, 0)
    pressed = choose_start({1: EngineSize(slow, 4000), 2: EngineSize(quick, 10**6)}, expected)
    assert pressed.size == 2
    assert pressed.forecasts[1].num_preemptions > 0
    assert "preemptions; 2: " in str(pressed)


def test_without_lengths_a_round_is_expected_by_its_cap():
    expected = expected_round(1000, 1000, 8192)
    mean = sum(expected.lengths) / 1000
    assert 0.9 * EXPECTED_SHARE * 8192 < mean < EXPECTED_SHARE * 8192  # the cap takes a little
    assert max(expected.lengths) == 8192


def test_a_large_round_is_expected_within_a_moment():
    """The round has 1,280 candidates. The test counts events, not seconds."""
    lengths = expected_round(1280, 1280, 8192).lengths
    calls = 0

    class Counted(CostModel):
        def decode_time(self, *args):
            nonlocal calls
            calls += 1
            return 1.0

    forecast(EngineSize(Counted(COST.curves), 200_000), ExpectedRound(lengths, 1280))
    assert calls < 4 * 1280
