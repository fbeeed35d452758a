"""One rollout at several servers. Each server gets a part of the prompts, and all events form one stream.

Invariant: each prompt's group comes back once. If a server is lost, its unfinished groups run at the other servers. A
`restarted` event then takes back the events that were sent of such a group.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import reduce
from hashlib import blake2b
from http import HTTPStatus
from operator import add
from typing import Any

from vllm_rollout.background import begin, cancelled
from vllm_rollout.kernel.client.calls import EventsCall
from vllm_rollout.kernel.client.connection import CONNECTION_LOST, INCOMPLETE, RolloutError
from vllm_rollout.kernel.client.sender import Sender
from vllm_rollout.kernel.http.answers import (
    CandidateEvent,
    DoneEvent,
    Event,
    GroupEvent,
    RestartedEvent,
    Timing,
    TrajectoryEvent,
    Usage,
)
from vllm_rollout.kernel.rules.receipt import Receipt
from vllm_rollout.parts.fleet.rules import ServedGroup, Servers
from vllm_rollout.parts.shaping.rules.history import ObservedLength

MAX_UNREAD = 256
"""Events that wait for the reader. If the reader is slow, servers are read no further and start no more groups."""
LOST = frozenset({error.__name__ for error in CONNECTION_LOST} | {INCOMPLETE})
GONE = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)


def is_loss(error: RolloutError) -> bool:
    """True if the error means that the server is gone, not only that it refused this request."""
    if error.status is None:
        return error.type in LOST
    return error.status in GONE and error.retry_after_s is None


@dataclass(slots=True, eq=False)
class Part:
    """Prompts sent to one server, and its final event."""

    server: int
    began_s: float
    prompt_ids: list[str]
    done: DoneEvent | None = None
    usage: Usage = field(default_factory=Usage)
    """Usage of the part's ended groups, for a server that is lost before its final event."""


@dataclass(slots=True)
class OpenGroup:
    """A prompt whose group has not come back."""

    group: ServedGroup
    part: Part
    group_id: str | None = None
    """None: no event of this group was sent."""
    ends: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Output tokens and end of the group's candidates, by index."""

    def lengths(self) -> list[ObservedLength]:
        known = [(num, end) for num, end in self.ends.values() if num and end != "failed"]
        return [ObservedLength(num, censored=end not in ("stop", "finished")) for num, end in known]


