"""Groups of a round that are complete while others of it run: written as they end, they outlive whoever runs the round.

Invariant: a round that is taken up again returns what it had told of them, as long as the weights are the same.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TypeVar

from pydantic import BaseModel

from vllm_rollout.background import spawn, survived
from vllm_rollout.server.answers import CandidateEvent, Event, GroupAnswer, GroupEvent, GroupSummary, TrajectoryEvent
from vllm_rollout.server.engine import RequestError
from vllm_rollout.server.runs.stored import EndedGroup, PlannedRound

logger = logging.getLogger("vllm.vllm_rollout")

Group = TypeVar("Group", bound=BaseModel)
Write = Callable[[Mapping[int, EndedGroup]], Awaitable[None]]
"""Groups by the numbers of their entries."""


class EndedGroups:
    """Writes groups of one round, those that end meanwhile together."""

    def __init__(self, write: Write, version: str | None) -> None:
        self._write = write
        self.version = version
        """The version of the weights with which the round began."""
        self._waiting: dict[int, bytes] = {}
        self._writing: asyncio.Task[None] | None = None

    def add(self, number: int, json: bytes) -> None:
        self._waiting[number] = json
        if self._writing is None or self._writing.done():
            self._writing = spawn(self._write_all(), "groups of a round")

    async def written(self) -> None:
        """What was added so far is on disk, or could not be written."""
        if self._writing is not None:
            await self._writing

    async def _write_all(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, {}
            with survived("groups of a round"):  # it goes on; after a kill these run anew
                rows = await asyncio.to_thread(self._rows, waiting)
                try:
                    await self._write(rows)
                except RequestError as error:
                    logger.warning("%d groups of a round are not on disk before its end: %s", len(rows), error)

    def _rows(self, groups: Mapping[int, bytes]) -> dict[int, EndedGroup]:
        return {number: EndedGroup(self.version, zlib.compress(json, 1)) for number, json in groups.items()}


def ended_before(planned: PlannedRound, version: str | None, kind: type[Group]) -> dict[int, Group]:
    """Groups that need not run again, by position.

    Args:
        version: of the weights now.
        kind: how groups of such a round are written. What cannot be read runs anew.
    """
    found: dict[int, Group] = {}
    for position, entry in enumerate(planned.opened.all_entries):
        row = planned.ended.get(entry.number)
        if row is None or row.version != version:
            continue
        try:
            found[position] = kind.model_validate_json(zlib.decompress(row.body))
        except (ValueError, TypeError, zlib.error) as error:
            logger.warning("prompt %r runs anew: its group cannot be read from disk (%s)", entry.prompt_id, error)
    return found


def events_of(group: GroupAnswer) -> Iterator[Event]:
    """The events that a stream has had of it; no `tokens`: they are in the trajectories."""
    name = {"prompt_id": group.prompt_id, "group_id": group.group_id}
    for trajectory in group.trajectories:
        yield TrajectoryEvent(**name, trajectory=trajectory)
    for candidate in group.candidates:
        yield CandidateEvent(**name, candidate=candidate)
    over = {name: value for name, value in vars(group).items() if name in GroupSummary.model_fields}
    yield GroupEvent(**over, selected=[trajectory.index for trajectory in group.trajectories])
