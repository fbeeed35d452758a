"""The feed of files that `--rollout-record` wrote, or still writes.

Invariant: it sends the events that a live server would send.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from fastapi import APIRouter, Response

import vllm_rollout
from vllm_rollout.kernel.http.serialised import EventStream
from vllm_rollout.parts.page.http.events import COMMENT, event_of
from vllm_rollout.parts.page.recording.file import parse_row, pieces
from vllm_rollout.parts.page.recording.rows import LengthsRow, PromptRow, RewardRow, RolloutRow
from vllm_rollout.parts.page.recording.session_rows import SessionGroupRow, SessionRewardRow, add_session_rewards

MAX_ROLLOUTS = 64
"""Most rollouts in a feed, the newest of all files together, and most groups of sessions."""
POLL_S, QUIET_S = 0.5, 15.0


class RecordedFeed:
    """Feed of files, which are read once and then as they grow."""

    def __init__(self, *paths: Path) -> None:
        """Raises: OSError for a file that cannot be read."""
        self._paths = paths
        for path in paths:
            path.open("rb").close()

    def router(self) -> APIRouter:
        router = APIRouter()

        @router.get("/v1/rollouts/watch")
        async def watch() -> Response:
            return EventStream(self.feed(), headers={"cache-control": "no-store"})

        return router

    async def feed(self) -> AsyncGenerator[bytes, None]:
        """Events for one viewer, without an end."""
        server = {"version": vllm_rollout.__version__, "num_ranks": None, "now": time.time(), "live": False}
        yield event_of("server", {**server, "file": ", ".join(path.name for path in self._paths)})
        num_each, quiet_s = max(1, MAX_ROLLOUTS // len(self._paths)), 0.0
        with ExitStack() as opened:
            files = [
                opened.enter_context(GrowingFile(path, path.name if len(self._paths) > 1 else ""))
                for path in self._paths
            ]
            told = [event for file in files for event in await asyncio.to_thread(file.newest, num_each)]
            while True:
                if told:
                    yield b"".join(told)
                elif (quiet_s := quiet_s + POLL_S) >= QUIET_S:
                    yield COMMENT
                    quiet_s = 0.0
                await asyncio.sleep(POLL_S)
                told = [event for file in files for event in file.more()]


class GrowingFile:
    """A recording whose rows are read as they come, in both of its pieces. It is a context manager."""

    def __init__(self, path: Path, name: str = "") -> None:
        """`name`: see `Rows`. Raises: OSError."""
        self._path = path
        self._rows = Rows(name)
        *self._older, self._file = [piece.open("rb") for piece in pieces(path)]

    def __enter__(self) -> GrowingFile:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (*self._older, self._file):
            file.close()

    def newest(self, num_rollouts: int) -> list[bytes]:
        """Events of the last rollouts in the file. Call it first."""
        return self._rows.newest([*self._older, self._file], num_rollouts)

    def more(self) -> list[bytes]:
        """Events of the rows that have come since the last call."""
        is_older = self._path.exists() and not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        told = [event for _, event in self._rows.read(self._file)]
        if is_older:  # a new piece began, and the old one is read
            self._file.close()
            self._file = self._path.open("rb")
        return told


class Rows:
    """Turns the rows of a file into events."""

    def __init__(self, name: str = "") -> None:
        """`name`: the file's name, if the feed has several files. Ids of rollouts without an id begin with it."""
        self._name = name
        self.num_broken = 0
        self._groups: OrderedDict[str, SessionGroupRow] = OrderedDict()
        """Groups of sessions, by name."""
        self._early: OrderedDict[str, list[bytes]] = OrderedDict()
        """Events of rewards that no rollout has had yet, by its id. Several API processes may write them in this
        order."""
        self._told: OrderedDict[str, None] = OrderedDict()
        """Ids of the last rollouts."""
        self._num_steps = 0
        self._step: tuple[str, int | None, list[PromptRow]] | None = None
        """The rollout that consecutive prompt rows form: its id, their step, and the rows."""

    def newest(self, files: Iterable[BinaryIO], num_rollouts: int) -> list[bytes]:
        """Newest events of the last `num_rollouts` rollouts in the files, and of as many groups of sessions."""
        rollouts: OrderedDict[str, dict[str, bytes]] = OrderedDict()
        groups: OrderedDict[str, dict[str, bytes]] = OrderedDict()
        for number, (id, event) in enumerate(chain.from_iterable(map(self.read, files))):
            known = groups if event.startswith(b"event: sessions") else rollouts
            are_rewards = event.startswith(b"event: rewards")
            if are_rewards and id not in known:  # of a rollout or group that is no longer kept
                continue
            told = known.setdefault(id, {})
            told[str(number) if are_rewards else "row"] = event
            if len(known) > num_rollouts:
                known.popitem(last=False)
        return [event for known in (rollouts, groups) for told in known.values() for event in told.values()]

    def read(self, file: BinaryIO) -> Iterator[tuple[str, bytes]]:
        """(id of a rollout or name of a group of sessions, event) of each whole row that has come."""
        while whole := file.readline():
            if not whole.endswith(b"\n"):  # it is being written, or its server died and the next one removes it
                file.seek(-len(whole), os.SEEK_CUR)
                break
            if not whole.strip():
                continue
            try:
                row = parse_row(whole.decode(errors="replace"))
            except ValueError:
                self.num_broken += 1
                continue
            if isinstance(row, PromptRow):
                yield self._prompt(row)
                continue
            self._step = None
            if isinstance(row, RolloutRow):
                yield row.rollout_id, event_of("rollout", _told(row.model_dump(exclude={"prompts"}), row.prompts))
                yield from ((row.rollout_id, event) for event in self._early.pop(row.rollout_id, ()))
                self._told[row.rollout_id] = None
                if len(self._told) > MAX_ROLLOUTS:
                    self._told.popitem(last=False)
            elif isinstance(row, RewardRow) and row.rollout_id in self._told:
                yield row.rollout_id, event_of("rewards", row)
            elif isinstance(row, RewardRow):
                self._early.setdefault(row.rollout_id, []).append(event_of("rewards", row))
                if len(self._early) > MAX_ROLLOUTS:
                    self._early.popitem(last=False)
            elif (group := self._session_group(row)) is not None:
                yield group.name, event_of("sessions", group)

    def _session_group(self, row: SessionGroupRow | SessionRewardRow) -> SessionGroupRow | None:
        """A group with the rewards that came after it. None for rewards of a group that is no longer kept."""
        if isinstance(row, SessionRewardRow):
            group = self._groups.get(row.name)
            return group and add_session_rewards(group, [row])
        self._groups[row.name] = row
        if len(self._groups) > MAX_ROLLOUTS:
            self._groups.popitem(last=False)
        return row

    def _prompt(self, row: PromptRow) -> tuple[str, bytes]:
        """Event of a rollout that has one more prompt."""
        if self._step is None or self._step[1] != row.step:
            name = f"{self._name}/" if self._name else ""
            self._step = (f"{name}step-{self._num_steps}", row.step, [])
            self._num_steps += 1
        id, _, prompts = self._step
        prompts.append(row)
        return id, event_of("rollout", _told({"rollout_id": id}, prompts))


def _told(rollout: dict[str, Any], prompts: list[Any]) -> dict[str, Any]:
    """A row with the fields that a live server would add."""
    rollout["state"] = rollout.get("state") or "over"
    rollout["num_prompts"] = rollout.get("num_prompts") or len(prompts)
    rollout["num_candidates"] = rollout.get("num_candidates") or sum(len(prompt.lengths) for prompt in prompts)
    return {**rollout, "prompts": [_prompt_told(i, prompt) for i, prompt in enumerate(prompts)]}


def _prompt_told(place: int, prompt: LengthsRow) -> dict[str, Any]:
    told = prompt.model_dump()
    told["id"] = told.pop("prompt_id", None) or told["id"]
    told["position"] = place if told.get("position") is None else told["position"]
    told["ends"] = told["ends"] or ["stop"] * len(told["lengths"])
    return told