class FleetRollout:
    """One running rollout."""

    def __init__(
        self,
        members: Sequence[Sender],
        servers: Servers,
        call: EventsCall,
        lose: Callable[[int, RolloutError], Awaitable[None]],
    ) -> None:
        """`lose`: called for a server that is gone. It raises if no server is left."""
        self._members, self._servers, self._call, self._lose = members, servers, call, lose
        self.id = f"rollout-{uuid.uuid4().hex}"
        prompts: Sequence[Mapping[str, Any]] = call.body.get("prompts") or []
        self._prompts = [
            {**prompt, "id": str(position) if prompt.get("id") is None else prompt["id"]}
            for position, prompt in enumerate(prompts)
        ]
        self.positions = {str(prompt["id"]): position for position, prompt in enumerate(self._prompts)}
        self._open: dict[str, OpenGroup] = {}
        self.parts: list[Part] = []
        self.part_of: dict[str, Part] = {}
        """Part that returned the prompt's group, by prompt id."""
        self._events: asyncio.Queue[tuple[Part, Event | Exception | None]] = asyncio.Queue(MAX_UNREAD)
        self._reading: dict[Part, asyncio.Task[None]] = {}
        self._num_restarted = 0
        self._losses: Counter[str] = Counter()
        """Number of servers lost with the prompt, by prompt id."""
        self._first_s: float | None = None

    async def events(self) -> AsyncGenerator[Event, None]:
        """Run the rollout. Raises: RolloutError if a server refuses, and if none is left."""
        self._began_s = time.perf_counter()
        try:
            self._begin(list(self.positions))
            while self._reading:
                part, said = await self._events.get()
                if isinstance(said, RolloutError):
                    await cancelled([self._reading.pop(part)])
                    for event in await self._lost(part, said):
                        yield event
                elif isinstance(said, Exception):
                    raise said
                elif said is None:
                    del self._reading[part]
                elif isinstance(said, DoneEvent):
                    part.done = said
                elif self._hear(part, said):
                    yield said
            yield self._summary()
        finally:
            await cancelled(self._reading.values())
            for its in self._open.values():
                self._servers.over(its.group)

    def _begin(self, prompt_ids: Iterable[str]) -> None:
        """Send these prompts to servers, the longest groups first. Raises: NoServerLeft."""
        body, wanted = self._call.body, self._call.body.get("redundancy", 0)
        sizes = [size for size in (body.get("group_size"), wanted) if isinstance(size, int)]
        max_tokens = (body.get("sampling_params") or {}).get("max_tokens")
        terms = (max(1, sum(sizes)), max_tokens if isinstance(max_tokens, int) and max_tokens > 0 else None)
        keys = {id: _key(self._prompts[self.positions[id]]) for id in prompt_ids}
        parts: dict[int, Part] = {}
        # if prompts are invalid, a server that gets all of them gives the best message
        is_split = 0 < len(self.positions) == len(self._prompts)
        for id in sorted(keys, key=lambda id: -self._servers.predicted(keys[id], *terms)):
            group = self._servers.place(keys[id], *terms)
            server = group.server if is_split else next(iter(parts), group.server)
            part = parts.setdefault(server, Part(server, time.perf_counter() - self._began_s, []))
            part.prompt_ids.append(id)
            self._open[id] = OpenGroup(group, part)
        if not self._prompts:
            group = self._servers.place("none", 1)
            self._servers.over(group)
            parts[group.server] = Part(group.server, 0.0, [])
        for part in parts.values():
            part.prompt_ids.sort(key=self.positions.__getitem__)
            self.parts.append(part)
            self._reading[part] = begin(self._read(part, is_split))

    async def _read(self, part: Part, is_split: bool) -> None:
        mine = [self._prompts[self.positions[id]] for id in part.prompt_ids]
        body = {**self._call.body, "prompts": mine if is_split else self._prompts, "stream": True}
        try:
            call = EventsCall(body, self._call.timeout)
            async with aclosing(self._members[part.server]._events(call)) as events:
                async for event in events:
                    await self._events.put((part, event))
        except Exception as error:  # the reader raises errors that are no answer of a server
            await self._events.put((part, error))
        else:
            await self._events.put((part, None))

    def _hear(self, part: Part, event: Event) -> bool:
        """Account for an event. Returns True if it is passed on."""
        id = getattr(event, "prompt_id", None)
        if id is None:
            return True
        its = self._open.get(id)
        if its is None or its.part is not part:
            return False
        its.group_id = getattr(event, "group_id", its.group_id) or ""
        match event:
            case TrajectoryEvent():
                self._ended(its, event.trajectory.index, event.trajectory.num_tokens, event.trajectory.finish_reason)
            case CandidateEvent():
                self._ended(its, event.candidate.index, event.candidate.num_tokens, event.candidate.state)
            case RestartedEvent():
                its.ends.clear()
            case GroupEvent():
                del self._open[id]
                self.part_of[id] = part
                self._servers.over(its.group, its.lengths())
                _count(part.usage, event, its.ends)
                if self._first_s is None:
                    self._first_s = time.perf_counter() - self._began_s
        return True

    def _ended(self, its: OpenGroup, index: int, num_tokens: int, end: str | None) -> None:
        if index not in its.ends:
            self._servers.ended(its.group, num_tokens)
        its.ends[index] = (num_tokens, end or "")

    async def _lost(self, part: Part, error: RolloutError) -> list[Event]:
        """Begin the unfinished prompts of a lost server elsewhere. Returns events that take back what was sent of them.

        Raises: `error`, if the server is not gone. RolloutError if no server is left, or a prompt was lost too often.
        """
        if not is_loss(error):
            raise error
        again = [id for id in part.prompt_ids if id in self._open and self._open[id].part is part]
        try:
            await self._lose(part.server, error)
        except RolloutError:
            if again:  # else all its groups have come back
                raise
        reason = f"its server is gone ({error.message})"
        taken_back: list[Event] = []
        for id in again:
            its = self._open[id]
            self._servers.over(its.group)
            if its.group_id is not None:
                taken_back.append(RestartedEvent(prompt_id=id, group_id=its.group_id, reason=reason))
        self._num_restarted += len(again)
        self._losses.update(again)
        worst = max(again, key=self._losses.__getitem__, default=None)
        if worst is not None and self._losses[worst] > len(self._members):
            raise RolloutError(
                None,
                f"prompt {worst!r} was lost with {self._losses[worst]} servers, the last one: {error.message}. Leave "
                "it out if it ends them.",
                error.type,
            ) from error
        self._begin(again)
        return taken_back

    def _summary(self) -> DoneEvent:
        """Final event of the rollout. Raises: RolloutError if a server left out a group."""
        if self._open:
            id, its = next(iter(self._open.items()))
            url = self._members[its.part.server].base_url
            raise RolloutError(None, f"{url} said that it is done without prompt {id!r}.", INCOMPLETE)
        done = {part: part.done for part in self.parts if part.done is not None}
        said = list(done.values())
        usage: Counter[str] = Counter()
        for part in self.parts:
            usage.update((part.usage if part.done is None else part.done.usage).model_dump())
        usage["num_restarted"] += self._num_restarted
        started: dict[str, float | None] = {}
        for part, summary in done.items():
            for id, seconds in zip(part.prompt_ids, summary.timing.started_s, strict=False):
                started[id] = None if seconds is None else part.began_s + seconds
        versions = {its.weight_version for its in said}
        receipts = [its.receipt for its in said if its.receipt is not None]
        first = said[0] if said else None
        return DoneEvent(
            id=self.id,
            created=int(time.time()) if first is None else min(its.created for its in said),
            model="" if first is None else first.model,
            weight_version=versions.pop() if len(versions) == 1 else None,
            warnings=list(dict.fromkeys(warning for its in said for warning in its.warnings)),
            budget=first.budget if first is not None and len(self.parts) == 1 else None,
            detection_length=next((its.detection_length for its in said if its.detection_length is not None), None),
            off_policy=any(its.off_policy for its in said),
            freed=next((its.freed for its in said if its.freed is not None), None),
            usage=Usage(**usage),
            timing=Timing(
                latency_s=time.perf_counter() - self._began_s,
                time_to_first_group_s=self._first_s,
                started_s=[started.get(str(prompt["id"])) for prompt in self._prompts],
            ),
            receipt=_at_once(*receipts) if receipts else None,
        )


