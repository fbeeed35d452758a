"""A feed that runs: prompts that wait, groups that run, and groups that are complete.

Invariant: each prompt that was put waits, runs, is complete, or is in exactly one list of a batch.
"""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from contextvars import copy_context
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from vllm_rollout.background import spawn
from vllm_rollout.kernel.http.answers import Usage
from vllm_rollout.kernel.http.clients import act_for
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.protocol import Prompt
from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.kernel.rules.types import NOT_FINITE
from vllm_rollout.parts.feeds.http.answers import FailedPrompt
from vllm_rollout.parts.feeds.http.body import FeedRequest
from vllm_rollout.parts.feeds.http.kept import Kept
from vllm_rollout.parts.feeds.http.metrics import FeedMetrics
from vllm_rollout.parts.feeds.http.running import FeedRollout, KeptOutput
from vllm_rollout.parts.feeds.http.store import StoredFeed
from vllm_rollout.parts.feeds.rules.bias import BiasMeter, Fate, GroupSize
from vllm_rollout.parts.feeds.rules.feed import Feed, TakenGroup, Versions, WaitsFor
from vllm_rollout.parts.weights.http import recomputed

AGAIN_S = 1.0
"""Seconds until a group starts again that the engine could not take."""
PASSING = (409, 429, 503)
"""Statuses of errors after which a group starts again."""
MAX_WARNINGS = 16


@dataclass(slots=True)
class SinceBatch:
    """Events since the last batch that the next one reports."""

    dropped: list[str] = field(default_factory=list)
    deferred: list[str] = field(default_factory=list)
    filtered: list[str] = field(default_factory=list)
    failed: list[FailedPrompt] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class WaitingPrompt(NamedTuple):
    turn: int
    """Number of the prompt among all that were put."""
    prompt: Prompt
    num_bytes: int
    """Size as JSON."""
    is_long: bool = False
    """True if it was deferred, and starts in a long batch."""


