"""Harnesses of a feed, and the groups of sessions that they run.

Invariant: a group belongs to one harness. If its harness stays away for `AWAY_S`, its prompt waits for another one.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from http import HTTPStatus
from statistics import fmean
from typing import Any

from vllm_rollout.kernel.http.answers import Usage
from vllm_rollout.kernel.http.clients import client_namespace
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.protocol import Prompt
from vllm_rollout.kernel.http.serialised import encode
from vllm_rollout.parts.feeds.http.body import FeedRequest
from vllm_rollout.parts.feeds.http.running import AdmittedGroup, GroupEnd
from vllm_rollout.parts.feeds.rules.bias import GroupSize
from vllm_rollout.parts.feeds.with_sessions.http.answers import HarnessEvent, SessionFeedEvent
from vllm_rollout.parts.sessions.http.body import DeclaredEvent, SessionEvent, SessionGroupRequest, SessionOptions
from vllm_rollout.parts.sessions.http.groups import Event, OpenGroup
from vllm_rollout.parts.sessions.http.service import SEE_OUT_S, TICK_S, SessionService

AWAY_S = 30.0
"""Seconds for which a harness may read no events before it loses its groups."""
MAX_HARNESSES = 64
"""Most harnesses of one feed."""


class Harness:
    """A client's process that runs sessions of a feed."""

    def __init__(self) -> None:
        self.groups: dict[str, WatchedGroup] = {}
        """Its groups by id, until they are settled."""
        self.events: asyncio.Queue[SessionFeedEvent | None] | None = None
        """Events to send. None while it reads none."""
        self.left_s = 0.0
        """Time at which it stopped reading, by the clock of the sessions."""

    def tell(self, *events: SessionFeedEvent) -> None:
        for event in events if self.events is not None else ():
            self.events.put_nowait(event)

    def leave(self) -> None:
        """End the stream of events."""
        if self.events is not None:
            self.events.put_nowait(None)


class WatchedGroup:
    """One group of sessions, until it is over and its rewards are there. The `Watcher` of its sessions."""

    def __init__(self, harness: Harness, group: OpenGroup, admitted: AdmittedGroup, prompt: dict[str, Any]) -> None:
        self.harness, self.group, self.admitted, self.prompt = harness, group, admitted, prompt
        self._changed = asyncio.Event()

    @property
    def declared(self) -> list[SessionFeedEvent]:
        """Events for a harness that does not know the group yet."""
        event = DeclaredEvent(
            prompt_id=self.prompt["id"], group_id=self.group.id, to_begin=self.group.to_begin, prompt=self.prompt
        )
        return [event, *self.group.told_before]

    async def settled(self, sessions: SessionService) -> None:
        """Wait until the group is over and its rewards are there. Raises: RequestError (503) if its harness is gone."""
        while not self._is_settled(sessions.now_s()):
            if self.harness.events is None and sessions.now_s() - self.harness.left_s > AWAY_S:
                raise _no_harness("its harness has gone")
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._changed.wait()

    def _is_settled(self, now_s: float) -> bool:
        group = self.group
        if group.seconds is None or (group.awaits_finish and not group.race.is_silent(now_s)):
            return False
        return group.is_counted or now_s > group.began_s + group.seconds + SEE_OUT_S

    # What the service of sessions tells it.

    def heard_s(self, now_s: float) -> float:
        """The time now: a group waits for its harness, which may run others first, as long as there is one."""
        return now_s

    def told(self, event: Event) -> None:
        self.harness.tell(event)
        if isinstance(event, SessionEvent) and event.state != "wanted":
            self.admitted.num_ended += 1
            self.admitted.num_tokens += self.group.race.sessions[event.session_id].num_tokens

    def over(self, group: OpenGroup) -> None:
        self._changed.set()

    def finished(self, group: OpenGroup) -> None:
        self._changed.set()

    def counted(self) -> None:
        self._changed.set()


