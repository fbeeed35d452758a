from dataclasses import replace as changed
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.simulator.traces import DETAILED, FLAT, LINEAR, pool, traced
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.rows import PlanError
from vllm_rollout.parts.moving.simulated import Places
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan
from vllm_rollout.parts.shaping.rules.cost import CostModel
from vllm_rollout.parts.shaping.rules.history import ObservedLength
from vllm_rollout.parts.shaping.rules.trace import Trace, TracedCandidate, TracedPrompt, TracedRollout
from vllm_rollout.simulator.generate import LengthDistribution, generate
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.outcome import summed
from vllm_rollout.simulator.planner import Planner
from vllm_rollout.simulator.race import PoolCandidate, Pools, Race
from vllm_rollout.simulator.replay import assigned, replay
from vllm_rollout.simulator.settings import Setting, default_sweep

SMALL = LengthDistribution(prompts=6, candidates=8, steps=3, median=40, max_tokens=120, prompt_tokens=10)


def test_rollouts_run_one_after_the_other_and_wait_for_their_slowest_group():
    trace = traced({"a": [4, 6], "b": [3, 10]}, {"a": [2, 8]})
    outcome = replay(Pools(trace), Setting(2), Machine(FLAT))
    assert outcome.seconds == 10 + 8
    assert outcome.time_to_first_group_s == (6 + 8) / 2
    assert (outcome.generated_tokens, outcome.returned_tokens, outcome.wasted_tokens) == (33, 33, 0)
    assert outcome.num_groups == 3
    assert outcome.candidates_per_prompt == 2


def test_an_audited_group_runs_as_one_without_redundancy():
    trace = generate(changed(SMALL, steps=40), 1)
    plain, raced, audited = (
        replay(Pools(trace), setting, Machine(FLAT), seed=3)
        for setting in (Setting(4), Setting(4, 4), Setting(4, 4, audit_ratio=1.0))
    )
    assert audited.seconds == plain.seconds > raced.seconds
    assert audited.generated_tokens == plain.generated_tokens
    assert audited.wasted_tokens == 0


@pytest.mark.thorough
def test_audits_by_the_rollout_cost_less_time_than_as_many_by_the_group():
    trace = generate(changed(SMALL, steps=100), 1)
    seconds = {
        unit: replay(Pools(trace), Setting(4, 4, audit_ratio=0.2, audit_unit=unit), Machine(FLAT), seed=3).seconds
        for unit in ("group", "rollout")
    }
    raced = replay(Pools(trace), Setting(4, 4), Machine(FLAT), seed=3).seconds
    assert raced < seconds["rollout"] < seconds["group"]


def test_the_bubble_is_what_is_missing_to_the_peak():
    trace = traced({"a": [5, 10]}, {"a": [20, 20]})
    outcome = replay(Pools(trace), Setting(2), Machine(FLAT))
    assert outcome.bubble == pytest.approx(1 - (5 * 2 + 5 * 1 + 20 * 2) / (2 * (10 + 20)))
    both = replay(Pools(traced({"a": [5, 5], "b": [10, 10]})), Setting(2), Machine(FLAT, num_ranks=2))
    assert both.bubble == pytest.approx(1 - (5 * 4 + 5 * 2) / (10 * 4))


def test_returned_lengths_are_those_of_the_selected():
    trace = traced({"a": [50, 10, 40, 20, 30, 60]}, max_tokens=60)
    first = replay(Pools(trace), Setting(2, 4), Machine(FLAT))
    assert first.returned_lengths == [10, 20]
    assert (first.generated_tokens, first.wasted_tokens) == (10 + 5 * 20, 10 + 5 * 20 - 30)
    ends = replay(Pools(trace), Setting(2, 4, "dual_end", 1), Machine(FLAT))
    assert ends.returned_lengths == [50, 10]
    assert (ends.seconds, ends.truncated_share) == (60, 0)
    patient = replay(Pools(trace), Setting(2, 4, "dual_end", 1, patience=1.5), Machine(FLAT))
    assert (patient.seconds, patient.returned_lengths) == (30, [10, 30])


