from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parts.pruning.steps import assessments, pruned_by, steps_of
from tests.tools.simulator.round_by_step import StepEngine
from tests.tools.simulator.traces import DETAILED, FLAT, LINEAR, future, pool, run_rank, scored, warm_judge
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.pruning.rules.judge import Judge
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan
from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve, computed_prompt_tokens, rollout_time
from vllm_rollout.parts.shaping.rules.history import observed_lengths
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.race import Race

WAITS = {"early_stop": False}


def states(race):
    return [ending.state for ending in race.endings]


def num_tokens(race):
    return [ending.num_tokens for ending in race.endings]


def test_a_group_takes_what_equation_4_says():
    race = Race("q", GroupPlan(4, **WAITS), pool(10, 3, 7, 3))
    curve = PTLCurve((1, 2, 3, 4), (1.0, 1.5, 1.75, 4.0))
    run = run_rank(Machine(CostModel(((0.0, curve),))), [race])
    assert run.seconds == 3 * 4.0 + (7 - 3) * 1.5 + (10 - 7) * 1.0
    assert race.over_s == run.seconds
    assert run.curve == [(0.0, 4), (12.0, 2), (18.0, 1), (21.0, 0)]


def test_candidates_that_end_in_one_step_tie():
    race = Race("q", GroupPlan(1, 2), pool(5, 5, 9))
    run_rank(Machine(FLAT), [race])
    assert states(race) == ["finished", "surplus", "surplus"]
    assert num_tokens(race) == [5, 5, 5]
    assert observed_lengths(race.endings) == [(5, False), (5, False), (5, True)]


def test_siblings_share_the_blocks_of_their_prompt():
    cost = CostModel(FLAT.curves, prefill_s_per_token=1.0, step_prefill_s=10.0)
    run = run_rank(Machine(cost, block_size=16), [Race("q", GroupPlan(3, **WAITS), pool(2, 2, 2), prompt_tokens=40)])
    assert run.seconds == 10 + 40 + 8 + 8 + 2
    assert computed_prompt_tokens(40, 3, 16) == 56


def test_a_full_kv_cache_preempts_the_last_admitted_which_keeps_its_tokens_and_its_turn():
    race = Race("q", GroupPlan(3, **WAITS), pool(40, 40, 5))
    run = run_rank(Machine(FLAT, max_num_seqs=2, kv_capacity_tokens=60, block_size=1), [race])
    assert run.num_preemptions == 1
    assert num_tokens(race) == [40, 40, 5]
    assert [ending.end_step for ending in race.endings] == [1, 3, 2]


def test_a_kv_cache_that_holds_everything_changes_nothing():
    runs = []
    for capacity in (None, 2 * (40 + 20) + 2 * 16):
        races = [Race(id, GroupPlan(2, **WAITS), pool(20, 40), prompt_tokens=20) for id in "a"]
        runs.append(run_rank(Machine(LINEAR, kv_capacity_tokens=capacity), races))
    assert runs[0] == runs[1]


def test_a_candidate_without_a_score_is_not_judged():
    plan = PruningPlan(5, min_survival=0.001, allow_fewer=True, min_labels=4)
    race = scored(Race("q", GroupPlan(1, 2, parts=pruned_by(plan)), pool(6, 9, 9)))
    run_rank(Machine(FLAT), [race], warm_judge(5))
    assert (states(race), assessments(race.group)) == (["finished", "surplus", "surplus"], {})


lengths = st.integers(1, 40)


@given(st.lists(st.tuples(lengths, st.integers(0, 40)), min_size=1, max_size=12), st.integers(1, 12))
def test_waiting_for_all_takes_the_time_of_the_cost_model(candidates, slots):
    cost = CostModel(DETAILED.curves, DETAILED.prefill_s_per_token, DETAILED.step_prefill_s, max_num_seqs=slots)
    races = [Race(str(i), GroupPlan(1, **WAITS), pool(length), prompt) for i, (length, prompt) in enumerate(candidates)]
    run = run_rank(Machine(cost), races)
    expected = rollout_time([length for length, _ in candidates], cost, [prompt for _, prompt in candidates])
    assert run.seconds == pytest.approx(expected)