class SessionRunner:
    """Runs the groups of one feed in its harnesses. The `GroupRunner` of a feed of sessions."""

    def __init__(
        self, sessions: Callable[[], SessionService], feed_id: str, request: FeedRequest, changed: Callable[[], None]
    ) -> None:
        """`changed`: called when a harness comes."""
        self._sessions, self._feed_id, self._request, self._changed = sessions, feed_id, request, changed
        self._harnesses: dict[str, Harness] = {}
        self._is_closed = False

    @property
    def is_ready(self) -> bool:
        return bool(self._here)

    @property
    def num_harnesses(self) -> int:
        return len(self._here)

    @property
    def _here(self) -> list[Harness]:
        """Harnesses that read events."""
        return [each for each in self._harnesses.values() if each.events is not None]

    async def run(self, number: int, group: AdmittedGroup) -> None:
        harness = min(self._here, key=lambda each: len(each.groups), default=None)
        if harness is None:
            raise _no_harness("no harness reads its events")
        sessions, prompt = self._sessions(), group.prompt.model_dump(mode="json", exclude_none=True)
        request = group_request(self._request, group.prompt, self._feed_id, is_long=group.is_long)
        its = sessions.declare(request, client_namespace())
        its.priority = lambda: group.priority  # it grows older
        watched = its.watcher = harness.groups[its.id] = WatchedGroup(harness, its, group, prompt)
        harness.tell(*watched.declared)
        group.group_id = its.engine_id
        try:
            await watched.settled(sessions)
        finally:
            sessions.defer(its)
            its.watcher, group.saw_bad_weights = None, its.saw_bad_weights
            del harness.groups[its.id]
        answer = its.returned(prompt["id"], prompt, sessions.now_s())
        rewards = [each.reward for each in answer.trajectories if each.reward is not None]
        lengths = [each.num_tokens for each in answer.trajectories]
        size = GroupSize(fmean(lengths or [0]), fmean(rewards) if rewards else None)
        group.end = GroupEnd(size, answer.status == "complete", answer.reason, len({*rewards}) > 1)
        group.json = await encode(answer, answer.generated_tokens)
        wasted = answer.generated_tokens - answer.returned_tokens
        group.usage = Usage(generated_tokens=answer.generated_tokens, wasted_tokens=wasted)

    def close(self) -> None:
        self._is_closed = True
        for harness in self._harnesses.values():
            harness.leave()

    def events(self, name: str | None) -> AsyncGenerator[SessionFeedEvent, None]:
        """Events for the harness with this name. Groups that it runs already come first. An earlier stream of it ends.

        Raises: RequestError (429) with too many harnesses, before anything is sent.
        """
        name = name or uuid.uuid4().hex
        self._harnesses = {each: its for each, its in self._harnesses.items() if its.events is not None or its.groups}
        if name not in self._harnesses and len(self._harnesses) >= MAX_HARNESSES:
            raise RequestError(
                f"{MAX_HARNESSES} harnesses run this feed. Close one of them.",
                status=HTTPStatus.TOO_MANY_REQUESTS,
                retry_after_s=1,
            )
        return self._read(name)

    async def _read(self, name: str) -> AsyncGenerator[SessionFeedEvent, None]:
        if self._is_closed:  # the feed was deleted before the stream began
            return
        harness = self._harnesses.setdefault(name, Harness())
        harness.leave()
        events = harness.events = asyncio.Queue()
        harness.tell(HarnessEvent(groups=[*harness.groups]))
        for watched in harness.groups.values():
            harness.tell(*watched.declared)
        self._changed()
        try:
            while (event := await events.get()) is not None:
                yield event
        finally:
            if harness.events is events:
                harness.events, harness.left_s = None, self._sessions().now_s()


def check_room(sessions: SessionService | None, request: FeedRequest) -> None:
    """Check that this server can have a feed of sessions. Raises: RequestError."""
    if sessions is None:
        raise RequestError("sessions: this server has none. Leave it out.", param="sessions")
    its = group_request(request, Prompt(id="check", prompt="check"), "check")
    sessions.check_together(its, request.terms.num_places, "(max_staleness + 1) * batch groups", "batch")


def group_request(request: FeedRequest, prompt: Prompt, name: str, *, is_long: bool = False) -> SessionGroupRequest:
    """The request for the group of one prompt."""
    redundancy = 0 if is_long else request.redundancy or 0
    its: SessionOptions = request.sessions
    return its.group(f"{name}-{uuid.uuid4().hex[:12]}", request.group_size, redundancy, prompt.data)


def _no_harness(reason: str) -> RequestError:
    """The error after which a group waits for a harness. No client sees it."""
    return RequestError(f"no sessions of this feed run: {reason}.", status=503, retry_after_s=1)