def test_truncated_answers_and_incomplete_groups_are_counted():
    trace = Trace((TracedRollout((TracedPrompt("q", (TracedCandidate(9, "length"), TracedCandidate(5))),)),))
    assert replay(Pools(trace), Setting(2), Machine(FLAT)).truncated_share == 0.5
    plan = PruningPlan(2, keep_ratio=0.01, min_survival=0.01, allow_fewer=True, min_labels=1)
    scored = [TracedCandidate(30 - i % 3, "stop", i / 20, float(i % 2)) for i in range(20)]
    steps = TracedRollout((TracedPrompt("q", tuple(scored)),))
    outcome = replay(Pools(Trace((steps, steps))), Setting(8, 12, early_stop=False, pruning=plan), Machine(FLAT))
    assert 12 < outcome.num_pruned < 20  # of the second rollout
    assert outcome.incomplete_share == 0.5
    assert len(outcome.returned_lengths) == 8 + 20 - outcome.num_pruned


def test_groups_go_to_the_rank_with_the_fewest_candidates():
    races = [Race(str(size), GroupPlan(size), pool(*range(1, size + 1))) for size in (8, 4, 3, 2, 2)]
    places = Places(Machine(num_ranks=2))
    for expected in ([[8, 2], [4, 3, 2]], [[4, 3, 2], [8, 2]]):  # no group is left, and the other rank has its turn
        assert [[race.plan.group_size for race in rank] for rank in assigned(races, places)] == expected


def test_what_was_seen_of_lengths_places_the_next_rollout_better():
    step = {"a": [90, 90], "b": [10, 10], "c": [90, 90], "d": [10, 10]}
    seconds = replay(Pools(traced(step, step)), Setting(2), Machine(LINEAR, num_ranks=2)).seconds
    both_long = 4 * 90
    assert seconds == both_long + 4 * 10 + 2 * 80


def test_a_rollout_takes_its_slowest_rank():
    trace = traced({"a": [4, 4], "b": [6, 6], "c": [10, 10]})
    outcome = replay(Pools(trace), Setting(2), Machine(LINEAR, num_ranks=2))
    assert outcome.seconds == max(4 * 4 + 6 * 2, 6 * 2)
    one = replay(Pools(trace), Setting(2), Machine(LINEAR))
    assert one.seconds == 4 * 6 + 2 * 4 + 4 * 2


def test_redundancy_auto_gives_more_to_prompts_that_spread():
    step = {"even": [20] * 8, "wild": [2, 4, 8, 16, 32, 64, 90, 100], "mild": [18, 19, 20, 21, 22, 20, 20, 20]}
    outcome = replay(Pools(traced(step, step)), Setting(4, "auto", "dual_end"), Machine(None))
    assert outcome.num_without_history == 3
    assert outcome.upper_bound_share == 1 / 6
    assert outcome.candidates_per_prompt == 6


def test_redundancy_auto_knows_how_many_have_places():
    step = {str(number): [70, 80, 90, 100, 110, 120, 130, 140] for number in range(24)}

    def candidates_of(setting: Setting, cost: CostModel = LINEAR, **machine: int) -> float:
        return replay(Pools(traced(step, step, step)), setting, Machine(cost, **machine)).candidates_per_prompt

    auto = Setting(4, "auto", order="prompts")
    unseen, alike = 6, 4
    assert candidates_of(auto, max_num_seqs=8) == (unseen + 2 * alike) / 3
    assert candidates_of(auto, max_num_seqs=8, num_ranks=24) > 4, "here all have places"
    waits_for_all = Setting(4, "auto", early_stop=False)
    assert candidates_of(waits_for_all, FLAT) == (unseen + 2 * 8) / 3
    assert candidates_of(waits_for_all, FLAT, max_num_seqs=8) < 6, "a step costs the same, and there are more of them"


def test_pruning_learns_from_the_rewards_of_earlier_rollouts():
    def step(number):
        scored = [(i / 16, float(i >= 8)) for i in range(16)]
        prompt = [TracedCandidate(40 + i, "stop", *scored[(i + number) % 16]) for i in range(16)]
        return TracedRollout((TracedPrompt("q", tuple(prompt)),))

    trace = Trace(tuple(map(step, range(12))))
    plan = PruningPlan(10, min_labels=4)
    setting = Setting(4, 12, early_stop=False, pruning=plan)
    outcome = replay(Pools(trace), setting, Machine(FLAT))
    assert 0 < outcome.num_pruned < outcome.num_candidates
    assert replay(Pools(trace), setting, Machine(FLAT, num_ranks=2)).num_pruned > 0
    shadow = changed(setting, pruning=changed(plan, mode="shadow"))
    assert replay(Pools(trace), shadow, Machine(FLAT)).num_pruned == 0
    first_only = Trace(trace.rollouts[:1])
    assert replay(Pools(first_only), setting, Machine(FLAT)).num_pruned == 0


