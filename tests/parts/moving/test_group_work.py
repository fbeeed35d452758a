"""The rank of a group by predicted work, as groups of a server run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.kernel.api.stepped_llm import SteppedLLM, let_everybody_run
from tests.kernel.core.scheduler_runs import TracedRun, assert_nothing_left
from tests.parts.moving.ranked_llm import Cluster
from tests.support.work import faster_than_linear
from vllm_rollout.kernel.api.group_routes import GroupRoutes
from vllm_rollout.kernel.http.engine import Outlook
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.moving.rules.placement import PredictedRanks, work_of
from vllm_rollout.parts.moving.rules.work import TokenCost
from vllm_rollout.parts.shaping.api.lengths import EngineShaping
from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve
from vllm_rollout.parts.shaping.rules.moments import LengthMoments, expected_remaining

pytestmark = pytest.mark.anyio

LENGTHS = LengthMoments(100.0, 2500.0, 4)


def outlook(mean: float = 100.0) -> Outlook:
    return Outlook(LengthMoments(mean, 2500.0, 4), 10, 4000)


def fresh(num_candidates: int) -> dict[int, int]:
    return dict.fromkeys(range(num_candidates), 0)


def remaining(*num_tokens: int) -> int:
    return round(sum(expected_remaining(num, LENGTHS, 4000) for num in num_tokens))


def test_a_group_counts_what_its_candidates_have_to_do_until_they_end() -> None:
    placement = PredictedRanks(2)
    routes = GroupRoutes(placement)
    route = routes.open("q", fresh(4), outlook=outlook())
    assert (route.rank, placement.loads) == (0, [remaining(0, 0, 0, 0), 0])
    routes.ended(route, 2, 30)
    assert placement.loads == [remaining(30, 30, 30), 0]
    routes.ended(route, 0, 20)  # stopped in a later step than it would seem: its siblings are not younger for it
    assert placement.loads == [remaining(30, 30), 0]
    routes.arrived(route, 1)
    assert placement.loads == [0, remaining(30, 30)]
    routes.ended(route, 1, 250)
    assert (route.placed.num_left, placement.loads) == (1, [0, remaining(250)])
    routes.close(route)
    assert (placement.loads, placement.num_candidates) == ([0, 0], [0, 0])


def test_a_group_that_is_over_before_it_arrives_counts_nowhere() -> None:
    placement = PredictedRanks(2)
    routes = GroupRoutes(placement)
    route = routes.open("q", fresh(4), outlook=outlook())
    routes.close(route)
    routes.arrived(route, 1)
    assert (placement.loads, placement.num_candidates) == ([0, 0], [0, 0])


def test_candidates_that_go_on_or_come_late_have_ages_of_their_own() -> None:
    placement = PredictedRanks(2)
    routes = GroupRoutes(placement)
    route = routes.open("q", {0: 0, 3: 200}, outlook=outlook())
    assert placement.loads[0] == remaining(0, 200)
    routes.ended(route, 0, 40)
    assert placement.loads[0] == remaining(240)
    routes.begins(route, 4)
    assert placement.loads[0] == remaining(240, 0)
    routes.ended(route, 4, 15)
    assert placement.loads[0] == remaining(255)


def test_a_long_group_outweighs_several_short_ones() -> None:
    routes = GroupRoutes(PredictedRanks(2))
    means = [1000.0, 100.0, 100.0, 100.0, 1000.0]
    assert [routes.open(f"q{i}", fresh(4), outlook=outlook(mean)).rank for i, mean in enumerate(means)] == [
        0,
        1,
        1,
        1,
        1,
    ]


def test_a_profile_says_what_contexts_weigh() -> None:
    """Ten candidates of 100 tokens cost less than one of 1,000 where reading contexts is what costs."""
    curves = [(context, PTLCurve((1.0, 101.0), (1.0, seconds))) for context, seconds in ((0.0, 1.0), (1000.0, 3.0))]
    ranks = {}
    for weighed in (False, True):
        routes = GroupRoutes(PredictedRanks(2))
        if weighed:
            routes.ranks.token_cost = TokenCost.of(CostModel(tuple(curves)))
        routes.open("long", fresh(1), 0, outlook(1000.0))
        routes.open("many", fresh(12), 1, outlook(100.0))
        ranks[weighed] = routes.open("next", fresh(1), outlook=outlook()).rank
    assert ranks == {False: 0, True: 1}


async def test_loads_fall_while_a_group_runs(new_run: Callable[..., TracedRun]) -> None:
    llm = SteppedLLM(new_run(), num_ranks=2)
    plan = GroupPlan(4)
    loads: list[list[float]] = []

    async def rollout(name: str, lengths: list[int]) -> None:
        params = SamplingParams(max_tokens=4000, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        stream = llm.run_candidates(name, plan, lengths, params, outlook=outlook())
        async with aclosing(stream) as outputs:
            async for _ in outputs:
                loads.append(llm.routes.ranks.loads)

    tasks = [asyncio.create_task(rollout(name, [5, 9, 30, 60])) for name in "ab"]
    await let_everybody_run()
    assert llm.routes.ranks.loads == [remaining(0, 0, 0, 0)] * 2
    await llm.step_to_the_end()
    await asyncio.gather(*tasks)
    assert {rank for _, rank in llm.added.values()} == {0, 1}
    assert max(loads[-1]) < remaining(0, 0)
    assert llm.routes.ranks.loads == [0, 0]
    assert_nothing_left(llm.run)


@pytest.mark.parametrize("known", [outlook(), None])
@pytest.mark.parametrize("resumed", [False, True])
def test_the_ends_of_thousands_of_candidates_take_work_by_their_number(known, resumed):
    def play(num: int) -> None:
        placement = PredictedRanks(2)
        routes = GroupRoutes(placement)
        begun = {index: index if resumed else 0 for index in range(num)}
        route = routes.open("g", begun, outlook=known)
        for index in range(num):
            routes.ended(route, index, 10)
            assert placement.num_candidates[route.rank] == num - index - 1
        routes.close(route)

    assert faster_than_linear(play, 128, 2048) == {}


def test_what_is_left_of_a_large_group_is_predicted_closely():
    routes = GroupRoutes(PredictedRanks(1))
    route = routes.open("g", fresh(1024), outlook=outlook())
    for index in range(1023):
        routes.ended(route, index, index // 10)
        group = route.placed
        exact = work_of([group._age] * group.num_left, route.outlook).tokens
        assert abs(group.work.tokens - exact) <= 0.1 * exact + 200


async def test_ranks_use_the_costs_that_another_part_learns(new_cluster: Callable[..., Cluster]) -> None:
    cluster = new_cluster()
    cost = CostModel(((0.0, PTLCurve((1.0, 101.0), (1.0, 2.0))),))
    cluster.engine.part(EngineShaping)._weigh(cost)
    assert cluster.llm.routes.ranks.token_cost == TokenCost.of(cluster.engine.part(EngineShaping).cost_model)
    assert cluster.llm.routes.ranks.token_cost != TokenCost()
