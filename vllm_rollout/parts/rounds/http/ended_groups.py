"""Groups of a round that are complete while others run. They are written as they end, so they survive the process
that runs the round.

Invariant: a round that is taken up again returns these groups as they were sent, as long as the weights are the same.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TypeVar

from pydantic import BaseModel

from vllm_rollout.background import spawn, survived
from vllm_rollout.kernel.http.answers import (
    CandidateEvent,
    Event,
    GroupAnswer,
    GroupEvent,
    GroupSummary,
    TrajectoryEvent,
)
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.parts.rounds.http.stored import EndedGroup, PlannedRound

logger = logging.getLogger("vllm.vllm_rollout")

Group = TypeVar("Group", bound=BaseModel)
Write = Callable[[Mapping[int, EndedGroup]], Awaitable[None]]
"""Writes finished groups, given by the numbers of their entries."""


class EndedGroups:
    """Writes finished groups of one round. Groups that end during a write are written together."""

    def __init__(self, write: Write, version: str | None) -> None:
        self._write = write
        self.version = version
        """Version of the weights with which the round began."""
        self._waiting: dict[int, bytes] = {}
        self._writing: asyncio.Task[None] | None = None

    def add(self, number: int, json: bytes) -> None:
        self._waiting[number] = json
        if self._writing is None or self._writing.done():
            self._writing = spawn(self._write_all(), "groups of a round")

    async def written(self) -> None:
        """Wait until the groups added so far are on disk, or could not be written."""
        if self._writing is not None:
            await self._writing

    async def _write_all(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, {}
            with survived("groups of a round"):  # the round goes on, and after a kill these run anew
                rows = await asyncio.to_thread(self._rows, waiting)
                try:
                    await self._write(rows)
                except RequestError as error:
                    logger.warning("%d groups of a round are not on disk before its end: %s", len(rows), error)

    def _rows(self, groups: Mapping[int, bytes]) -> dict[int, EndedGroup]:
        return {number: EndedGroup(self.version, zlib.compress(json, 1)) for number, json in groups.items()}


def ended_before(planned: PlannedRound, version: str | None, kind: type[Group]) -> dict[int, Group]:
    """Finished groups that need not run again, by position.

    Args:
        version: of the current weights.
        kind: model of such a round's groups. A group that cannot be read runs anew.
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
    """Events of the group as its stream sent them, without `tokens` events. The trajectories contain all tokens."""
    name = {"prompt_id": group.prompt_id, "group_id": group.group_id}
    for trajectory in group.trajectories:
        yield TrajectoryEvent(**name, trajectory=trajectory)
    for candidate in group.candidates:
        yield CandidateEvent(**name, candidate=candidate)
    over = {name: value for name, value in vars(group).items() if name in GroupSummary.model_fields}
    yield GroupEvent(**over, selected=[trajectory.index for trajectory in group.trajectories])
