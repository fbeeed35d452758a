"""Rollouts: prompts in, events out.

Invariant: every launched group ends with one `group` or `deferred` event, and generated + resumed = returned + wasted
tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from itertools import chain
from operator import is_

from vllm_rollout.background import survived, to_its_end
from vllm_rollout.kernel.call_table import CANCEL_GROUPS
from vllm_rollout.kernel.http.aborts import Aborts, not_launched
from vllm_rollout.kernel.http.admin import AdminKey
from vllm_rollout.kernel.http.answers import DoneEvent, Event, RanksFreeEvent, RolloutAnswer
from vllm_rollout.kernel.http.clients import client_headers, client_namespace
from vllm_rollout.kernel.http.engine import CandidateEnd, Engine, EngineStopped, Kind, PromptInput, RequestError
from vllm_rollout.kernel.http.fan_in import FanIn
from vllm_rollout.kernel.http.gauges import EngineGauges
from vllm_rollout.kernel.http.launch import Launcher, Places
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.http.plan_port import ASKS_A_PART, Draft, Given, PlanPart
from vllm_rollout.kernel.http.protocol import DualEnd, DualEndSelection, RolloutRequest
from vllm_rollout.kernel.http.reward_door import RewardDoor
from vllm_rollout.kernel.http.rollout import Course, Rollout, alike, check_max_candidates, check_num_candidates, cut
from vllm_rollout.kernel.http.serialised import GroupsInJson
from vllm_rollout.kernel.http.slices import each
from vllm_rollout.kernel.http.started_group import StartedGroup
from vllm_rollout.kernel.part_terms import why_unread
from vllm_rollout.kernel.parts import faces, faces_left_out
from vllm_rollout.kernel.rules.fields import PLAN_FIELDS
from vllm_rollout.kernel.rules.launch import Asker
from vllm_rollout.kernel.rules.plan import GroupPlan, PromptPlan, make_plan, upper_bound
from vllm_rollout.kernel.rules.prompt_key import history_key
from vllm_rollout.kernel.rules.request_names import rollout_id
from vllm_rollout.kernel.rules.rewards import Reward
from vllm_rollout.kernel.rules.rows import PlanError
from vllm_rollout.kernel.rules.types import ABORTED

EVENT_BUFFER = 256
"""Events of a rollout that wait for a slow reader. Beyond them each group waits with one event, and the engine goes
on.