def _at_once(first: Receipt, *others: Receipt) -> Receipt:
    """Receipt of servers that worked at the same time. Tokens are summed. For seconds the longest counts."""
    if not others:
        return first

    def longest(name: str) -> Any:
        known = [getattr(each, name) for each in (first, *others) if getattr(each, name) is not None]
        return max(known, default=None)

    names = ("seconds", "waiting_seconds", "queue_seconds")
    whole = replace(reduce(add, others, first), **{name: longest(name) for name in names})
    if whole.seconds is None or whole.waiting_seconds is None:
        return whole
    return replace(whole, saved_seconds=whole.waiting_seconds - whole.seconds)


def _key(prompt: Mapping[str, Any]) -> str:
    content = {field: value for field, value in prompt.items() if field not in ("id", "data")}
    return blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _count(usage: Usage, event: GroupEvent, ends: Mapping[int, tuple[int, str]]) -> None:
    """Add a group to `usage`, as far as events say it before the stream's end."""
    usage.num_candidates += len(ends)
    usage.prompt_tokens += len(event.prompt_token_ids)
    for index, (num_tokens, end) in ends.items():
        is_returned = index in event.selected
        usage.generated_tokens += num_tokens
        usage.returned_tokens += num_tokens * is_returned
        usage.wasted_tokens += num_tokens * (not is_returned)
        counter = f"num_{'finished' if is_returned else end}"
        if counter in Usage.model_fields:
            setattr(usage, counter, getattr(usage, counter) + 1)