futures = st.builds(future, lengths, st.sampled_from(["stop", "stop", "length"]), st.floats(0, 1))
pruning = st.builds(
    PruningPlan,
    detection_length=st.integers(1, 20),
    keep_ratio=st.sampled_from([0.2, 0.5, 0.9]),
    rule=st.sampled_from(["balance", "paper"]),
    mode=st.sampled_from(["active", "active", "shadow"]),
    allow_fewer=st.booleans(),
    min_labels=st.just(4),
)


@st.composite
def groups(draw):
    group_size, redundancy = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    selection = draw(st.sampled_from(["first", "shortest", "dual_end"]))
    dual_end = selection == "dual_end"
    plan = GroupPlan(
        group_size,
        redundancy,
        early_stop=not dual_end and draw(st.booleans()),
        selection=selection,
        num_longest=1 if dual_end else 0,
        patience=draw(st.sampled_from([None, 1.0, 1.3, 2.0])) if dual_end else None,
    )
    size = plan.num_candidates
    return plan, draw(st.lists(futures, min_size=size, max_size=size)), draw(st.integers(0, 20))


@given(st.lists(groups(), min_size=1, max_size=5), st.integers(1, 12), st.none() | pruning)
def test_a_replay_is_every_single_step(drawn, slots, plan):
    cost = CostModel(DETAILED.curves, DETAILED.prefill_s_per_token, DETAILED.step_prefill_s)
    judges = [warm_judge(plan.detection_length) if plan else Judge() for _ in range(2)]
    slow = StepEngine(cost, slots, steps_of(judges[0]))
    races = []
    for i, (group, candidates, prompt_tokens) in enumerate(drawn):
        scoring = plan and Scoring("rollout", f"q{i}", 7)
        group = replace(group, parts=pruned_by(plan))
        slow.launch(f"q{i}", group, candidates, prompt_tokens, scoring=scoring)
        race = Race(f"q{i}", group, candidates, prompt_tokens)
        races.append(scored(race, 7) if plan else race)
    over_s = {}
    while slow.begins < inf:
        slow.begin(slow.begins)
        end_s = slow.end_s
        over_s |= {name: end_s for name, _, _ in slow.end()[1]}
    # prompts shorter than a block share nothing: the step-by-step engine knows no prefix cache
    run = run_rank(Machine(cost, max_num_seqs=slots, block_size=64), races, judges[1])
    for race in races:
        its = [candidate for candidate in slow.candidates if candidate.id.group_id == race.prompt_id]
        assert race.endings == tuple(candidate.ending for candidate in its)
        assert assessments(race.group) == assessments(its[0].group)
        assert race.over_s == pytest.approx(over_s[race.prompt_id])
    assert run.seconds == pytest.approx(end_s)


@given(st.lists(groups(), min_size=1, max_size=5))
def test_early_stop_is_never_slower_where_larger_batches_take_longer(drawn):
    seconds = []
    for early_stop in (True, False):
        races = [
            Race(str(i), GroupPlan(plan.group_size, plan.redundancy, early_stop), candidates)
            for i, (plan, candidates, _) in enumerate(drawn)
        ]
        seconds.append(run_rank(Machine(LINEAR), races).seconds)
    assert seconds[0] <= seconds[1]


@given(st.lists(groups(), min_size=1, max_size=5), st.integers(80, 200), st.integers(1, 8))
def test_preemption_loses_nothing(drawn, capacity, slots):
    def race(i, plan, candidates, prompt_tokens):
        return Race(str(i), GroupPlan(plan.group_size, plan.redundancy, False), candidates, prompt_tokens)

    races = [race(i, *group) for i, group in enumerate(drawn)]
    run = run_rank(Machine(LINEAR, max_num_seqs=slots, kv_capacity_tokens=capacity), races)
    assert [num_tokens(race) for race in races] == [[c.num_tokens for c in candidates] for _, candidates, _ in drawn]
    assert run.seconds == sum(c.num_tokens for _, candidates, _ in drawn for c in candidates)
