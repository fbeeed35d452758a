"""Candidates of one group whose grades decide how many there are. Invariant: an index is launched once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Collection, Sequence, Set
from contextlib import aclosing
from dataclasses import replace
from itertools import count

from vllm_rollout.server.engine import Beginnings, Engine, GroupOrder, Happening
from vllm_rollout.server.launch import Places


class LaunchedCandidates:
    """Launches further candidates of a group, and stops some."""

    def __init__(self, engine: Engine, order: GroupOrder, places: Places, waves: set[str]) -> None:
        """`order`: of the candidates that the group begins with. `waves`: the set to which the engine's names of
        later candidates are added."""
        self._engine = engine
        self._order = order
        self._places = places
        self._waves = waves
        self._numbers = count(1)
        self._wave_of: dict[int, str] = {}
        """The engine's name of the wave of each later candidate, by index."""

    async def more(self, indices: Sequence[int]) -> AsyncGenerator[Happening, None]:
        """Launch new candidates of the same prompt. To the engine they are a group of their own, in which no
        candidate waits for another."""
        await self._places.take_more(len(indices))
        name = f"{self._order.group_id}+{next(self._numbers)}"
        self._waves.add(name)
        self._wave_of.update(dict.fromkeys(indices, name))
        plan = replace(self._order.plan, group_size=len(indices), redundancy=0, early_stop=False, patience=None)
        beginnings = Beginnings(dict.fromkeys(indices, ()), max(indices) + 1)
        # A race that counts its groups counts this one by the candidates that it began with.
        place = self._order.place
        place = place if place is not None and place.num_wanted is None else None
        order = replace(self._order, group_id=name, plan=plan, place=place, beginnings=beginnings)
        async with aclosing(self._engine.run_group(order)) as happenings:
            async for happening in happenings:
                yield happening
        self._waves.discard(name)

    @property
    def stream_tokens(self) -> bool:
        """True if tokens are streamed while candidates run."""
        return self._order.stream_tokens is not None

    @property
    def launched_later(self) -> Set[int]:
        return self._wave_of.keys()

    async def stop(self, indices: Collection[int]) -> None:
        """Stop candidates: those that run end as `surplus`."""
        by_wave: dict[str, list[int]] = defaultdict(list)
        for index in indices:
            by_wave[self._wave_of.get(index, self._order.group_id)].append(index)
        await self._engine.give_up(by_wave)