def test_ranks_learn_from_each_others_rewards():
    def step(names):
        def candidates():
            return tuple(TracedCandidate(40 + i, "stop", i / 16, float(i >= 8)) for i in range(16))

        return TracedRollout(tuple(TracedPrompt(name, candidates()) for name in names))

    # with one group per rollout, rank 0 and rank 1 take turns: labels of one have to reach the other
    trace = Trace(tuple(step(["q"]) for _ in range(4)))
    setting = Setting(16, 4, early_stop=False, pruning=PruningPlan(10, min_labels=16))
    one, two = (replay(Pools(trace), setting, Machine(FLAT, num_ranks=n)).num_pruned for n in (1, 2))
    assert one > 0
    assert two > 0


def test_what_stopped_candidates_would_have_become_is_counted():
    candidates = (TracedCandidate(10), TracedCandidate(12), TracedCandidate(12, "surplus"))
    trace = Trace((TracedRollout((TracedPrompt("q", candidates, max_tokens=50),)),))
    assert replay(Pools(trace), Setting(2, 1), Machine(FLAT)).num_drawn == 0
    waits = replay(Pools(trace), Setting(2, 1, early_stop=False), Machine(FLAT))
    assert waits.num_drawn == 1
    assert replay(Pools(trace), Setting(3, 2), Machine(FLAT)).num_resampled == 2


def test_a_setting_that_no_engine_takes_is_an_error_before_anything_runs():
    pools = Pools(traced({"a": [5]}))
    with pytest.raises(PlanError, match=r"max_num_seqs \(4\), got 8"):
        replay(pools, Setting(8), Machine(FLAT, max_num_seqs=4))
    with pytest.raises(PlanError, match="early_stop: cannot be true with selection dual_end"):
        replay(pools, Setting(4, 4, "dual_end", early_stop=True), Machine(FLAT))


def test_a_candidate_that_no_cache_holds_is_named():
    with pytest.raises(ValueError, match="a candidate of prompt 'a' needs 50 tokens of KV cache, but one rank has 40"):
        replay(Pools(traced({"a": [50]})), Setting(1), Machine(FLAT, kv_capacity_tokens=40))


@pytest.mark.thorough
@settings(max_examples=40)
@given(st.integers(0, 1000), st.sampled_from([1, 2, 3]), st.sampled_from([None, 16, 20]), st.data())
def test_a_replay_is_repeatable_and_no_token_is_lost(seed, num_ranks, slots, data):
    trace = generate(SMALL, seed)
    machine = Machine(DETAILED, num_ranks, slots)
    setting = data.draw(st.sampled_from(default_sweep(4, machine.max_candidates)))
    outcome = replay(Pools(trace, seed), setting, machine, epochs=2)
    assert outcome == replay(Pools(trace, seed), setting, machine, epochs=2)
    assert outcome.generated_tokens == outcome.returned_tokens + outcome.wasted_tokens
    assert outcome.wasted_tokens >= 0
    assert len(outcome.returned_lengths) == 4 * outcome.num_groups == 4 * 6 * 3 * 2
    assert outcome.incomplete_share == 0
    assert 0 <= outcome.bubble < 1


def test_curves_add_up():
    assert summed([[(0.0, 2), (3.0, 1), (5.0, 0)], [(0.0, 4), (3.0, 0)]]) == [(0.0, 6), (3.0, 1), (5.0, 0)]


def test_redundancy_auto_does_not_know_its_own_future():
    trace = traced({"a": [5, 6, 7, 8], "b": [50, 60, 70, 80]})
    outcome = replay(Pools(trace), Setting(2, "auto"), Machine(None))
    assert (outcome.num_without_history, outcome.upper_bound_share) == (2, 0)


def test_nobody_is_given_room_beyond_its_own_limit():
    """As the scheduler admits: the mean length is that of answers which nothing cuts."""
    planner = Planner(Setting(1), Machine(kv_capacity_tokens=1000))
    planner.history.observe("before", [ObservedLength(200, number % 4 > 0) for number in range(40)])
    prompt = SimpleNamespace(id="q", prompt_tokens=1, max_tokens=200, history_key="q")
    race = planner.race(prompt, GroupPlan(1), [PoolCandidate(5, "stop", 5, False, None, None)], "r", 1)
    assert planner.history.mean > race.mean_tokens == 200
