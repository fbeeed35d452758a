"""Groups that move between ranks: what it costs, what it frees, and that nothing else changes."""

from collections import Counter
from dataclasses import replace
from itertools import chain
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parts.pruning.steps import pruned_by
from tests.tools.simulator.traces import DETAILED, FLAT, LINEAR, future, pool, scored, traced
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.moving.rules.load import TransferCost
from vllm_rollout.parts.moving.simulated import run_fleet
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan
from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve
from vllm_rollout.parts.shaping.rules.trace import Trace, TracedCandidate, TracedPrompt, TracedRollout
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.race import Pools, Race
from vllm_rollout.simulator.rank import new_steps, run_races
from vllm_rollout.simulator.replay import replay
from vllm_rollout.simulator.settings import Setting

WAITS = {"early_stop": False}
WITH_PREFILL = CostModel(FLAT.curves, prefill_s_per_token=0.001)
DECODING = CostModel(((0.0, PTLCurve((1.0, 64.0), (1.0, 1.5))),), prefill_s_per_token=0.002, step_prefill_s=0.5)


def race(*lengths: int, prompt: int = 0, **fields) -> Race:
    return Race("q", GroupPlan(len(lengths), **WAITS), pool(*lengths), prompt, **fields)


def run(cost, ranks, **machine):
    return run_fleet(Machine(cost, len(ranks), **machine), [new_steps() for _ in ranks], ranks)


def num_tokens(race):
    return [ending.num_tokens for ending in race.endings]


def heavy_tail(seed: int, num_groups: int, num_ranks: int) -> list[list[Race]]:
    chance = Random(seed)
    ranks = [[] for _ in range(num_ranks)]
    for number in range(num_groups):
        lengths = [min(4000, round(chance.lognormvariate(5, 1))) for _ in range(4)]
        ranks[number % num_ranks].append(race(*lengths, prompt=chance.randrange(100), max_tokens=4000))
    return ranks


def test_a_group_goes_on_at_its_target_after_the_prefill_of_its_tokens():
    short, long, other = race(10), race(100), race(60)
    its = run(WITH_PREFILL, [[short, long], [other]], migration="consolidate")
    # At 10 s both long ones are expected to have 10 tokens to come; 10 tokens are computed again in 0.01 s.
    assert (short.over_s, other.over_s, long.over_s) == (10, pytest.approx(60.01), pytest.approx(100.01))
    assert [rank.seconds for rank in its.ranks] == [10, pytest.approx(100.01)]
    assert (its.num_moves, its.freed_rank_s) == (1, pytest.approx(90.01))
    assert [num_tokens(group) for group in (short, long, other)] == [[10], [100], [60]]


def test_a_group_leaves_a_rank_that_lags_for_an_idle_one():
    groups = [race(40, 40), race(40, 40)]
    its = run(LINEAR, [[*groups, race(1)], [race(1)]], migration="spread")
    stays = run(LINEAR, [[race(40, 40), race(40, 40), race(1)], [race(1)]])
    assert stays.seconds == 5 + 39 * 4
    # The first rank's step of five ends at 5 s. There are 39 steps of two left, on either rank.
    assert (its.num_moves, its.seconds, its.freed_rank_s) == (1, 5 + 39 * 2, 0)


def test_half_of_the_ranks_are_freed_and_take_nothing_more():
    ranks = [[race(10, 100), race(10, 100)] for _ in range(4)]
    its = run(FLAT, ranks, scale_down="auto", kv_capacity_tokens=440)
    assert its.num_moves == 4
    assert [rank.seconds for rank in its.ranks] == [10, 10, 100, 100]
    assert its.freed_rank_s == 180


def test_what_was_freed_does_not_relieve_a_rank_that_lags_later():
    # At 20 steps two candidates are left on the second rank: without the other they take twice as long.
    ranks = [[race(2, 20, 40)], [race(2, 20, 40)]]
    its = run(LINEAR, ranks, scale_down="auto", migration="spread")
    assert (its.num_moves, its.ranks[0].seconds) == (1, 2 * 3)
    assert its.seconds == 2 * 3 + 18 * 4 + 20 * 2


def test_no_rank_is_freed_while_the_others_lack_the_room():
    # 50 % of the responses, 8 candidates of 10 tokens: a peak of 160 tokens, and later it is too late.
    its = run(FLAT, [[race(10, 100), race(10, 100)] for _ in range(4)], scale_down="auto", kv_capacity_tokens=79)
    assert (its.num_moves, its.freed_rank_s) == (0, 0)


@pytest.mark.parametrize("cost", [FLAT, DECODING])
@pytest.mark.parametrize("moves", [{"migration": "consolidate"}, {"scale_down": "auto"}, {"migration": "auto"}])
def test_a_heavy_tail_frees_ranks_and_every_candidate_gets_its_tokens(cost, moves):
    ranks, same = heavy_tail(3, 32, 4), heavy_tail(3, 32, 4)
    its, stays = run(cost, ranks, **moves), run(cost, same)
    assert its.num_moves > 0
    assert its.freed_rank_s > 0
    assert sum(rank.seconds for rank in its.ranks) < sum(rank.seconds for rank in stays.ranks)
    for moved, stayed in zip(chain(*ranks), chain(*same), strict=True):
        assert num_tokens(moved) == num_tokens(stayed) == [candidate.num_tokens for candidate in moved.pool]


