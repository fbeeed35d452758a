"""Random schedules of everything that moves groups, ends them, and keeps ranks empty, in which calls fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from tests.kernel.core.scheduler_runs import assert_nothing_left
from tests.parts.moving.ranked_llm import Cluster
from vllm_rollout.kernel.call_table import CANCEL_GROUPS
from vllm_rollout.kernel.core.calls import answered
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.parts.moving.core.moving import GroupMoves
from vllm_rollout.parts.moving.rules.placement import TRAINER
from vllm_rollout.parts.rounds.calls import CUT_RACE, FORGET_RACE, WIDEN_RACE, WiderRace
from vllm_rollout.parts.rounds.rules.race import RacePlace
from vllm_rollout.parts.rounds.rules.step import PLACE

NUM_SCHEDULES = 6
NUM_EVENTS = 60
MAX_GROUPS = 10
CALLS_THAT_COME_THROUGH = answered().keys() - {"release_group", "adopt_group"}


class Schedule:
    """Draws events, and checks the invariants after each event."""

    def __init__(self, cluster: Cluster, chance: random.Random) -> None:
        self.cluster, self.chance = cluster, chance
        self.lengths: dict[str, list[int]] = {}
        self.process_of: dict[str, int] = {}
        self.calls: list[asyncio.Task[Any]] = []
        failure_rate = chance.choice([0.0, 0.02, 0.2])
        for core in cluster.cores:
            core.fails = lambda what: what not in CALLS_THAT_COME_THROUGH and chance.random() < failure_rate
        self.num_wanted = {"one": 1, "other": 2}
        self.alone = len(cluster.engines) == 1

    def call(self, work: Coroutine[Any, Any, Any]) -> None:
        self.calls.append(asyncio.create_task(work))

    def rank(self) -> int:
        return self.chance.randrange(len(self.cluster.cores))

    def engine(self) -> Any:
        return self.chance.choice(self.cluster.engines)

    # -- what may happen

    def start(self) -> None:
        if len(self.lengths) == MAX_GROUPS:
            return
        chance, group_id, said, pinned_rank = self.chance, f"g{len(self.lengths)}", None, None
        if chance.random() < 0.3:
            race = chance.choice(list(self.num_wanted))
            said = PLACE.value(RacePlace(race, self.num_wanted[race], len(self.lengths)))
        if chance.random() < 0.1:
            pinned_rank = self.rank()
        lengths = self.lengths[group_id] = [chance.randint(3, 90) for _ in range(chance.randint(2, 4))]
        process = self.process_of[group_id] = chance.randrange(len(self.cluster.llms))
        size = chance.randint(1, len(lengths))
        self.cluster.start(group_id, lengths, size, process, said=said, data_parallel_rank=pinned_rank)

    def drain(self) -> None:
        owner = self.chance.choice([TRAINER, "rollout"])
        self.call(self.engine().moves.drain(self.rank(), self.chance.choice([0.0, 3600.0]), owner))

    def restore(self) -> None:
        self.call(self.engine().moves.restore(self.rank(), *self.chance.choice([(), ("rollout",)])))

    def move(self) -> None:
        if self.lengths:
            group_id = self.chance.choice(list(self.lengths))
            self.call(self.cluster.engines[self.process_of[group_id]].moves.move_group(group_id, self.rank()))

    def leave(self) -> None:
        """Cancel a waiting task."""
        if waiting := [task for task in (*self.calls, *self.cluster.readers.values()) if not task.done()]:
            self.chance.choice(waiting).cancel()

    def cancel(self) -> None:
        if self.lengths:
            group_id = self.chance.choice(list(self.lengths))
            engine = self.cluster.engines[self.process_of[group_id]]
            self.call(engine.calls.tell_groups(CANCEL_GROUPS, [group_id]))

    def cut(self) -> None:
        self.call(self.engine().calls.tell_groups(CUT_RACE, self.chance.choice(list(self.num_wanted))))

    def widen(self) -> None:
        race = self.chance.choice(list(self.num_wanted))
        self.num_wanted[race] += 1
        self.call(self.engine().calls.tell_groups(WIDEN_RACE, WiderRace(race, self.num_wanted[race])))

    async def run(self) -> None:
        events = [self.start, self.drain, self.restore, self.move, self.leave, self.cancel, self.cut, self.widen]
        weights = [8, 6, 4, 6, 1, 1, 0.5, 1]
        for _ in range(NUM_EVENTS):
            self.chance.choices(events, weights)[0]()
            for _ in range(self.chance.randint(0, 8)):
                await self.cluster.turn(lambda: self.chance.random() < 0.7)
                self.look()
        for core in self.cluster.cores:
            core.fails = lambda what: False
        await self.cluster.until(lambda: all(task.done() for task in self.calls if not self.waits(task)))
        for rank in range(len(self.cluster.cores)):
            await self.cluster.done(asyncio.create_task(self.cluster.engine.moves.restore(rank)))
        answers = await self.cluster.done(*self.calls)
        for answer in answers:
            if isinstance(answer, RequestError):
                assert answer.status == 409, answer
            elif not isinstance(answer, asyncio.CancelledError):
                assert not isinstance(answer, BaseException), answer
        self.ended(
            dict(zip(self.cluster.readers, await self.cluster.done(*self.cluster.readers.values()), strict=True))
        )
        for engine in self.cluster.engines:
            for race in self.num_wanted:
                await self.cluster.done(asyncio.create_task(engine.calls.tell_groups(FORGET_RACE, race)))
        for _ in range(5):
            await self.cluster.turn()
        self.left_nothing()

    def waits(self, task: asyncio.Task[Any]) -> bool:
        """A drain that waits for groups to end."""
        return task.get_coro().__name__ == "drain"

    # -- what must hold

    def look(self) -> None:
        cluster = self.cluster
        where = [request_id for core in cluster.cores for request_id in core.scheduler.requests]
        assert len(where) == len(set(where)), "a candidate is in two engine cores"
        decides = any(engine.calls.none_moves.locked() for engine in cluster.engines)
        if self.alone or not decides:
            assert len(cluster.held) < len(cluster.cores), "nobody takes groups"
        if self.alone:
            assert cluster.llm.routes.has_open
            if not decides:
                assert cluster.held == sorted(cluster.llm.routes.held)
                assert not any(core.took_while_held for core in cluster.cores), "a held rank took a group"

    def ended(self, answers: dict[str, object]) -> None:
        for group_id, lengths in self.lengths.items():
            answer = answers[group_id]
            if isinstance(answer, VLLMValidationError):  # it named a rank that was drained
                continue
            assert answer is None or isinstance(answer, asyncio.CancelledError), answer
            for index, length in enumerate(lengths):
                ends = self.cluster.ends.get((group_id, index), [])
                assert len(ends) == 1 or (answer is not None and not ends), f"{group_id}-{index} ended as {ends}"
                said = self.cluster.said.get((group_id, index), [])
                own = self.cluster.cores[0].run.own_tokens(f"{group_id}-c{index}-internal", len(said)) if said else []
                assert said[: length - 1] == own[: length - 1]
                assert ends != ["finished"] or len(said) == length

    def left_nothing(self) -> None:
        for core in self.cluster.cores:
            assert_nothing_left(core.run)
            assert core.scheduler.part(GroupMoves)._stopped == core.scheduler.part(GroupMoves)._adopted == {}
        for llm in self.cluster.llms:
            assert not llm.reqs_in_flight
            assert llm.routes.ranks.num_candidates == [0] * len(self.cluster.cores)


@pytest.mark.thorough
@pytest.mark.anyio
@pytest.mark.parametrize("num_api_processes", [1, 2])
@pytest.mark.parametrize("seed", range(NUM_SCHEDULES))
async def test_whatever_happens_each_candidate_is_in_one_place_and_ends_once(new_cluster, seed, num_api_processes):
    chance = random.Random(seed)
    await Schedule(new_cluster(chance.randint(2, 4), num_api_processes), chance).run()