Tokens that are generated meanwhile are held once, in at most three messages per candidate (`run_candidates`), and
arrive as longer `tokens` events. Groups of other rollouts never wait.
"""

SEE_OUT_S = 10.0
"""Seconds that groups without a reader may take to stop before their requests are aborted. They need one step,
unless generation is paused."""
SEE_OUT_INTERVAL_S = 0.1

OF_PARTS = "a part at the end of a rollout"
"""The name of an exception of a part there. The other parts go on, and give back what they hold."""

NAMES = {field: f"selection.dual_end.{field}" for field in DualEnd.model_fields} | {
    "allow_fewer": "pruning.allow_fewer"
}
"""Fields of a plan -> their names in the body."""


def _why_unread(field: str) -> str:
    return why_unread("plan", lambda part: field in part.fields)


class RolloutService:
    """Runs rollouts on an engine."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        admin_key: AdminKey | None = None,
        audit_ratio: float = 0.0,
    ) -> None:
        self.admin_key = admin_key
        """None: all clients of the server may replace heads and states."""
        self.engine = engine
        self._metrics = metrics
        self.gauges = EngineGauges(engine, metrics, clock)
        self._clock = clock
        self.rewards = RewardDoor(self._rewards_posted)
        given = Given(engine, metrics, clock, self.rewards, audit_ratio)
        self._parts: list[PlanPart] = [make(given) for _, make in faces("plan")]
        self._launcher = Launcher(engine.num_launch_places)
        self.active: dict[str, Rollout] = {}
        """Running rollouts by id."""
        self.aborts = Aborts(engine, self.active)
        self._bodies_left_out = [body for _, body in faces_left_out("fields")]

    async def prepare(self, request: RolloutRequest) -> Rollout:
        """Check a request and prepare its rollout: plans, prompts, warnings. Nothing is launched before all checks.

        Raises: RequestError that names the field.
        """
        self._check_fields(request)
        parts = [made for part in self._parts if (made := part.asked(request)) is not None]
        plan, warnings = self._plan(request), list[str]()
        for part in parts:
            plan = await part.choose(request, plan, warnings)
        check_max_candidates(request, plan)
        for part in parts:
            part.check(request, plan)
        check_num_candidates(len(request.prompts), plan.num_candidates)
        inputs = [
            PromptInput(
                prompt.id if prompt.id is not None else str(position),
                position,
                prompt.messages,
                prompt.prompt,
                prompt.prompt_token_ids,
            )
            for position, prompt in enumerate(request.prompts)
        ]
        model, prompts = await self.engine.prepare(
            inputs,
            request.model,
            request.sampling_params,
            want_logprobs="logprobs" in request.include,
            want_text="text" in request.include or request.reward is not None,
        )
        adapter = self.engine.adapter_name(request.model)
        pairs = zip(request.prompts, prompts, strict=True)
        keys = await each(pairs, lambda pair: history_key(pair[0].id, pair[1].token_ids))
        plans = [PromptPlan(plan, key) for key in keys]
        draft = Draft(request, plan, adapter, prompts, plans, range(len(plans)), warnings)
        for part in parts:
            await part.shape(draft)
        for part in parts:
            part.audit(draft)
        rollout = Rollout(
            id=rollout_id(client_headers().get("x-request-id")),
            created=int(time.time()),
            namespace=client_namespace(),
            model=model,
            adapter=adapter,
            plans=draft.plans,
            prompts=prompts,
            seed_names=[prompt.id for prompt in prompts],
            included=frozenset(request.include),
            stream_tokens=request.stream_tokens,
            course=Course(draft.positions),
            on_engine_failure=request.on_engine_failure,
            priority=request.priority,
            is_graded=request.reward is not None,
            budget=draft.budget,
            warnings=[*draft.warnings, *alike(request, plan), *cut(request, self.engine.max_model_len)],
        )
        rollout.parts = parts
        for part in parts:
            await part.ready(request, rollout)
        rollout.outcome.usage.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        return rollout

    def _plan(self, request: RolloutRequest) -> GroupPlan:
        """The plan of every prompt. With redundancy "auto" it has the largest number of candidates."""
        group = {field: value for field, value in request if field in PLAN_FIELDS}
        if isinstance(request.selection, DualEndSelection):
            group |= {"selection": "dual_end", **request.selection.dual_end.model_dump()}
        most = self.engine.max_num_seqs
        if request.tradeoff is not None:
            group["redundancy"] = max(0, upper_bound(request.group_size, most) - request.group_size)
        try:
            return make_plan(request.group_size, **group, parts=request.part_terms(), max_candidates=most, names=NAMES)
        except PlanError as error:
            raise RequestError(str(error), param=error.field) from error

    def _check_fields(self, request: RolloutRequest) -> None:
        """Raises: RequestError for a field whose part is not there."""
        for body in self._bodies_left_out:
            for field, its in body.model_fields.items():
                if getattr(request, field) != its.default:
                    raise RequestError(f"{field}: {why_unread('fields', partial(is_, body))}", param=field)
        for field, asks in ASKS_A_PART.items():
            if asks(request) and not any(field in part.fields for part in self._parts):
                raise RequestError(f"{field}: {_why_unread(field)}", param=field)

    def part(self, kind: type[Kind]) -> Kind:
        """A part's object for all rollouts, by its class. Raises: LookupError if there is none."""
        for part in self._parts:
            if isinstance(part, kind):
                return part
        raise LookupError(f"no part has {kind.__name__} for rollouts")

    async def answer(self, rollout: Rollout) -> list[bytes]:
        """Run a rollout to its end. Returns a RolloutAnswer as JSON, in parts."""
        groups = GroupsInJson()
        async with aclosing(self.events(rollout)) as events:
            async for event in events:
                await groups.add(event)
        envelope = RolloutAnswer(**rollout.envelope(), groups=[])
        return groups.answer(envelope, (prompt.id for prompt in rollout.prompts))

    async def events(self, rollout: Rollout) -> AsyncGenerator[Event, None]:
        """Run all groups. Yields their events as they happen, and `done` last.

        Closing the generator stops running candidates as `deferred`: they are neither failed nor judged, and their
        lengths so far are learned.
        """
        started = self._clock()
        events: FanIn[Event | None] = FanIn(EVENT_BUFFER)
        groups: dict[str, asyncio.Task[None]] = {}
        """Tasks of launched groups, by group id."""

        async def launch() -> AsyncGenerator[None, None]:
            async for position in rollout.course.positions():
                yield  # its turn among the events: a rollout whose reader is behind starts no more groups
                places = await self._places(rollout, position)
                if places is not None:
                    group = self._group_events(rollout, position, started, places)
                    # Without a reader the engine goes on, and others may need the places.
                    groups[rollout.group_id(position)] = events.add(group, places.release_all)

        launching = events.add(launch())
        self.active[rollout.id] = rollout
        for part in rollout.parts:
            part.begun(events.put)
        left = True
        try:
            async for event in events:
                if isinstance(event, RanksFreeEvent):
                    rollout.outcome.freed = event
                if event is not None:
                    yield event
            rollout.outcome.timing.latency_s = self._clock() - started
            started_s = rollout.outcome.started_s
            rollout.outcome.timing.started_s = [started_s.get(at) for at in range(len(rollout.prompts))]
            for part in rollout.parts:
                await part.finished()
            await self.gauges.refresh()
            rollout.warnings += rollout.outcome.warnings()
            for part in rollout.parts:
                rollout.warnings += await part.warn()
            left = False
            yield DoneEvent(**rollout.envelope())
        except (asyncio.CancelledError, GeneratorExit):
            if left and rollout.has_client:
                self._metrics.client_left("rollout")
            raise
        finally:
            launching.cancel()
            ending = self._end(rollout, launching, groups, events, left=left)
            await to_its_end(ending, "end of a rollout")  # a client that leaves now does not interrupt it

    async def _end(
        self,
        rollout: Rollout,
        launching: asyncio.Task[None],
        groups: Mapping[str, asyncio.Task[None]],
        events: FanIn[Event | None],
        *,
        left: bool,
    ) -> None:
        """Stop what still runs of a rollout, and record it. `left`: its client did not wait for the end."""
        await asyncio.gather(launching, return_exceptions=True)
        launched: list[Collection[str]] = []
        for part in rollout.parts:
            with survived(OF_PARTS):
                launched.append(part.leave())
        await self._see_out({id: task for id, task in groups.items() if not task.done()}, launched, events)
        del self.active[rollout.id]
        for part in rollout.parts:
            with survived(OF_PARTS):
                part.over(left=left)
        for part in rollout.parts:
            with survived(OF_PARTS):
                await part.close()

    async def _see_out(
        self, groups: Mapping[str, asyncio.Task[None]], launched: Iterable[Collection[str]], events: FanIn[Event | None]
    ) -> None:
        """Stop groups without a reader, and let each of them come to its end. `launched`: names of groups that each
        part has launched for them besides."""
        if not groups:
            return
        dropping = asyncio.create_task(events.drop())
        deadline_s = self._clock() + SEE_OUT_S
        running = dict(groups)
        try:
            while running and self._clock() < deadline_s:
                # Again and again: a candidate that was on its way may have made its group only now.
                await self.engine.calls.tell_groups(CANCEL_GROUPS, [*running, *chain.from_iterable(launched)])
                await asyncio.wait(running.values(), timeout=SEE_OUT_INTERVAL_S)
                running = {id: task for id, task in running.items() if not task.done()}
        except EngineStopped:  # reported elsewhere
            pass
        finally:
            dropping.cancel()
            await events.close()
            await asyncio.gather(dropping, return_exceptions=True)

    async def _places(self, rollout: Rollout, position: int) -> Places | None:
        """Wait until the group of this prompt may start. None if its course no longer wants it."""
        num_candidates, stopped = rollout.plans[position].group.num_candidates, rollout.course.stopped()
        asker = Asker(rollout.priority, rollout.source)
        places = await self._launcher.take_unless(stopped, num_candidates, asker)
        if rollout.course.starts(position):
            return places or await self._launcher.take(num_candidates, asker)
        if places is not None:
            places.release_all()
        return None

    async def _group_events(
        self, rollout: Rollout, position: int, started: float, places: Places
    ) -> AsyncGenerator[Event, None]:
        """The events of one group: its race, then its result."""
        started_s = rollout.outcome.started_s[position] = round(self._clock() - started, 3)
        order = rollout.order(position, may_move=self.engine.num_ranks > 1)
        group = StartedGroup(rollout, position, places, order, self._metrics, started_s)
        launch = not_launched if rollout.is_aborted else self.engine.run_group
        async with aclosing(group.reports(launch, rollout.on_engine_failure)) as reports:
            async for report in reports:
                if isinstance(report, CandidateEnd) and report.error == ABORTED:
                    self.aborts.mark(rollout)
                for event in group.events_of(report):
                    yield event
        over = await group.over()
        for event in group.events_of_the_rest(over.result):
            yield event
        await group.account(over, self._clock() - started)
        yield group.last_event(over)
        for part in group.parts:
            await part.told(over)

    def _rewards_posted(self, rollout_id: str, rewards: list[Reward]) -> None:
        if (rollout := self.active.get(rollout_id)) is not None:  # its row is to come
            rollout.rewarded([(its.prompt_id, its.index, its.reward) for its in rewards])
            return
        for part in self._parts:
            part.rewarded(rollout_id, rewards)
