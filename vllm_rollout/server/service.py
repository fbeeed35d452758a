"""Rollouts: prompts in, events out. Invariant: every group that was launched ends with one `group` event, and
generated + resumed = returned + wasted tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Literal

from vllm_rollout.group.prompt_key import digest_of, seed_for
from vllm_rollout.group.resumption import choose_resumed
from vllm_rollout.group.scaling import Progress
from vllm_rollout.group.selection import conclude, deferred, lengths_of
from vllm_rollout.group.types import Ending, HeadKey
from vllm_rollout.server.admin import AdminKey
from vllm_rollout.server.answers import (
    CandidateEvent,
    DeferredEvent,
    DoneEvent,
    Event,
    GroupEvent,
    GroupLengths,
    RanksFreeEvent,
    RestartedEvent,
    RolloutAnswer,
    TrajectoryEvent,
)
from vllm_rollout.server.attempts import Lost, Restarted, attempts
from vllm_rollout.server.ended import candidate_of, tokens_of, trajectory_of
from vllm_rollout.server.engine import (
    CandidateEnd,
    CandidateTokens,
    Engine,
    Outlook,
    PreparedPrompt,
    RequestError,
)
from vllm_rollout.server.kept import MAX_KEPT_BYTES, keep
from vllm_rollout.server.launch import Launcher, Places
from vllm_rollout.server.learning.service import LearningService
from vllm_rollout.server.metrics import Metrics
from vllm_rollout.server.preparation import Preparation
from vllm_rollout.server.protocol import RolloutRequest
from vllm_rollout.server.recorder import TraceRecorder, recorded
from vllm_rollout.server.resumed import ResumedGroup
from vllm_rollout.server.rollout import Rollout
from vllm_rollout.server.serialised import GroupsInJson
from vllm_rollout.server.shaping import ShapingService

EVENT_BUFFER = 256
"""Events of a rollout that wait for a slow reader. Beyond them each group waits with one event, and the engine goes on:
what its candidates generate meanwhile is held once, in at most three messages per candidate (`run_candidates`), and
comes as longer `tokens`. Groups of other rollouts never wait.
"""

Step = Literal["next", "over", "all started"]
"""Between events: the next group may start, a group is over, no more will start."""

SEE_OUT_S = 10.0
"""How long groups that nobody reads may take to stop by themselves before their requests are aborted: a step, unless
generation is paused."""
SEE_OUT_INTERVAL_S = 0.1


class RolloutService:
    """Runs rollouts on an engine."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        recorder: TraceRecorder | None = None,
        admin_key: AdminKey | None = None,
        audit_ratio: float = 0.0,
    ) -> None:
        self.admin_key = admin_key
        """None: whoever may call the server may put heads and states."""
        self._engine = engine
        self._metrics = metrics
        self._clock = clock
        self._recorder = recorder
        self.learning = LearningService(engine.learning, engine.adapter_name, metrics, clock, recorder)
        self._shaping = ShapingService(engine, metrics, clock)
        self._preparation = Preparation(engine, self.learning, self._shaping, clock, audit_ratio)
        self._launcher = Launcher(engine.num_launch_places)
        self._endings: set[asyncio.Task[None]] = set()
        """Of rollouts that are over, or whose clients have left."""
        self._active: dict[str, Rollout] = {}
        """Those on their way, by id."""

    async def prepare(self, request: RolloutRequest) -> Rollout:
        """Check everything before anything is launched.

        Raises: RequestError that names the field.
        """
        return await self._preparation.rollout(request)

    @property
    def progress(self) -> Progress:
        """Of all rollouts on their way, together."""
        rollouts = self._active.values()
        return Progress(sum(each.num_responses for each in rollouts), sum(each.num_ended for each in rollouts))

    async def answer(self, rollout: Rollout) -> list[bytes]:
        """Run to the end; a RolloutAnswer as JSON, in parts."""
        groups = GroupsInJson()
        async with aclosing(self.events(rollout)) as events:
            async for event in events:
                await groups.add(event)
        envelope = RolloutAnswer(
            **rollout.envelope(),
            groups=[],
        )
        return groups.answer(envelope, (prompt.id for prompt in rollout.prompts))

    async def events(self, rollout: Rollout) -> AsyncGenerator[Event, None]:
        """Run all groups; yields their events as they happen and `done` last.

        Closing it stops what still runs as `deferred`: neither failed nor judged, and what it had become is learned.
        """
        started = self._clock()
        queue: asyncio.Queue[Event | Step | BaseException] = asyncio.Queue(EVENT_BUFFER)

        async def run(prompt: PreparedPrompt, position: int, places: Places) -> None:
            try:
                async with aclosing(self._group_events(rollout, prompt, position, started, places)) as events:
                    async for event in events:
                        if queue.full():  # the engine goes on without the reader, whose places others may need
                            places.release_all()
                        await queue.put(event)
                await queue.put("over")
            except Exception as error:  # handed to the reader below, who raises it
                await queue.put(error)
            finally:
                places.release_all()

        async def launch() -> None:
            nonlocal num_started
            try:
                async for position in rollout.course.positions():
                    await queue.put("next")  # a rollout whose reader is behind starts no more groups
                    places = await self._places(rollout, position)
                    if places is not None:
                        num_started += 1
                        prompt = rollout.prompts[position]
                        tasks[rollout.group_id(position)] = asyncio.create_task(run(prompt, position, places))
                await queue.put("all started")
            except Exception as error:  # handed to the reader below, who raises it
                await queue.put(error)

        tasks: dict[str, asyncio.Task[None]] = {}
        """Of groups that were launched."""
        num_started = 0
        launching = asyncio.create_task(launch())
        self._active[rollout.id] = rollout
        if rollout.watch is not None:
            rollout.watch.begin(queue.put)
        try:
            num_over, all_started = 0, False
            while not all_started or num_over < num_started:
                event = await queue.get()
                if event == "over":
                    num_over += 1
                elif event == "all started":
                    all_started = True
                elif event == "next":
                    continue
                elif isinstance(event, BaseException):
                    raise event
                else:
                    if isinstance(event, RanksFreeEvent):
                        rollout.freed = event
                    yield event
            rollout.timing.latency_s = self._clock() - started
            await self._shaping.told(rollout.tellings)
            await self._warn(rollout)
            yield DoneEvent(
                **rollout.envelope(),
            )
        finally:
            launching.cancel()
            ending = asyncio.create_task(self._end(rollout, launching, tasks, queue))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
            await asyncio.shield(ending)  # a client that leaves now does not interrupt it

    async def _end(
        self,
        rollout: Rollout,
        launching: asyncio.Task[None],
        groups: Mapping[str, asyncio.Task[None]],
        queue: asyncio.Queue[Any],
    ) -> None:
        """Nothing of it runs any more, and it is recorded."""
        await asyncio.gather(launching, return_exceptions=True)
        await self._see_out({id: task for id, task in groups.items() if not task.done()}, queue)
        del self._active[rollout.id]
        if rollout.watch is not None:
            await rollout.watch.end()
        if self._recorder is not None:
            self._recorder.rollout_over(rollout)

    async def refresh_gauges(self) -> None:
        """Those that are read from the engine, if that was a while ago."""
        await self._shaping.refresh()

    async def _see_out(self, groups: Mapping[str, asyncio.Task[None]], queue: asyncio.Queue[Any]) -> None:
        """Nobody reads any more: stop these groups, and let each of them come to its end."""
        if not groups:
            return
        emptying = asyncio.create_task(_empty(queue))
        deadline_s = self._clock() + SEE_OUT_S
        running = dict(groups)
        try:
            while running and self._clock() < deadline_s:
                # Again and again: a candidate that was on its way may have made its group only now.
                await self._engine.cancel_groups(list(running))
                await asyncio.wait(running.values(), timeout=SEE_OUT_INTERVAL_S)
                running = {id: task for id, task in running.items() if not task.done()}
        except RequestError:  # the engine is dead, and says so elsewhere
            pass
        finally:
            for task in (emptying, *groups.values()):
                task.cancel()
            await asyncio.gather(emptying, *groups.values(), return_exceptions=True)

    async def _places(self, rollout: Rollout, position: int) -> Places | None:
        """Wait until the group of this prompt may start; None when its course does not want it any more."""
        num_candidates, stopped = rollout.plans[position].group.num_candidates, rollout.course.stopped()
        if stopped is None:
            places = await self._launcher.take(num_candidates)
        else:
            places = await _unless(stopped, self._launcher.take(num_candidates))
        if rollout.course.starts(position):
            return places or await self._launcher.take(num_candidates)
        if places is not None:
            places.release_all()
        return None

    async def _warn(self, rollout: Rollout) -> None:
        if rollout.scoring is None:
            return
        report = None
        if rollout.scoring.num_cold:
            head = HeadKey(rollout.scoring.plan.detection_length, rollout.adapter)
            report = await self.learning.report_if_any(head)
        rollout.warnings += rollout.scoring.warnings(report)

    async def _group_events(
        self, rollout: Rollout, prompt: PreparedPrompt, position: int, started: float, places: Places
    ) -> AsyncGenerator[Event, None]:
        plan, group_id = rollout.plans[position].group, rollout.group_id(position)
        ends: dict[int, CandidateEnd] = {}
        lost_why: str | None = None
        sent: set[int] = set()
        off_policy: set[int] = set()
        """Indices of trajectories that are."""

        def named(end: CandidateEnd) -> TrajectoryEvent:
            sent.add(end.ending.index)
            trajectory = trajectory_of(end, rollout.wanted, plan, rollout.current_version)
            off_policy.update([trajectory.index] if trajectory.off_policy else ())
            return TrajectoryEvent(prompt_id=prompt.id, group_id=group_id, trajectory=trajectory)

        def dropped(end: CandidateEnd) -> CandidateEvent:
            sent.add(end.ending.index)
            candidate = candidate_of(end, rollout.wanted, plan.pruning)
            return CandidateEvent(prompt_id=prompt.id, group_id=group_id, candidate=candidate)

        run = partial(
            self._engine.run_group,
            group_id,
            prompt=prompt,
            stream_tokens=rollout.stream_tokens,
            rollout_id=rollout.id,
            seed_name=rollout.seed_names[position],
            pruning_seed=seed_for(rollout.pruning_seed, digest_of(prompt.token_ids)),
            place=rollout.course.place(position),
            outlook=self._outlook(rollout, position),
            prompt_key=rollout.plans[position].key,
        )
        attempt = partial(run, plan)
        if (kept := rollout.resumed.get(position)) is not None:
            attempt = partial(
                ResumedGroup(kept, self._engine, want_text=rollout.wanted.text).events,
                plan,
                prompt,
                lambda rest, beginnings: run(rest, beginnings=beginnings),
                want_tokens=rollout.stream_tokens is not None,
            )
        again = partial(places.take_again, plan.num_candidates)
        async with aclosing(attempts(attempt, rollout.on_engine_failure, again)) as happenings:
            async for happening in happenings:
                if isinstance(happening, CandidateTokens):
                    yield tokens_of(prompt.id, happening, rollout.wanted)
                    continue
                if isinstance(happening, Lost):
                    lost_why = happening.reason
                    break
                if isinstance(happening, Restarted):
                    rollout.restarted(len(ends))
                    rollout.course.restarted(position)
                    for known in (ends, sent, off_policy):
                        known.clear()
                    yield RestartedEvent(prompt_id=prompt.id, group_id=group_id, reason=happening.reason)
                    continue
                if not happening.is_replaced:  # by one that takes its place
                    places.release(1)
                ends[happening.ending.index] = happening
                rollout.course.candidate_ended(position, happening.ending)
                rollout.num_ended += 1
                if rollout.watch is not None:
                    rollout.watch.candidate_ended()
                if happening.assessment is not None:
                    self._metrics.candidate_scored(happening.assessment)
                # With early stop the engine counts exactly group_size winners: each of them is sure at its end.
                if plan.early_stop and happening.ending.valid:
                    yield named(happening)
                elif happening.ending.state != "finished":  # nothing can select it any more: a reader may drop it now
                    yield dropped(happening)
        result = conclude(plan, (end.ending for end in ends.values()), lost_why)
        lost = any(end.group_lost for end in ends.values())
        reason = await rollout.course.group_over(position, result, lost=lost)
        if reason is not None:
            result = deferred(result, reason)
        for index in result.selected:
            if index not in sent:
                yield named(ends[index])
        for ending in result.endings:
            if ending.index not in sent:
                yield dropped(ends[ending.index])
        latency_s = self._clock() - started
        if rollout.scoring is not None:
            rollout.scoring.group_over(prompt, ends.values())
        rollout.account(result, ends, latency_s)
        self._metrics.group_over(result, latency_s, audit=plan.audit)
        endings = result.endings
        if reason is not None and rollout.keeps:
            endings = await self._keep(rollout, position, ends)
        telling = self._shaping.group_over(rollout.plans[position].key, endings, rollout.adapter)
        if telling is not None:
            rollout.tellings.append(telling)
        if self._recorder is not None:
            rollout.records[position] = recorded(prompt, rollout.plans[position].key, ends.values())
        if reason is not None:
            yield DeferredEvent(prompt_id=prompt.id, group_id=group_id, reason=reason)
            return
        is_off_policy = not off_policy.isdisjoint(result.selected)
        rollout.off_policy = rollout.off_policy or is_off_policy
        yield GroupEvent(
            prompt_id=prompt.id,
            group_id=group_id,
            status=result.status,
            reason=result.reason,
            selected=list(result.selected),
            prompt_token_ids=list(prompt.token_ids),
            lengths=GroupLengths(**lengths_of([ends[i].ending.num_tokens for i in result.selected])._asdict()),
            allocation=rollout.plans[position].answer(),
            off_policy=is_off_policy,
            audit=plan.audit,
        )

    def _outlook(self, rollout: Rollout, position: int) -> Outlook | None:
        if self._engine.moves.num_ranks == 1:
            return None
        prompt, lengths = rollout.prompts[position], rollout.plans[position].lengths
        return Outlook(lengths, len(prompt.token_ids), prompt.max_tokens, rollout.migration)

    async def _keep(self, rollout: Rollout, position: int, ends: Mapping[int, CandidateEnd]) -> tuple[Ending, ...]:
        """Keep what goes on of a deferred group; returns the endings of the others, whose lengths are all there will
        be: those of the ones that go on are told when they are whole."""
        plan = rollout.plans[position].group
        chosen = choose_resumed([end.ending for end in ends.values()], plan.group_size)
        blob = await asyncio.to_thread(keep, ends.values(), plan.group_size, plan.pruning)
        if blob is None:
            rollout.warnings.append(
                f"prompt {rollout.prompts[position].id!r} starts anew in its long round: its candidates have more than "
                f"{MAX_KEPT_BYTES} bytes."
            )
            return tuple(end.ending for end in ends.values())
        rollout.kept[position] = blob
        return tuple(end.ending for index, end in ends.items() if index not in chosen)


async def _unless(stopped: Awaitable[object], taking: Awaitable[Places]) -> Places | None:
    """Await `taking`; None, and it is cancelled, when `stopped` is done first."""
    tasks = [asyncio.ensure_future(taking), asyncio.ensure_future(stopped)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _empty(queue: asyncio.Queue[Any]) -> None:
    while True:
        await queue.get()