class LiveFeed:
    """One feed of a client."""

    def __init__(
        self,
        id: str,
        request: FeedRequest,
        model: str,
        rollouts: RolloutService,
        metrics: FeedMetrics,
        version: str | None,
        kept: Kept,
    ) -> None:
        self.id, self.request, self.model, self.created = id, request, model, int(time.time())
        self.kept = kept
        self.is_held = False
        """True after a restart until weights are named. They may not be those of the feed before."""
        self.bad_version = -1
        """Version whose logits were not finite. No group starts under it."""
        self.rule = Feed(request.terms)
        self.versions = Versions(version)
        self.meter = BiasMeter()
        self.waiting: deque[WaitingPrompt] = deque()
        self.deferred: list[WaitingPrompt] = []
        """Prompts whose groups became too old, and that wait for a long batch."""
        self.groups: dict[int, FeedRollout] = {}
        """Groups that run or are complete, by number."""
        self.stopped: set[int] = set()
        """Running groups that were stopped, and wait to go on."""
        self.since = SinceBatch()
        self.num_put = self.num_batches = self.generated_tokens = self.wasted_tokens = 0
        self._rollouts, self._metrics = rollouts, metrics
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._context = copy_context()
        """Groups start in the context of the feed's client, whoever makes room for them."""
        self._changed = asyncio.Event()

    def checked(self, prompts: list[Prompt]) -> list[WaitingPrompt]:
        """Prompts with ids and turns of their own. Raises: RequestError (409) for an id that is in the feed."""
        alive = {each.prompt.id for each in (*self.waiting, *self.deferred)}
        alive |= {each.prompt.id for each in self.groups.values()}
        named = []
        for position, prompt in enumerate(prompts):
            name = str(self.num_put + position) if prompt.id is None else prompt.id
            if name in alive:
                raise RequestError(
                    f"prompts.{position}.id: {name!r} is in this feed, and its group was not taken yet. Put it later, "
                    "or under another id.",
                    status=409,
                    param=f"prompts.{position}.id",
                )
            alive.add(name)
            named.append(waiting_prompt(self.num_put + position, prompt.model_copy(update={"id": name})))
        return named

    def put(self, prompts: list[WaitingPrompt]) -> None:
        """Add checked prompts."""
        self.num_put += len(prompts)
        self.waiting.extend(prompts)
        self._admit()

    @property
    def state(self) -> dict[str, Any]:
        """Numbers that a restart needs."""
        return {
            "version": self.rule.version,
            "weight_version": self.versions.name,
            "num_used": self.rule.num_used,
            "num_put": self.num_put,
            "num_batches": self.num_batches,
        }

    def take_up(self, stored: StoredFeed, namespace: str) -> None:
        """Continue from disk. Groups that ran when the server ended run again. Raises: ValueError, KeyError."""
        self._context.run(act_for, namespace)
        state, rule = stored.state, self.rule
        self.created = stored.created
        self.num_put, self.num_batches = state["num_put"], state["num_batches"]
        rule.version, rule.num_used = state["version"], state["num_used"]
        self.is_held = True
        for turn, body, born, fields, group, packed in stored.prompts:
            prompt = Prompt.model_validate_json(body)
            if born is None:
                self.waiting.append(waiting_prompt(turn, prompt))
                continue
            number, rule.num_admitted = rule.num_admitted, rule.num_admitted + 1
            if packed is not None:
                rule.running[number] = born
                before = KeptOutput(packed, fields["indices"], fields["num_tokens"])
                self.groups[number] = FeedRollout(
                    prompt, turn, self.request.group_size, born, fields["born_version"], before=before
                )
                self.stopped.add(number)
                continue
            rule.complete[number], rule.sizes[number] = born, len(group)
            size = GroupSize(fields["tokens"], fields["reward"])
            names = fields["born_version"], fields["rollout_id"]
            self.groups[number] = FeedRollout(
                prompt, turn, self.request.group_size, born, *names, json=group, known_size=size
            )

    def weights_named(self, name: str | None) -> None:
        """Note the name of the current weights. Another name than before is a weights update."""
        before = self.versions.name
        if name is not None and self.versions.goes_back(name):
            self._warn(f"the weights went back from {before!r} to {name!r}. This counts as an update.")
        was_held = self.is_held
        self.is_held = was_held and name is None and before is not None
        if self.versions.is_new(name):
            for number in self.rule.updated():
                self._drop(number)
            self.kept.left([], self.state)
            if self.request.on_update == "stop":
                self._stop_running()
            if self.request.on_update == "recompute" and (names := [group.rollout_id for group in self.running]):
                spawn(recomputed(self._rollouts.engine, names), "KV of a feed's groups")
            self._admit()
        elif was_held and not self.is_held:
            self._admit()

    async def changed(self, timeout_s: float) -> None:
        """Wait until something has changed, but not longer than `timeout_s`."""
        changed = self._changed
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await changed.wait()

    def take(self, *, drain: bool) -> list[tuple[TakenGroup, FeedRollout]] | None:
        """The groups of the next batch. None: wait."""
        taken = self.rule.take(drain=drain and not self.waiting and not self.deferred)
        if taken is None:
            return None
        self.num_batches += 1
        found = [(each, self.groups.pop(each.number)) for each in taken]
        for each, group in found:
            self._over("trained", group)
            self._metrics.taken(each.staleness)
        self._admit()
        return found

    def report(self) -> SinceBatch:
        """Events since the last report."""
        since, self.since = self.since, SinceBatch()
        return since

    @property
    def running(self) -> Iterator[FeedRollout]:
        return (self.groups[number] for number in self.rule.running)

    @property
    def complete(self) -> Iterator[FeedRollout]:
        return (self.groups[number] for number in self.rule.complete)

    @property
    def waits_for(self) -> WaitsFor:
        """The reason why there is no batch."""
        return self.rule.waits_for(len(self.waiting) + len(self.deferred), len(self.stopped))

    @property
    def num_waiting_bytes(self) -> int:
        return sum(each.num_bytes for each in (*self.waiting, *self.deferred))

    async def close(self) -> None:
        """Stop all groups."""
        self.waiting.clear()
        self.deferred.clear()
        self.stopped.clear()
        self._notify()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _admit(self) -> None:
        """Let stopped groups go on unless a batch is complete, and start as many groups as there is room for."""
        may_start = not self.is_held and self.bad_version != self.rule.version
        if may_start and not self.rule.is_ready:
            for number in sorted(self.stopped):
                self._start(number)
            self.stopped.clear()
        for _ in range(self.rule.num_long(len(self.deferred), len(self.waiting)) if may_start else 0):
            self._wait(self.deferred.pop(0)._replace(is_long=True))
        for _ in range(min(len(self.waiting), self.rule.capacity) if may_start else 0):
            turn, prompt, _, is_long = self.waiting.popleft()
            number = self.rule.admit(is_long=is_long)
            born = self.rule.running[number], self.versions.name
            self.groups[number] = FeedRollout(prompt, turn, self.request.group_size, *born, is_long=is_long)
            self._start(number)
        self._notify()

    def _start(self, number: int) -> None:
        group = self.groups[number]
        group.version, group.began_with = self.rule.version, self.versions.name
        task = self._context.run(spawn, self._run(number, group), "a group of a feed")
        task.add_done_callback(partial(self._forget, number))
        self._tasks[number] = task

    def _stop_running(self) -> None:
        """Stop groups that run. Those that have just come to the engine may run on."""
        running = {group.group_id: group for group in self.running if group.can_go_on and group.group_id is not None}
        for group in running.values():
            group.is_stopping = True
        if running:
            spawn(self._rollouts.engine.cancel_groups([*running]), "stopping a feed's groups")

    async def _run(self, number: int, group: FeedRollout) -> None:
        reason: str | None = None
        try:
            labels = {"feed": self.id, "group": number}
            fields, stops = self.request.rollout_fields(is_long=group.is_long), self.request.on_update == "stop"
            await group.run(self._rollouts, fields, labels, stops=stops)
        except RequestError as error:
            if error.status in PASSING:
                await asyncio.sleep(error.retry_after_s or AGAIN_S)
                self._again(number)
                return
            reason = str(error)
        except Exception as error:  # the feed goes on without this group
            self._ended(number, group, f"our code failed: {error!r}")
            raise
        self._ended(number, group, reason)

    def _ended(self, number: int, group: FeedRollout, reason: str | None) -> None:
        if number not in self.rule.running:  # it was dropped at its very end
            return
        self.generated_tokens += group.usage.generated_tokens
        name, is_complete = group.prompt.id or "", group.event is not None and group.event.status == "complete"
        if group.saw_bad_weights and not is_complete:
            self._warn(f"prompt {name!r}: {NOT_FINITE} Its group starts again.")
            self.wasted_tokens += group.usage.generated_tokens
            if group.version == self.rule.version:  # others may have KV of earlier weights
                self.bad_version = group.version
            self._again(number)
            return
        for warning in group.warnings:
            self._warn(warning)
        if group.was_stopped:
            num_kept = 0 if group.kept is None else group.kept.num_tokens
            self.wasted_tokens += group.num_before + group.usage.generated_tokens - num_kept
            if group.kept is not None:
                self.kept.stopped(group.turn, group.born, group.born_version, group.kept)
            self._again(number)
            return
        if not is_complete:
            reason = reason or (group.event and group.event.reason) or "its candidates were stopped."
            self.since.failed.append(FailedPrompt(prompt_id=name, reason=reason))
            self._gave_up(number, "failed")
        elif self.request.filter is not None and not group.teaches:
            self.since.filtered.append(name)
            self._gave_up(number, "filtered")
        else:
            self.rule.completed(number, len(group.json))
            group.before = group.before and replace(group.before, packed=b"")
            size, born = group.size, self.rule.complete[number]
            fields = {"born_version": group.born_version, "rollout_id": group.rollout_id, **asdict(size)}
            self.kept.completed(group.turn, born, fields, group.json)
            self._put_back()
        self._admit()

    def _forget(self, number: int, task: asyncio.Task[None]) -> None:
        if self._tasks[number] is task:  # a group that goes on has another one
            del self._tasks[number]

    def _put_back(self) -> None:
        """Let prompts wait again whose groups have no place in the engine, if complete groups have too many bytes."""
        if not self.rule.is_full:
            return
        groups = ((number, self.groups[number]) for number in self.rule.running)
        queue = [number for number, group in groups if group.group_id is None and group.before is None]
        for number in self.rule.too_many(queue):
            self._tasks[number].cancel()
            self._again(number)
        if self.waiting:
            self._warn(
                f"complete groups have {self.rule.num_bytes} bytes, at most {self.rule.max_bytes} may wait here: no "
                "more groups start before batches are taken."
            )

    def _again(self, number: int) -> None:
        """Let a group go on later. If it has no output to go on with, its prompt waits again, in its turn."""
        if number not in self.rule.running:
            return
        group = self.groups[number].again()
        if group.before is not None:
            self.groups[number] = group
            self.stopped.add(number)
        else:
            self.rule.gave_up(number)
            del self.groups[number]
            self._wait(waiting_prompt(group.turn, group.prompt)._replace(is_long=group.is_long))
        self._admit()

    def _wait(self, prompt: WaitingPrompt) -> None:
        """Let a prompt wait in its turn."""
        insort(self.waiting, prompt, key=lambda each: each.turn)

    def _gave_up(self, number: int, fate: Fate) -> None:
        self.rule.gave_up(number)
        self._over(fate, self.groups.pop(number))

    def _drop(self, number: int) -> None:
        """Stop a group that has become too old."""
        group = self.groups.pop(number)
        self.stopped.discard(number)
        if self.request.on_stale == "defer":
            self.since.deferred.append(group.prompt.id or "")
            self.deferred.append(waiting_prompt(group.turn, group.prompt))
            self.kept.again(group.turn)
        else:
            self.since.dropped.append(group.prompt.id or "")
        if self.request.on_stale == "wait":
            self._warn('the weights were updated without a batch in between: "wait" had to drop groups.')
        task = self._tasks.get(number)
        if task is None or task.done():
            self._over("dropped", group)
            return
        task.add_done_callback(lambda _: self._dropped(group))
        task.cancel()

    def _dropped(self, group: FeedRollout) -> None:
        """Count a group that was stopped. Its last tokens are known by now."""
        group.usage = Usage(generated_tokens=group.num_tokens)
        self.generated_tokens += group.num_tokens
        self._over("dropped", group)

    def _over(self, fate: Fate, group: FeedRollout) -> None:
        usage = group.usage
        self.wasted_tokens += usage.wasted_tokens if fate == "trained" else group.num_before + usage.generated_tokens
        if fate == "dropped" and self.request.on_stale == "defer":  # its prompt runs again
            return
        self.meter.over(fate, group.size)
        self._metrics.over(fate)
        if fate != "trained":
            self.kept.left([group.turn], self.state)

    def _warn(self, warning: str) -> None:
        if warning not in self.since.warnings and len(self.since.warnings) < MAX_WARNINGS:
            self.since.warnings.append(warning)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def waiting_prompt(turn: int, prompt: Prompt) -> WaitingPrompt:
    return WaitingPrompt(turn, prompt, len(as_json(prompt)))


def as_json(prompt: Prompt) -> str:
    return prompt.model_dump_json(exclude_none=True)
