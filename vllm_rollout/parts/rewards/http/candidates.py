"""Candidates of one group that take the place of void ones. Invariant: an index is launched once."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import count

from vllm_rollout.kernel.http.engine import Beginnings, Engine, Happening
from vllm_rollout.kernel.http.plan_port import GroupRecord


class LaunchedCandidates:
    """Launches further candidates of a group."""

    def __init__(self, engine: Engine, group: GroupRecord, waves: set[str]) -> None:
        """`waves`: the set to which the engine's names of later candidates are added."""
        self._engine = engine
        self._group = group
        self._waves = waves
        self._numbers = count(1)

    async def more(self, indices: Sequence[int]) -> AsyncGenerator[Happening, None]:
        """Launch new candidates of the same prompt. To the engine they are a group of their own, in which no
        candidate waits for another."""
        await self._group.places.take_more(len(indices))
        begun = self._group.order
        name = f"{begun.group_id}+{next(self._numbers)}"
        self._waves.add(name)
        plan = replace(begun.plan, group_size=len(indices), redundancy=0, early_stop=False, patience=None)
        beginnings = Beginnings(dict.fromkeys(indices, ()), max(indices) + 1)
        # A race counts this group by the candidates that it began with.
        order = replace(begun, group_id=name, plan=plan, said_once={}, beginnings=beginnings)
        async with aclosing(self._engine.run_group(order)) as happenings:
            async for happening in happenings:
                yield happening
        self._waves.discard(name)
