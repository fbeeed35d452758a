"""Viewers of the server, and the events for them: running rollouts and the last finished ones.

Invariants: without a viewer or a record the engine is not asked at all. With any number of them it is asked once per
tick, and each change is encoded once. Texts of a running group are an extra request to the engine, shared by all
readers of the same tick. The text of an ended candidate is made once. A slow viewer misses ticks and is then sent
everything anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from itertools import chain
from typing import Any, Protocol

import vllm_rollout
from vllm_rollout.background import begin, heard, spawn, survived
from vllm_rollout.kernel.http.engine import CandidateEnd, Engine, EngineStopped, PreparedPrompt, RequestError
from vllm_rollout.kernel.parts import face
from vllm_rollout.kernel.rules.rewards import Reward
from vllm_rollout.parts.page.calls import LAST_TOKENS, LastTokens
from vllm_rollout.parts.page.http.events import COMMENT, CandidateText, GroupTexts, event_of
from vllm_rollout.parts.page.http.watched import SeenGroup, WatchedRollout
from vllm_rollout.parts.shaping.rules.trace import end_of

logger = logging.getLogger("vllm.vllm_rollout")

RANKS: Any = face("page", "ranks")
"""Returns state and load of each rank. None without the part moving, which knows them."""

TICK_S = 0.5
LOOK_S = 2.0
"""Seconds that the ranks may take to report their load. A busy rank is not waited for."""
QUIET_S = 15.0
"""Seconds of silence after which a viewer is sent a comment, to keep the connection open."""
MAX_VIEWERS = 64
MAX_BEHIND = 8
"""Most ticks that wait for a slow viewer."""
MAX_OVER, MAX_OVER_BYTES = 64, 32 << 20
"""Most finished rollouts that are kept for viewers, and most bytes of their rows."""
MAX_RUNS = 64
"""Most runs whose last round is kept for viewers. The oldest rounds are dropped first."""
MAX_QUEUE = 32
"""Most prompts of a run's queue that are listed by id."""
MAX_WITH_TEXT, MAX_TOKENS_WITH_TEXT = 4, 2_000_000
"""Most finished rollouts, and most tokens of them, whose texts can still be read: 90 MB at most. A rollout is kept only
if a viewer was connected at its end."""


class Viewer:
    """One reader of the feed."""

    def __init__(self) -> None:
        self._ticks: asyncio.Queue[bytes] = asyncio.Queue(MAX_BEHIND)
        self.is_behind = True
        """True if the viewer has to be sent everything."""

    def tell(self, tick: bytes) -> None:
        self.is_behind |= self._ticks.full()
        if not self.is_behind:
            self._ticks.put_nowait(tick)

    def begin_again(self) -> None:
        self._ticks = asyncio.Queue(MAX_BEHIND)
        self.is_behind = False

    async def next(self) -> bytes:
        """The next tick, or a comment after `QUIET_S` seconds of silence."""
        try:
            async with asyncio.timeout(QUIET_S):
                return await self._ticks.get()
        except TimeoutError:
            return COMMENT


class Feed(Protocol):
    """Events for viewers that another part has."""

    def everything(self) -> list[bytes]:
        """Events that describe the whole state."""

    def changes(self) -> list[bytes]:
        """Events since the last call."""


