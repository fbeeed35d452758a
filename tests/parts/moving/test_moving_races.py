"""Groups of a race that move between two schedulers, and races that change while a group is on its way."""

from __future__ import annotations

import asyncio

import pytest

from tests.kernel.core.scheduler_runs import add_group
from tests.parts.moving.test_failing_moves import LENGTHS, SAID, in_a_parcel
from tests.parts.rounds.steps import races_of
from vllm_rollout.parts.rounds.calls import CUT_RACE, FORGET_RACE, WIDEN_RACE, WiderRace
from vllm_rollout.parts.rounds.rules.race import RacePlace
from vllm_rollout.parts.rounds.rules.step import PLACE


def test_a_group_takes_its_place_in_a_race_along(new_ranks):
    ranks = new_ranks()
    for position, lengths in enumerate([[50, 60], [30, 30], [90, 90]]):
        run = ranks.runs[position % 2]
        add_group(run, f"g{position}", lengths, group_size=2, said=PLACE.value(RacePlace("round", 2, position)))
    ranks.until("g0-0", 20)
    ranks.move("g0")
    ranks.move("g1", source=1, epoch=2)
    ranks.move("g1", source=0, epoch=3)
    ranks.run()
    states = ranks.runs[0].states()
    assert states["g0-0"] == states["g1-0"] == "finished"
    assert states["g2-0"] == "finished"  # alone in its race on rank 0: who counts over ranks is the API process
    for run in ranks.runs:
        assert races_of(run.scheduler)._race_of == {}


async def test_a_race_that_becomes_wider_reaches_a_group_on_its_way(new_cluster):
    cluster = new_cluster()
    moving = await in_a_parcel(cluster, said=PLACE.value(RacePlace("round", 1, 0)))
    widening = asyncio.create_task(cluster.engine.calls.tell_groups(WIDEN_RACE, WiderRace("round", 2)))
    (move, _) = await cluster.done(moving, widening)
    assert move.outcome == "moved"
    (rank,) = cluster.cores_of("g")
    cluster.start("h", [3, 3], 2, data_parallel_rank=rank, said=PLACE.value(RacePlace("round", 1, 1)))
    await cluster.done(*cluster.readers.values())
    assert cluster.ends["g", 0] == ["finished"]  # the race was not over with the other group


@pytest.mark.thorough
async def test_a_race_that_is_made_wider_after_its_cut_stays_open(new_cluster):
    """Both have to wait for a group that moves."""
    cluster = new_cluster()
    moving = await in_a_parcel(cluster)
    cutting = asyncio.create_task(cluster.engine.calls.tell_groups(CUT_RACE, "round"))
    await cluster.turn()
    widening = asyncio.create_task(cluster.engine.calls.tell_groups(WIDEN_RACE, WiderRace("round", 2)))
    await cluster.done(moving, cutting, widening)
    cluster.start("h", [3, 3], 2, said=PLACE.value(RacePlace("round", 2, 1)))
    await cluster.done(*cluster.readers.values())
    assert cluster.ends["h", 0] == cluster.ends["h", 1] == ["finished"]


async def test_a_candidate_that_is_launched_after_its_race_was_cut_does_not_run(new_cluster):
    """It was on its way when the others were told."""
    cluster = new_cluster()
    await cluster.done(asyncio.create_task(cluster.engine.calls.tell_groups(CUT_RACE, "round")))
    cluster.start("g", LENGTHS, 2, said=PLACE.value(RacePlace("round", 1, 0)))
    await cluster.done(*cluster.readers.values())
    assert cluster.ends == {candidate: ["deferred"] for candidate in SAID}
    assert all(len(said) <= 2 for said in cluster.said.values())
    await cluster.done(asyncio.create_task(cluster.engine.calls.tell_groups(FORGET_RACE, "round")))
    assert all(len(races_of(core.scheduler)) == 0 for core in cluster.cores)