@given(st.integers(0, 1000), st.integers(1, 4))
def test_as_long_as_nothing_moves_ranks_run_as_they_do_alone(seed, num_ranks):
    ranks = heavy_tail(seed, 8, num_ranks)
    its = run(LINEAR, ranks, migration="consolidate", max_num_seqs=5)  # every candidate costs its time: nothing pays
    assert its.num_moves == 0
    machine = Machine(LINEAR, max_num_seqs=5)
    assert its.ranks == [run_races(machine, own) for own in heavy_tail(seed, 8, num_ranks)]


@given(
    st.integers(0, 10**6),
    st.sampled_from([{"migration": "auto"}, {"migration": "auto", "scale_down": "auto"}, {"migration": "spread"}]),
    st.sampled_from([FLAT, LINEAR, DETAILED, DECODING]),
    st.none() | st.integers(2, 6),
    st.none() | st.integers(150, 600),
)
def test_every_candidate_ends_once_wherever_its_group_goes(seed, moves, cost, slots, capacity):
    chance = Random(seed)
    plan = PruningPlan(5, min_survival=0.2, allow_fewer=True, min_labels=4)
    ranks = []
    for number in range(3):
        ranks.append([])
        for position in range(chance.randrange(6)):
            kind = chance.randrange(4)
            futures = [future(chance.randrange(1, 90), chance.choice(("stop", "length"))) for _ in range(4)]
            if kind == 0:
                its = Race("q", GroupPlan(4, **WAITS), futures, 20)
            elif kind == 1:
                its = Race("q", GroupPlan(2, 2), futures, 20)
            elif kind == 2:
                its = Race("q", GroupPlan(2, 2, False, "dual_end", 1, patience=1.5), futures, 20)
            else:
                known = [one._replace(score=chance.random()) for one in futures]
                its = scored(Race(f"{number}-{position}", GroupPlan(2, 2, parts=pruned_by(plan)), known, 20))
            ranks[-1].append(its)
    run(cost, ranks, max_num_seqs=slots, kv_capacity_tokens=capacity, **moves)
    for its in chain(*ranks):
        assert Counter(ending.state for ending in its.endings)["running"] == 0
        for ending, its_future in zip(its.endings, its.pool, strict=True):
            assert ending.num_tokens <= its_future.num_tokens
            if not its.plan.early_stop and its.plan.patience is None:
                assert ending.num_tokens == its_future.num_tokens


def test_a_replay_says_what_moved_and_returns_the_same():
    chance = Random(1)
    trace = traced(
        *({str(i): [round(chance.lognormvariate(5, 1)) + 1 for _ in range(4)] for i in range(16)} for _ in range(2))
    )
    machine = Machine(DECODING, 4, migration="consolidate", scale_down="auto")
    moved, stayed = (replay(Pools(trace), Setting(4), its) for its in (machine, machine.without_moves))
    assert (stayed.num_moves, stayed.freed_rank_s) == (0, 0)
    assert moved.num_moves > 0
    assert 0 < moved.freed_share <= 1 - moved.busy_share + 1e-9
    assert moved.busy_rank_s < stayed.busy_rank_s
    assert moved.returned_lengths == stayed.returned_lengths


def test_rewards_of_a_group_that_moved_are_all_learned_from():
    def candidates():
        return tuple(TracedCandidate(12 + i if i < 14 else 300, "stop", i / 16, float(i % 2)) for i in range(16))

    step = TracedRollout((TracedPrompt("a", candidates()), TracedPrompt("b", candidates())))
    machine = Machine(FLAT, 2, migration="consolidate")
    setting = Setting(16, early_stop=False, pruning=PruningPlan(10, min_labels=16, allow_fewer=True))
    first = replay(Pools(Trace((step,))), setting, machine)
    assert (first.num_moves, first.num_pruned) == (1, 0)
    assert replay(Pools(Trace((step, step))), setting, machine).num_pruned > 0  # it takes all 16 labels of either kind
    one_more = replace(setting, pruning=replace(setting.pruning, min_labels=17))
    assert replay(Pools(Trace((step, step))), one_more, machine).num_pruned == 0


def test_a_move_pays_with_kv_that_is_too_dear_without():
    def ranks():
        return [[race(10), race(200, prompt=400)], [race(160, prompt=400)]]

    cost = CostModel(FLAT.curves, prefill_s_per_token=0.01)
    stays = run(cost, ranks())
    assert run(cost, ranks(), migration="consolidate").num_moves == 0  # 4.1 s for the 10 s that are expected
    its = run(cost, ranks(), migration="consolidate", transfer=TransferCost(0.001, block_size=16))
    # All but half a block of 410 tokens comes along, and both wait for it.
    assert (its.num_moves, its.seconds) == (1, pytest.approx(stays.seconds + 402 * 0.001 + 8 * 0.01))


def test_preempted_candidates_compute_what_had_come_along():
    ranks = heavy_tail(3, 32, 4)
    its = run(DECODING, ranks, migration="consolidate", transfer=TransferCost(1e-4, 16), kv_capacity_tokens=6000)
    assert its.num_moves > 0
    for group in chain(*ranks):
        assert num_tokens(group) == [candidate.num_tokens for candidate in group.pool]
        assert all(runner.num_behind_kv is None for runner in group.candidates)