class Viewers:
    """All readers of the feed, and the data that they may read."""

    def __init__(self, engine: Engine, *, records: bool = False) -> None:
        """`records`: True if a trace file also needs the ranks of groups."""
        self._engine = engine
        self._records = records
        self._viewers: set[Viewer] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._running: dict[str, WatchedRollout] = {}
        self._over: OrderedDict[str, bytes] = OrderedDict()
        """Events of finished rollouts, by rollout id."""
        self._with_text: OrderedDict[str, WatchedRollout] = OrderedDict()
        self._rounds: dict[str, bytes] = {}
        """The event of the last round, by run."""
        self._unsent: list[bytes] = []
        """Events since the last tick, without changes of groups."""
        self._ranks = b""
        """The last event about ranks."""
        self._read: dict[tuple[str, int], asyncio.Task[GroupTexts]] = {}
        """Texts of running groups, by rollout id and position. Each is kept for one tick."""
        self.feeds: list[Feed] = []
        """Rows that other parts show."""

    def begun(self, watched: WatchedRollout) -> None:
        watched.begin()
        self._running[watched.rollout.id] = watched
        if self._viewers:
            self._tell(event_of("rollout", watched.row(with_prompts=False)))
        self._tick_if_needed()

    def over(self, watched: WatchedRollout) -> None:
        id = watched.rollout.id
        del self._running[id]
        self._tick_if_needed()
        self._over[id] = row = event_of("rollout", watched.row(running=True))
        self._tell(row)
        gone = []
        while len(self._over) > MAX_OVER or sum(map(len, self._over.values())) > MAX_OVER_BYTES:
            gone.append(self._over.popitem(last=False)[0])
        if gone:
            self._tell(event_of("gone", {"rollout_ids": gone}))
        if self._viewers:
            self._keep_text(watched)

    def rewards_posted(self, rollout_id: str, rewards: Sequence[Reward]) -> None:
        """Send rewards that a trainer has posted for a finished rollout. All other rewards are part of a group's
        observations."""
        each = [{"prompt_id": its.prompt_id, "index": its.index, "reward": its.reward} for its in rewards]
        told = event_of("rewards", {"rollout_id": rollout_id, "rewards": each})
        if rollout_id in self._over:
            self._over[rollout_id] += told
        self._tell(told)

    def round_over(self, run: str, summary: Mapping[str, Any], queue: Sequence[str]) -> None:
        """Send the summary of a run's round. `queue`: ids of the prompts that now wait for a long round, oldest
        first."""
        self._rounds.pop(run, None)
        told = event_of("round", {**summary, "queue": queue[:MAX_QUEUE], "num_queued": len(queue)})
        self._rounds[run] = told
        if len(self._rounds) > MAX_RUNS:
            del self._rounds[next(iter(self._rounds))]
        self._tell(told)

    async def feed(self) -> AsyncGenerator[bytes, None]:
        """Events for one viewer, without an end. Raises: RequestError (429) if there are too many viewers."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise RequestError(
                f"{MAX_VIEWERS} viewers look at this server, which is as many as it takes. Close a page.",
                status=HTTPStatus.TOO_MANY_REQUESTS,
                retry_after_s=60,
            )
        viewer = Viewer()
        self._viewers.add(viewer)
        self._tick_if_needed()
        try:
            while True:
                if viewer.is_behind:
                    viewer.begin_again()
                    yield self._everything()
                yield await viewer.next()
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                self._unsent.clear()  # the next viewer is sent everything
            self._tick_if_needed()

    async def texts(self, rollout_id: str, position: int, namespace: str) -> GroupTexts:
        """Texts of a group. Raises: RequestError (404) for a group of another client, and if its tokens are no longer
        kept."""
        watched = self._running.get(rollout_id) or self._with_text.get(rollout_id)
        group = None if watched is None else watched.groups.get(position)
        if watched is None or group is None or watched.rollout.namespace != namespace:
            raise RequestError(
                f"the tokens of group {position} of {rollout_id!r} are not here: they are kept of your rollouts "
                f"that run, and of the last {MAX_WITH_TEXT} at whose end somebody looked, of "
                f"{MAX_TOKENS_WITH_TEXT:,} tokens together.",
                status=HTTPStatus.NOT_FOUND,
            )
        rollout = watched.rollout
        if group.over_s is not None:
            return await asyncio.to_thread(self._texts, rollout.prompts[position], group, [])
        key, loop = (rollout_id, position), asyncio.get_running_loop()
        if key not in self._read:
            self._read[key] = reading = begin(self._running_texts(watched, position, group))
            reading.add_done_callback(lambda _: loop.call_later(TICK_S, self._read.pop, key))
        return await heard(self._read[key], "texts of a group")  # if one reader leaves, the others still get it

    async def _running_texts(self, watched: WatchedRollout, position: int, group: SeenGroup) -> GroupTexts:
        rollout = watched.rollout
        running = await self._last_tokens(rollout.group_id(position))
        return await asyncio.to_thread(self._texts, rollout.prompts[position], group, running)

    async def _last_tokens(self, group_id: str) -> list[LastTokens]:
        """The last tokens of running candidates. Empty if the engine is dead or too busy."""
        try:
            async with asyncio.timeout(LOOK_S):
                told = await self._engine.calls.call_all(LAST_TOKENS, group_id)
        except (EngineStopped, TimeoutError):
            return []
        return [*chain.from_iterable(told)]

    def _texts(self, prompt: PreparedPrompt, group: SeenGroup, running: Sequence[LastTokens]) -> GroupTexts:
        if group.prompt_text is None:
            group.prompt_text = self._engine.prompt_text(prompt)
        texts = GroupTexts(prompt_id=prompt.id, prompt=group.prompt_text, candidates=[])
        ends = dict(group.record.ends)
        for index, end in ends.items():
            seen = group.candidates[index]
            texts.candidates.append(
                CandidateText(
                    index=index,
                    text=end.text or self._text_of(prompt, group, end),
                    num_tokens=seen.num_tokens,
                    end=end_of(end.ending),
                    score=seen.score,
                    success_probability=group.record.fields_of(end).get("success_probability"),
                    reward=seen.reward,
                    reward_status=seen.reward_status,
                    selected=index in group.selected,
                )
            )
        for said in running:
            if said.index not in ends:  # it may have ended since
                texts.candidates.append(
                    CandidateText(
                        index=said.index,
                        text=self._engine.text_of(prompt, said.token_ids, stopped=False),
                        num_tokens=said.offset + len(said.token_ids),
                        offset=said.offset,
                        end="running",
                        selected=False,
                    )
                )
        texts.candidates.sort(key=lambda candidate: candidate.index)
        return texts

    def _text_of(self, prompt: PreparedPrompt, group: SeenGroup, end: CandidateEnd) -> str:
        """The text of an ended candidate, made once."""
        index = end.ending.index
        made_of, text = group.texts.get(index, (None, ""))
        if made_of is not end:
            text = self._engine.text_of(prompt, end.token_ids, stopped=end.finish_reason == "stop")
            group.texts[index] = (end, text)
        return text

    def _tick_if_needed(self) -> None:
        records = self._records and self._engine.num_ranks > 1 and self._running
        if (self._viewers or records) and self._ticking is None:
            self._ticking = spawn(self._tick(), "the page")
        elif not (self._viewers or records) and self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    def _keep_text(self, watched: WatchedRollout) -> None:
        self._with_text[watched.rollout.id] = watched
        usages = [kept.rollout.outcome.usage for kept in self._with_text.values()]
        num_tokens = sum(usage.generated_tokens + usage.resumed_tokens for usage in usages)
        while len(self._with_text) > MAX_WITH_TEXT or num_tokens > MAX_TOKENS_WITH_TEXT:
            _, first = self._with_text.popitem(last=False)
            usage = first.rollout.outcome.usage
            num_tokens -= usage.generated_tokens + usage.resumed_tokens

    def _tell(self, event: bytes) -> None:
        if self._viewers:
            self._unsent.append(event)

    def _everything(self) -> bytes:
        """Events that describe the whole state, whatever was sent before."""
        server = {"version": vllm_rollout.__version__, "num_ranks": self._engine.num_ranks, "now": time.time()}
        running = [event_of("rollout", watched.row(running=True)) for watched in self._running.values()]
        first = event_of("server", {**server, "live": True})
        more = [event for feed in self.feeds for event in feed.everything()]
        return b"".join([first, *self._over.values(), *running, *self._rounds.values(), *more, self._ranks])

    async def _tick(self) -> None:
        while True:
            with survived("the page"):
                ranks: Sequence[tuple[str, Any]] = ()
                with survived("the page"), suppress(EngineStopped, TimeoutError):  # the engine is dead or busy
                    async with asyncio.timeout(LOOK_S):
                        ranks = [] if RANKS is None else await RANKS(self._engine)
                self._look(ranks)
                self._tell_viewers()
            await asyncio.sleep(TICK_S)

    def _tell_viewers(self) -> None:
        events, self._unsent = self._unsent, []
        for watched in self._running.values():
            events += [_group(watched, position) for position in sorted(watched.changed)]
            watched.changed.clear()
        for feed in self.feeds if self._viewers else ():
            events += feed.changes()
        tick = b"".join([*events, self._ranks])
        for viewer in self._viewers:
            viewer.tell(tick)

    def _look(self, ranks: Sequence[tuple[str, Any]]) -> None:
        """Record the load of each rank, and the progress of the groups on it."""
        rows = []
        for rank, (state, load) in enumerate(ranks):
            rows.append({
                "rank": rank, "state": state, "running": load.num_running, "waiting": load.num_waiting,
                "kv": load.kv_cache_usage, "weights": load.weight_version,
            })  # fmt: skip
            for running in load.groups:
                rollout_id, _, position = running.group_id.rpartition("-")
                watched = self._running.get(rollout_id)
                if watched is not None and position.isdecimal() and int(position) in watched.groups:
                    watched.groups[int(position)].runs(rank, running.num_tokens)
        self._ranks = event_of("ranks", {"at": time.time(), "ranks": rows})


def _group(watched: WatchedRollout, position: int) -> bytes:
    row = watched.groups[position].row()
    return event_of("group", {"rollout_id": watched.rollout.id, "position": position, "prompt": row})
