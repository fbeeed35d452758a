"""A feed that runs: prompts that wait, groups that run, and groups that are complete.

Invariant: each prompt that was put waits, runs, is complete, or is in exactly one list of a batch.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

from vllm_rollout.background import spawn
from vllm_rollout.kernel.call_table import CANCEL_GROUPS
from vllm_rollout.kernel.http.answers import Usage
from vllm_rollout.kernel.http.clients import act_for
from vllm_rollout.kernel.http.engine import Engine, RequestError
from vllm_rollout.kernel.http.protocol import Prompt
from vllm_rollout.kernel.rules.types import NOT_FINITE
from vllm_rollout.parts.feeds.http.answers import FailedPrompt
from vllm_rollout.parts.feeds.http.body import FeedRequest
from vllm_rollout.parts.feeds.http.kept import Kept
from vllm_rollout.parts.feeds.http.metrics import FeedMetrics
from vllm_rollout.parts.feeds.http.queue import PromptQueue, WaitingPrompt
from vllm_rollout.parts.feeds.http.running import AdmittedGroup, GroupEnd, GroupRunner, KeptOutput
from vllm_rollout.parts.feeds.http.since import SinceBatch
from vllm_rollout.parts.feeds.http.store import StoredFeed, StoredPrompt
from vllm_rollout.parts.feeds.rules.bias import BiasMeter, Fate, GroupSize
from vllm_rollout.parts.feeds.rules.feed import Feed, TakenGroup, Versions, WaitsFor
from vllm_rollout.parts.feeds.rules.finite import FiniteLogits
from vllm_rollout.parts.weights.http import recomputed

AGAIN_S = 1.0
"""Seconds until a group starts again that the engine could not take."""
PASSING = (409, 429, 503)
"""Statuses of errors after which a group starts again."""
MAX_STARTS = 16
"""Groups that start in one turn of the event loop, so that a feed which fills lets other requests have turns."""


class LiveFeed:
    """One feed of a client."""

    def __init__(
        self,
        id: str,
        request: FeedRequest,
        model: str,
        engine: Engine,
        make_runner: Callable[[LiveFeed], GroupRunner],
        check: Callable[[FeedRequest], Awaitable[object]],
        look: Callable[[str], Awaitable[None]],
        metrics: FeedMetrics,
        version: str | None,
        kept: Kept,
    ) -> None:
        """`check`: raises a RequestError if the server cannot serve the feed's fields. `look`: asks the engine for the
        name of a model's weights, and tells it to `weights_named`.
        """
        self.id, self.request, self.model, self.created = id, request, model, int(time.time())
        self.kept = kept
        self.is_held = False
        """True after a restart until weights are named. They may not be those of the feed before."""
        self.refusal: str | None = None
        """Reason why the server refuses the feed's fields. No group starts meanwhile."""
        self.finite = FiniteLogits()
        """No group starts under its `bad_version`."""
        self.rule = Feed(request.terms)
        self.versions = Versions(version)
        self.meter = BiasMeter()
        self.queue = PromptQueue()
        self.groups: dict[int, AdmittedGroup] = {}
        """Groups that run or are complete, by number."""
        self.stopped: set[int] = set()
        """Running groups that were stopped, and wait to go on."""
        self.since = SinceBatch()
        self.num_batches = self.generated_tokens = self.wasted_tokens = 0
        self.runner = make_runner(self)
        self._engine, self._metrics, self._check, self._look = engine, metrics, check, look
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._context = copy_context()
        """Groups start in the context of the feed's client, whoever makes room for them."""
        self._changed = asyncio.Event()
        self._admits_more: asyncio.Handle | None = None
        """Starts the next groups of a feed that fills."""

    def checked(self, prompts: list[Prompt]) -> list[WaitingPrompt]:
        """Prompts with ids and turns of their own. Raises: RequestError (409) for an id that is in the feed."""
        return self.queue.checked(prompts, (each.prompt for each in self.groups.values()))

    def put(self, prompts: list[WaitingPrompt]) -> None:
        """Add checked prompts."""
        self.queue.put(prompts)
        self.admit()

    @property
    def state(self) -> dict[str, Any]:
        """Numbers and names that a restart needs."""
        return {
            "version": self.rule.version,
            "weight_version": self.versions.name,
            "num_used": self.rule.num_used,
            "num_put": self.queue.num_put,
            "num_batches": self.num_batches,
            "since": self.since.state,
        }

    def take_up(self, stored: StoredFeed, namespace: str) -> None:
        """Continue from disk. Groups that ran when the server ended run again. Raises: ValueError, KeyError."""
        self._context.run(act_for, namespace)
        state, rule = stored.state, self.rule
        self.created = stored.created
        last = stored.prompts[-1].turn if stored.prompts else -1  # prompts are written without the numbers
        self.queue.num_put, self.num_batches = max(state["num_put"], last + 1), state["num_batches"]
        rule.version, rule.num_used = state["version"], state["num_used"]
        for each in stored.prompts:
            if each.born is not None and each.born > rule.version:  # a full disk has not taken the newest numbers
                rule.version, self.versions = each.born, Versions(each.fields["born_version"])
                rule.num_used = max(rule.num_used, rule.version * rule.terms.batch)
        self.since = SinceBatch.of_state(state.get("since", {}))  # older files have none
        self.is_held = True
        for turn, body, born, fields, answer, packed in sorted(stored.prompts, key=_by_birth):
            prompt = Prompt.model_validate_json(body)
            if born is None or rule.is_too_old(born):
                self.queue.again(WaitingPrompt.of(turn, prompt))
                continue
            number, rule.num_admitted = rule.num_admitted, rule.num_admitted + 1
            group = AdmittedGroup(prompt, turn, self.request.group_size, born, fields["born_version"])
            self.groups[number] = group
            if fields.get("is_long"):  # older files have none
                group.is_long = True
                rule.long.add(number)
            if packed is not None:
                rule.running[number] = born
                group.before = KeptOutput(packed, fields["indices"], fields["num_tokens"])
                self.stopped.add(number)
                rule.stopped(number, len(packed))
            else:
                rule.complete[number], rule.sizes[number] = born, len(answer)
                group.rollout_id, group.json = fields["rollout_id"], answer
                group.end = GroupEnd(GroupSize(fields["tokens"], fields["reward"]))

    def weights_named(self, name: str | None) -> None:
        """Note the name of the current weights. Another name than before is a weights update."""
        before = self.versions.name
        if name is not None and self.versions.goes_back(name):
            self.since.warn(f"the weights went back from {before!r} to {name!r}. This counts as an update.")
        was_held = self.is_held
        self.is_held = was_held and name is None and before is not None
        if self.versions.is_new(name):
            dropped = [self._drop(number) for number in self.rule.updated()]
            for group in self.running:
                group.priority = group.born - self.rule.version
            gone, anew = ([], dropped) if self.request.on_stale == "defer" else (dropped, [])
            self.kept.left(gone, self.state, anew)
            if self.request.on_update == "stop":
                self._stop_running()
            if self.request.on_update == "recompute":
                ids = [id for group in self.running if (id := group.rollout_id or group.group_id) is not None]
                if ids:
                    spawn(recomputed(self._engine, ids), "KV of a feed's groups")
            self.admit()
        elif was_held and not self.is_held:
            self.admit()

    def trust_weights(self) -> None:
        """Start groups again whose logits were not finite. KV by the weights of another model may have been why."""
        self.finite.bad_version = -1
        self.admit()

    async def check(self) -> None:
        """Find out whether the server refuses the feed's fields. If it no longer does, groups start again.

        Raises: RequestError if that cannot be said now.
        """
        before = self.refusal
        try:
            await self._check(self.request)
            self.refusal = None
        except RequestError as error:
            if error.status in PASSING:
                raise
            self.refusal = str(error)
        if self.refusal != before:
            self.admit()

    async def try_again(self) -> None:
        """Go on if the server refused the feed's fields, and does so no more."""
        if self.refusal is not None:
            with suppress(RequestError):
                await self.check()

    async def changed(self, timeout_s: float) -> None:
        """Wait until something has changed, but not longer than `timeout_s`."""
        changed = self._changed
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await changed.wait()

    def take(self, *, drain: bool) -> list[tuple[TakenGroup, AdmittedGroup]] | None:
        """The groups of the next batch. None: wait."""
        taken = self.rule.take(drain=drain and not self.queue)
        if taken is None:
            return None
        self.num_batches += 1
        found = [(each, self.groups.pop(each.number)) for each in taken]
        for each, group in found:
            self._over("trained", group)
            self._metrics.taken(each.staleness)
        self.admit()
        return found

    def report(self) -> SinceBatch:
        """Events since the last report."""
        since, self.since = self.since, SinceBatch()
        return since

    @property
    def running(self) -> Iterator[AdmittedGroup]:
        return (self.groups[number] for number in self.rule.running)

    @property
    def complete(self) -> Iterator[AdmittedGroup]:
        return (self.groups[number] for number in self.rule.complete)

    @property
    def waits_for(self) -> WaitsFor:
        """The reason why there is no batch."""
        reason = self.rule.waits_for(len(self.queue), len(self.stopped))
        if self.refusal is not None and reason != "trainer":
            return "fields"
        is_idle = reason == "weights" and self._may_start and self.rule.capacity > 0
        return "harness" if is_idle and not self.runner.is_ready else reason

    @property
    def _may_start(self) -> bool:
        """True if groups may start with the feed's fields under the current weights."""
        return not self.is_held and self.refusal is None and self.finite.bad_version != self.rule.version

    async def close(self) -> None:
        """Stop all groups."""
        self.queue.clear()
        self.stopped.clear()
        self.runner.close()
        self._notify()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def admit(self) -> None:
        """Let stopped groups go on unless a batch is complete, and start as many groups as there is room for."""
        may_start = self._may_start and self.runner.is_ready and self._admits_more is None
        if may_start and not self.rule.is_ready:
            going_on = sorted(self.stopped)[:MAX_STARTS]
            for number in going_on:
                self._start(number)
            self.stopped.difference_update(going_on)
            if self.stopped:  # they are older than prompts that wait
                self._start_more()
                may_start = False
        if may_start:
            self.queue.start_long(self.rule.num_long(len(self.queue.deferred), len(self.queue.waiting)))
        num_to_start = min(len(self.queue.waiting), self.rule.capacity) if may_start else 0
        if num_to_start > MAX_STARTS:
            self._start_more()
        for _ in range(min(num_to_start, MAX_STARTS)):
            turn, prompt, _, is_long = self.queue.next()
            number = self.rule.admit(is_long=is_long)
            born = self.rule.running[number], self.versions.name
            group = AdmittedGroup(prompt, turn, self.request.group_size, *born, is_long=is_long)
            self.groups[number] = group
            self._start(number)
        self._notify()

    def _start_more(self) -> None:
        def more() -> None:
            self._admits_more = None
            self.admit()

        self._admits_more = asyncio.get_running_loop().call_soon(more)

    def _start(self, number: int) -> None:
        group = self.groups[number]
        group.version, group.began_with = self.rule.version, self.versions.name
        group.priority = group.born - group.version
        task = self._context.run(spawn, self._run(number, group), "a group of a feed")
        task.add_done_callback(partial(self._forget, number))
        self._tasks[number] = task

    def _stop_running(self) -> None:
        """Stop groups that run. Those that have just come to the engine may run on."""
        running = {group.group_id: group for group in self.running if group.can_go_on and group.group_id is not None}
        for group in running.values():
            group.is_stopping = True
        if running:
            spawn(self._engine.calls.tell_groups(CANCEL_GROUPS, [*running]), "stopping a feed's groups")

    async def _run(self, number: int, group: AdmittedGroup) -> None:
        try:
            reason = await self._failure(number, group)
        except RequestError as error:
            await asyncio.sleep(error.retry_after_s or AGAIN_S)
            self.generated_tokens += group.num_tokens  # if it is dropped before, `_dropped` counts them
            self.wasted_tokens += group.num_tokens
            self._again(number)
            return
        except Exception as error:  # the feed goes on without this group
            self._ended(number, group, f"our code failed: {error!r}")
            raise
        self._ended(number, group, reason)

    async def _failure(self, number: int, group: AdmittedGroup) -> str | None:
        """Run a group. Returns the error for which its prompt fails. Raises: RequestError for one that may pass."""
        try:
            await self.runner.run(number, group)
        except RequestError as error:
            if error.status not in PASSING:
                await self.check()
                if self.refusal is None:  # so it is the prompt that the server refuses
                    return str(error)
            raise
        if group.saw_bad_weights and not group.is_complete:  # another API process may have got them
            await self._look(self.model)
        return None

    def _ended(self, number: int, group: AdmittedGroup, reason: str | None) -> None:
        if number not in self.rule.running:  # it was dropped at its very end
            return
        self.generated_tokens += group.usage.generated_tokens
        name = group.prompt.id or ""
        if group.saw_bad_weights and not group.is_complete:
            if self.finite.blames_weights(group.turn, name, group.version, self.rule.version):
                self.since.warn(f"prompt {name!r}: {NOT_FINITE} Its group starts again.")
                self.wasted_tokens += group.usage.generated_tokens
                group.kept = None  # by weights that may be bad
                self._again(number)
                return
            reason = NOT_FINITE
        for warning in group.warnings:
            self.since.warn(warning)
        if group.was_stopped:
            goes_on_with = group.kept or group.before
            num_kept = 0 if goes_on_with is None else goes_on_with.num_tokens
            self.wasted_tokens += group.num_before + group.usage.generated_tokens - num_kept
            if group.kept is not None:
                self.kept.stopped(group, group.kept)
            self._again(number)
            return
        if group.is_complete:
            self.finite.completed(group.version, self.rule.version)
        filters = self.request.filter is not None
        if not group.is_complete or (filters and group.size.reward is None):
            lacks = "none of its answers has a reward." if group.is_complete else "its candidates were stopped."
            reason = reason or (group.end and group.end.reason) or lacks
            self.since.failed.append(FailedPrompt(prompt_id=name, reason=reason))
            self._gave_up(number, "failed")
        elif filters and not group.teaches:
            self.since.filtered.append(name)
            self._gave_up(number, "filtered")
        else:
            self.rule.completed(number, len(group.json))
            group.before = group.before and replace(group.before, packed=b"")
            self.kept.completed(group)
            self._put_back()
        self.admit()

    def _forget(self, number: int, task: asyncio.Task[None]) -> None:
        if self._tasks[number] is task:  # a group that goes on has another one
            del self._tasks[number]

    def _put_back(self) -> None:
        """Let prompts wait again whose groups have no place in the engine, if the feed has too many bytes."""
        if not self.rule.is_full:
            return
        groups = ((number, self.groups[number]) for number in self.rule.running)
        queue = [number for number, group in groups if group.group_id is None and group.before is None]
        for number in self.rule.too_many(queue):
            self._tasks[number].cancel()
            self._again(number)
        if self.queue.waiting:
            self.since.warn(
                f"complete and stopped groups have {self.rule.num_bytes} bytes, at most {self.rule.max_bytes} may: no "
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
            self.rule.stopped(number, len(group.before.packed))
            self._put_back()
        else:
            self.rule.gave_up(number)
            del self.groups[number]
            self.queue.again(WaitingPrompt.of(group.turn, group.prompt, is_long=group.is_long))
        self.admit()

    def _gave_up(self, number: int, fate: Fate) -> None:
        self.rule.gave_up(number)
        self._over(fate, self.groups.pop(number))

    def _drop(self, number: int) -> int:
        """Stop a group that has become too old. Returns the turn of its prompt."""
        group = self.groups.pop(number)
        self.stopped.discard(number)
        if self.request.on_stale == "defer":
            self.since.deferred.append(group.prompt.id or "")
            self.queue.defer(WaitingPrompt.of(group.turn, group.prompt))
        else:
            self.since.dropped.append(group.prompt.id or "")
        if self.request.on_stale == "wait":
            self.since.warn('the weights were updated without a batch in between: "wait" had to drop groups.')
        task = self._tasks.get(number)
        if task is None or task.done():
            self._over("dropped", group)
            return group.turn
        task.add_done_callback(lambda _: self._dropped(group))
        task.cancel()
        return group.turn

    def _dropped(self, group: AdmittedGroup) -> None:
        """Count a group that was stopped. Its last tokens are known by now."""
        group.usage = Usage(generated_tokens=group.num_tokens)
        self.generated_tokens += group.num_tokens
        self._over("dropped", group)

    def _over(self, fate: Fate, group: AdmittedGroup) -> None:
        usage = group.usage
        self.finite.forget(group.turn)
        self.wasted_tokens += usage.wasted_tokens if fate == "trained" else group.num_before + usage.generated_tokens
        if fate == "dropped" and self.request.on_stale == "defer":  # its prompt runs again
            return
        self.meter.over(fate, group.size)
        self._metrics.over(fate)
        if fate not in ("trained", "dropped"):
            self.kept.left([group.turn], self.state)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _by_birth(stored: StoredPrompt) -> tuple[float, int]:
    """Orders prompts on disk as their groups were born. Prompts that wait come last."""
    return math.inf if stored.born is None else stored.born, stored.turn
