"""Runs of rounds. Invariant: the prompts of a round are on disk before anything of it runs, and its outcome is on
disk before its answer is sent."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from vllm_rollout.background import begin, heard, spawn
from vllm_rollout.kernel.http.clients import client_namespace, id_of, owned_name
from vllm_rollout.kernel.http.engine import Engine, EngineStopped, RequestError
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.http.rollout import Rollout
from vllm_rollout.kernel.http.service import RolloutService
from vllm_rollout.kernel.http.slices import chained
from vllm_rollout.kernel.parts import faces
from vllm_rollout.kernel.rules.prompt_key import history_key
from vllm_rollout.parts.rounds.calls import FORGET_RACE
from vllm_rollout.parts.rounds.http.answers import RunAnswer, RunsAnswer, UnreadableRunAnswer
from vllm_rollout.parts.rounds.http.body import ONE_REWARD, RoundRequest, RunRequest, digest_of_prompt
from vllm_rollout.parts.rounds.http.course import RoundCourse
from vllm_rollout.parts.rounds.http.ended_groups import EndedGroups
from vllm_rollout.parts.rounds.http.faults import PASSING
from vllm_rollout.parts.rounds.http.live import (
    Begun,
    LastEvent,
    LiveEvent,
    LiveRound,
    first_event,
    made_answer,
    summary,
)
from vllm_rollout.parts.rounds.http.metrics import RoundMetrics
from vllm_rollout.parts.rounds.http.of_sessions import of_sessions
from vllm_rollout.parts.rounds.http.plan import RoundPart
from vllm_rollout.parts.rounds.http.request import (
    as_before,
    bodies_of,
    check_not_used,
    check_resumable,
    check_same,
    check_unchanged,
    not_written,
    reopened,
    resumed,
    rollout_request,
    round_request,
    without_speculation,
)
from vllm_rollout.parts.rounds.http.resumed import Resumption
from vllm_rollout.parts.rounds.http.rewards import RunRewards
from vllm_rollout.parts.rounds.http.rollout_round import RolloutRound
from vllm_rollout.parts.rounds.http.store import RunStore
from vllm_rollout.parts.rounds.http.stored import EndedGroup, Looked, PlannedRound, StoredRun, UnreadableRun, run_answer
from vllm_rollout.parts.rounds.rules.rounds import FreshPrompt, RoundError, Run

T = TypeVar("T")

RELEASE_AGAIN_S = 1.0
"""Seconds after which a failed release of a round is repeated, so that other processes see it."""
CHECK = {"id": "check", "prompt_token_ids": [0]}
"""Stands for a run's prompts when the run's fields are checked."""


class RunService:
    """Serves the endpoints of runs."""

    def __init__(
        self,
        rollouts: RolloutService,
        engine: Engine,
        store: RunStore,
        metrics: Metrics,
    ) -> None:
        self._rollouts = rollouts
        self._observers = [make(rollouts) for _, make in faces("round_observer")]
        """Functions that get the summary of each round, and the queue of its run."""
        self.sessions: Any = None
        """The service of sessions. None if this server has none."""
        self.engine = engine
        self._store = store
        self._metrics = metrics.of(RoundMetrics)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm_rollout-runs")
        """A single thread, so that transactions come one after the other."""
        self._live: dict[str, LiveRound] = {}
        """Running rounds, by the id of their rollout or of their sessions."""
        rollouts.rewards.takers.insert(0, RunRewards(self._live).rewarded)  # a round learns of its rewards first
        self.length_history: Callable[..., Awaitable[Any]] | None = None
        """Lengths of prompts, by their keys and adapter (`ShapingPart.length_history`). None: no lengths are known."""
        self._parallelism: Any = None
        """Part of rounds with shaping, if the engine's size may change."""
        self._unkept: dict[str, LiveRound] = {}
        """Last round of a run, by run, if it is over but not written yet."""

    def resize_by(self, parallelism: Any) -> None:
        """Change the engine's size between rounds from now on."""
        self._parallelism = parallelism
        parallelism.has_live_round = lambda: bool(self._live)

    async def create(self, request: RunRequest) -> tuple[RunAnswer, bool]:
        """Create a run. Returns it, and True if it is new. Raises: RequestError, 409 if a run of that id has other
        terms."""
        name = _name(request.id or f"run-{uuid.uuid4().hex[:12]}")
        terms = request.terms
        try:
            terms.check(request.num_candidates(self.engine.max_num_seqs))
        except RoundError as error:
            raise RequestError(str(error), param=error.field) from error
        checked = await self._checked(request)
        stored, is_new = await self._stored(self._store.create, name, checked.model, request.settings, terms)
        await self._choose_start(stored)
        return self._answer_of(stored), is_new

    async def _checked(self, request: RunRequest) -> Rollout:
        """Check a run's fields by preparing a rollout of one prompt, as a short round has it. Raises: RequestError."""
        size, num_candidates, fields = request.group_size, request.terms.num_candidates, request.rollout_fields()
        if request.sessions is not None:
            self._check_has_sessions()
            of_sessions.check(self.sessions, request)
            size, num_candidates, fields = 1, 1, {}
        check = {**fields, "prompts": [CHECK], "model": request.model}
        checked = await self._rollouts.prepare(rollout_request(check, size, num_candidates))
        if request.resume:
            check_resumable(checked)
        return checked

    def _check_has_sessions(self) -> None:
        if self.sessions is None:
            raise RequestError("sessions: this server has none. Leave it out.", param="sessions")

    async def read(self, id: str) -> RunAnswer:
        """A run as it is now. Raises: RequestError (404)."""
        return self._answer_of(await self._stored(self._store.read, _name(id)))

    async def list(self) -> RunsAnswer:
        """All runs of this client. Unreadable ones are listed separately."""
        answer = RunsAnswer(data=[])
        for found in await self._stored(self._store.list, client_namespace()):
            if isinstance(found, UnreadableRun):
                answer.unreadable.append(UnreadableRunAnswer(id=found.id, message=str(found)))
            else:
                answer.data.append(self._answer_of(found))
        return answer

    async def delete(self, id: str) -> None:
        """Delete a run. Raises: RequestError (404, or 409 while a round of it runs)."""
        await self._stored(self._store.delete, _name(id))

    async def give_up(self, id: str, number: int) -> RunAnswer:
        """Put the prompts of an interrupted round back. Raises: RequestError (404, or 409 while it runs)."""
        return self._answer_of(await self._stored(self._store.give_up, _name(id), number))

    async def begin(self, id: str, request: RoundRequest) -> Begun | bytes:
        """Begin a round. Returns its answer instead if the key already has one. Raises: RequestError, and then no
        prompt was taken."""
        key = request.idempotency_key or f"round-{uuid.uuid4().hex}"
        name = _name(id)
        looked = await self._looked(name, key)
        if self._parallelism is not None and looked.answer is None:
            await self._choose_start(looked.stored)
            await self._parallelism.before_round()
            looked = await self._looked(name, key)  # it may have waited
        if looked.answer is not None:
            check_same(key, request, looked.answer.memo)
            return looked.answer.body
        if (opened := looked.stored.run.open) is not None and opened.key == key:
            live = await self._take_again(name, request, key)
        else:
            live = await self._take(looked.stored, request, key)
        self._live[live.id] = live
        if self._parallelism is not None:
            live.rebuilt = self._parallelism.take_rebuilt()
        events = self._events(live)
        first = await anext(events)
        return Begun(live, chained(first, events))

    async def _looked(self, name: str, key: str) -> Looked:
        """The run and the state of the key, after pending writes.

        Raises: RequestError, 409 while another round of the run cannot be written, 410 for the key of an earlier round.
        """
        while True:
            over = self._unkept.get(name)
            if over is not None and over.opened.key == key:
                await self._keep(over)
            elif over is not None and over.keeping is not None:  # another trainer's
                await asyncio.wait([over.keeping])
            looked = await self._stored(self._store.look, name, key)
            over = self._unkept.get(name)
            if over is None or looked.answer is not None:
                break
            if over.keeping is None and over.opened.key != key:
                raise not_written(over.opened, key)
        if looked.answer is None:
            check_not_used(looked, key)
        return looked

    async def _choose_start(self, stored: StoredRun) -> None:
        """Choose the engine's size before the very first round, if a profile allows it."""
        if self._parallelism is None or not self._parallelism.wants_start or stored.request.sessions is not None:
            return
        assert self.length_history is not None, "it comes with parallelism"
        seen = (await self.length_history([])).dataset
        await self._parallelism.begin(stored.request, seen, self.engine.max_model_len, stored.id)

    async def answer(self, begun: Begun) -> bytes:
        """Run a round to its end. Returns its answer as JSON."""
        async with aclosing(begun.events) as events:
            async for _ in events:
                pass
        return begun.live.answer

    async def saved_runs(self) -> Sequence[Mapping[str, Any]]:
        """All runs of this client, for a saved state."""
        return await self._stored(self._store.dump, client_namespace())

    async def check_idle(self) -> None:
        """Raises: RequestError (409) while a round of this client runs."""
        await self._stored(self._store.check_all_idle, client_namespace())

    async def replace_runs(self, namespace: str, runs: Sequence[Mapping[str, Any]], staged: str) -> None:
        """Replace all runs of a client. `staged`: name of the learned state that belongs to them.

        Raises: RequestError, 503 and 507 when the database does not take them.
        """
        await self._stored(self._store.replace, runs, staged, namespace=namespace)

    async def _take_again(self, name: str, request: RoundRequest, key: str) -> LiveRound:
        """Take up a round that was interrupted."""
        planned = await self._stored(self._store.planned, name, partial(reopened, id_of(name), key))
        check_same(key, request, planned.stored.memo)
        assert planned.stored.memo is not None  # a round is open
        live = await self._prepare(planned, as_before(id_of(name), planned.opened, request, planned.stored.memo), {})
        if live.ended is not None:
            await asyncio.to_thread(live.take_up, planned)
        await self._see_weights(planned.stored)
        # Last, because a step that failed after it would leave the round without release.
        live.owner = await self._owned(name, self._store.claim, name, planned.opened)
        return live

    async def _take(self, stored: StoredRun, request: RoundRequest, key: str) -> LiveRound:
        """Check a new round, then take its prompts."""
        fresh = [_fresh(prompt, request.epoch) for prompt in request.prompts]
        reserve = [_fresh(prompt, request.epoch) for prompt in request.reserve]
        predicted = await self._predicted(stored)
        plan = partial(Run.plan, key=key, fresh=fresh, reserve=reserve, kind=request.kind, predicted=predicted)
        bodies = {prompt.id: prompt.model_dump_json() for prompt in (*request.prompts, *request.reserve)}
        planned = await self._stored(self._store.planned, stored.name, plan)
        live = await self._prepare(planned, request, bodies)
        memo, opened = request.memo(), planned.opened
        await self._see_weights(stored)
        live.owner = await self._owned(stored.name, self._store.begin, stored.name, memo, plan, bodies, opened)
        return live

    async def _see_weights(self, stored: StoredRun) -> None:
        """Check that the weights are not those of a server that has started anew. Raises: RequestError (412)."""
        if self._store.is_durable:
            version = await self.engine.current_weight_version(stored.model)
            await self._stored(self._store.see_weights, stored.name, version)

    async def _predicted(self, stored: StoredRun) -> dict[str, float]:
        """Mean lengths of waiting prompts by id, as far as they are known."""
        run = stored.run
        if run.terms.queue_order == "first_in" or not run.queue or self.length_history is None:
            return {}
        ids = list(dict.fromkeys(entry.prompt_id for entry in run.queue))
        adapter = self.engine.adapter_name(stored.model)
        history = await self.length_history([history_key(id, ()) for id in ids], adapter)
        return {id: known.mean for id, known in zip(ids, history.prompts, strict=True) if known is not None}

    async def _prepare(self, planned: PlannedRound, request: RoundRequest, fresh: Mapping[str, str]) -> LiveRound:
        """Check everything before prompts are taken. `fresh`: bodies of fresh prompts, by id. Raises: RequestError."""
        stored, opened, defaults = planned.stored, planned.opened, planned.stored.request
        filters = (request.filter or defaults.filter) is not None
        if defaults.sessions is not None:
            self._check_has_sessions()
            prompts = await asyncio.to_thread(bodies_of, planned, fresh)
            rounds: LiveRound = of_sessions.prepared(self.sessions, planned, request, prompts, filters=filters)
            if self._store.is_durable:
                self._keep_groups_of(rounds, await self.engine.current_weight_version(stored.model))
            return rounds
        if defaults.resume:
            check_unchanged(request, defaults)
        if filters and defaults.group_size < 2:
            raise RequestError(f"filter: {ONE_REWARD}", param="filter")
        if filters and request.reward is None and defaults.reward is None and not request.stream:
            raise RequestError(
                "stream: a round that filters needs true, got false: its rewards are posted while it is on its "
                "way. Set it, or name a reward by which the server grades.",
                param="stream",
            )
        prompts = await asyncio.to_thread(bodies_of, planned, fresh)
        fields = {
            **defaults.rollout_fields(),
            **request.rollout_fields(),
            "sampling_params": {**(defaults.sampling_params or {}), **(request.sampling_params or {})},
            "stream": request.stream,
            "stream_tokens": request.stream_tokens,
            "model": stored.model,
        }
        num_candidates = stored.run.terms.num_candidates
        if opened.kind == "long":
            fields, num_candidates = without_speculation(fields), stored.run.terms.group_size
        if opened.wants_all:  # else it starts its prompts as they come from the queue
            fields["order"] = "auto"
        body = await asyncio.to_thread(round_request, fields, prompts, stored.run.terms.group_size, num_candidates)
        rollout = await self._rollouts.prepare(body)
        rollout.seed_names = [entry.prompt.seed_name for entry in opened.all_entries]
        rollout.plans = [
            replace(plan, group=replace(plan.group, num_replaceable=plan.group.num_candidates))
            for plan in rollout.plans
        ]
        # A filter by rewards that are posted would need those, too, and they come again with the groups.
        keeps_ended = self._store.is_durable and not (filters and not rollout.is_graded)
        needs_version = defaults.resume or keeps_ended
        version = await self.engine.current_weight_version(stored.model) if needs_version else None
        resumption = None
        if defaults.resume:
            check_resumable(rollout)
            before, unreadable = await asyncio.to_thread(resumed, planned)
            rollout.began_with = version
            resumption = Resumption(opened.kind == "short", before)
            rollout.warnings += unreadable
        course = RoundCourse(self.engine, rollout.id, opened, filters=filters)
        course.progress.start_in([position async for position in rollout.course.positions()])
        rollout.course, rollout.stops_groups = course, opened.kind == "short"
        rollout.parts = [*rollout.parts, RoundPart(self.engine, rollout, course, resumption)]
        rollout.labels = {"run": stored.id, "round": opened.number, "kind": opened.kind}
        rollout.has_client = True
        live = RolloutRound(
            id=rollout.id,
            run_name=stored.name,
            progress=course.progress,
            rollout=rollout,
            course=course,
            resumption=resumption,
            run=self._rollouts.events,
        )
        if keeps_ended:
            self._keep_groups_of(live, version)
        return live

    def _keep_groups_of(self, live: LiveRound, version: str | None) -> None:
        """Write groups to disk that end before the round does. `version`: of the current weights."""

        async def write(groups: Mapping[int, EndedGroup]) -> None:
            await self._stored(self._store.keep_ended, live.run_name, live.owner, groups)

        live.ended = EndedGroups(write, version)

    async def _events(self, live: LiveRound) -> AsyncGenerator[LiveEvent, None]:
        try:
            yield first_event(live)
            async with aclosing(live.events(partial(self._keep, live))) as events:
                async for event in events:
                    yield event
        finally:
            # Nothing is awaited here: a cancellation at an await would leave the round unreleased.
            del self._live[live.id]
            if self._parallelism is not None:
                self._parallelism.round_left()
            if not live.is_kept and self._unkept.get(live.run_name) is not live:
                self._release(live.run_name, live.owner)
            if isinstance(live, RolloutRound):
                self._forget(live.course.race_id)

    async def _keep(self, live: LiveRound) -> LastEvent:
        """Write the outcome of a round once, however many callers wait for it or leave.

        Raises: RequestError. The round can then be requested again.
        """
        if live.keeping is None:
            self._unkept[live.run_name] = live
            live.keeping = begin(self._write(live))
        return await heard(live.keeping, "keeping a round", refusals=(RequestError,))

    async def _write(self, live: LiveRound) -> LastEvent:
        outcomes, spent = live.progress.outcomes(), live.spent()
        try:
            run = await self._stored(
                self._store.close,
                live.run_name,
                live.owner,
                outcomes,
                partial(made_answer, live),
                **spent._asdict(),
            )
        except BaseException as error:
            live.keeping = None
            if not (isinstance(error, RequestError) and error.status in PASSING):
                # A second attempt would fail, too: the round is released, and runs anew under its key.
                del self._unkept[live.run_name]
                self._release(live.run_name, live.owner)
            raise
        del self._unkept[live.run_name]
        live.is_kept = True
        fates = [outcome.fate for outcome in outcomes.values()]
        self._metrics.round_over(live.opened.kind, fates, spent.latency_s)
        if self._parallelism is not None and isinstance(live, RolloutRound):
            self._parallelism.round_over(live, self.engine.max_num_seqs * self.engine.num_ranks)
        told = summary(live, run)
        for observe in self._observers:
            observe(told, [entry.prompt_id for entry in run.queue])
        return live.done(told)

    def _forget(self, race_id: str) -> None:
        async def forget() -> None:
            with suppress(EngineStopped):  # reported elsewhere
                await self.engine.calls.tell_groups(FORGET_RACE, race_id)

        spawn(forget(), "forgetting a race")

    def _answer_of(self, stored: StoredRun) -> RunAnswer:
        parallelism = None if self._parallelism is None else self._parallelism.answer()
        groups = [group for live in self._live.values() if live.run_name == stored.name for group in live.groups_to_run]
        return run_answer(
            stored,
            is_live=self._store.is_live(stored),
            is_durable=self._store.is_durable,
            parallelism=parallelism,
            groups=groups,
        )

    async def _owned(self, name: str, call: Callable[..., str], *args: Any) -> str:
        """Run a transaction that returns the new owner of a round. If the caller is cancelled meanwhile, the round
        is released."""
        work = self._submitted(call, *args)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(partial(self._release_unless_failed, name))
            raise

    def _release_unless_failed(self, name: str, work: asyncio.Future[str]) -> None:
        if work.exception() is None:
            self._release(name, work.result())

    def _release(self, name: str, owner: str) -> None:
        """Release a round that no longer runs. Until that is on disk, other processes take it for running."""

        def again(work: asyncio.Future[None]) -> None:
            error = work.exception()
            if isinstance(error, RequestError) and error.status in PASSING:
                work.get_loop().call_later(RELEASE_AGAIN_S, self._release, name, owner)

        self._submitted(self._store.release, name, owner).add_done_callback(again)

    async def _stored(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a transaction, to its end even if the caller goes away."""
        return await heard(self._submitted(call, *args, **kwargs), "a run on disk", refusals=(RequestError,))

    def _submitted(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, partial(call, *args, **kwargs))


def _name(id: str) -> str:
    """Name of a run, from the id that the current client has for it."""
    return owned_name(client_namespace(), id)


def _fresh(prompt: Any, epoch: int | None) -> FreshPrompt:
    return FreshPrompt(prompt.id, epoch, digest_of_prompt(prompt))
