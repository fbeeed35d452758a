"""Rollouts: prompts in, events out. Invariant: every group that was launched ends with one `group` event, and
generated = returned + wasted tokens.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from vllm_rollout.group.plan import GroupPlan, PlanError, make_plan
from vllm_rollout.group.selection import conclude, lengths_of
from vllm_rollout.group.types import GroupResult
from vllm_rollout.metrics import Metrics
from vllm_rollout.server.answers import (
    Allocation,
    Candidate,
    CandidateEvent,
    DoneEvent,
    Event,
    GroupAnswer,
    GroupEvent,
    GroupLengths,
    RolloutAnswer,
    Timing,
    TokensEvent,
    Trajectory,
    TrajectoryEvent,
    UnselectedCandidate,
    Usage,
)
from vllm_rollout.server.engine import CandidateEnd, CandidateTokens, Engine, PreparedPrompt, PromptInput, RequestError
from vllm_rollout.server.protocol import DualEndSelection, Return, RolloutRequest

EVENT_BUFFER = 256
"""Events that wait for a slow reader before the groups that make them wait too; groups of other requests never do."""


@dataclass(slots=True)
class Rollout:
    """A checked request, ready to run."""

    id: str
    created: int
    model: str
    plan: GroupPlan
    prompts: list[PreparedPrompt]
    wanted: Return
    stream_tokens: int | None
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    versions: set[str] = field(default_factory=set)

    @property
    def weight_version(self) -> str | None:
        """The version every token was sampled with; None when there is none or more than one."""
        return next(iter(self.versions)) if len(self.versions) == 1 else None


class RolloutService:
    """Runs rollouts on an engine."""

    def __init__(self, engine: Engine, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._metrics = metrics
        self._clock = clock

    async def prepare(self, request: RolloutRequest) -> Rollout:
        """Check everything before anything is launched.

        Raises: RequestError that names the field.
        """
        plan = self._plan(request)
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
        model, prompts = await self._engine.prepare(
            inputs,
            request.model,
            request.sampling,
            want_logprobs=request.return_.logprobs,
            want_text=request.return_.text,
        )
        rollout = Rollout(
            id=f"rollout-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model,
            plan=plan,
            prompts=prompts,
            wanted=request.return_,
            stream_tokens=request.stream_tokens,
        )
        rollout.usage.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        return rollout

    async def answer(self, rollout: Rollout) -> RolloutAnswer:
        """Run to the end and answer once."""
        groups: dict[str, GroupAnswer] = {}
        trajectories: dict[str, list[Trajectory]] = {}
        candidates: dict[str, list[Candidate]] = {}
        async with aclosing(self.events(rollout)) as events:
            async for event in events:
                if isinstance(event, TrajectoryEvent):
                    trajectories.setdefault(event.prompt_id, []).append(event.trajectory)
                elif isinstance(event, CandidateEvent):
                    candidates.setdefault(event.prompt_id, []).append(event.candidate)
                elif isinstance(event, GroupEvent):
                    groups[event.prompt_id] = GroupAnswer(
                        **event.model_dump(exclude={"type", "selected"}),
                        trajectories=sorted(trajectories.pop(event.prompt_id, ()), key=lambda t: t.index),
                        candidates=sorted(candidates.pop(event.prompt_id, ()), key=lambda c: c.index),
                    )
        return RolloutAnswer(
            id=rollout.id,
            created=rollout.created,
            model=rollout.model,
            weight_version=rollout.weight_version,
            groups=[groups[prompt.id] for prompt in rollout.prompts],
            usage=rollout.usage,
            timing=rollout.timing,
        )

    async def events(self, rollout: Rollout) -> AsyncGenerator[Event, None]:
        """Run all groups; yields their events as they happen and `done` last. Closing it aborts what still runs."""
        started = self._clock()
        queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue(EVENT_BUFFER)

        async def run(prompt: PreparedPrompt, position: int) -> None:
            try:
                async with aclosing(self._group_events(rollout, prompt, position, started)) as events:
                    async for event in events:
                        await queue.put(event)
                await queue.put(None)
            except Exception as error:  # handed to the reader below, who raises it
                await queue.put(error)

        tasks = [asyncio.create_task(run(prompt, i)) for i, prompt in enumerate(rollout.prompts)]
        try:
            num_running = len(tasks)
            while num_running:
                event = await queue.get()
                if event is None:
                    num_running -= 1
                elif isinstance(event, BaseException):
                    raise event
                else:
                    yield event
            rollout.timing.latency_s = self._clock() - started
            yield DoneEvent(
                id=rollout.id,
                created=rollout.created,
                model=rollout.model,
                weight_version=rollout.weight_version,
                usage=rollout.usage,
                timing=rollout.timing,
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _plan(self, request: RolloutRequest) -> GroupPlan:
        selection, num_longest = request.selection, None
        if isinstance(selection, DualEndSelection):
            selection, num_longest = "dual_end", selection.dual_end.num_longest
        try:
            return make_plan(
                request.group_size,
                request.redundancy,
                request.early_stop,
                selection,
                num_longest,
                max_candidates=self._engine.max_num_seqs,
                names={"num_longest": "selection.dual_end.num_longest"},
            )
        except PlanError as error:
            raise RequestError(str(error), param=error.field) from error

    async def _group_events(
        self, rollout: Rollout, prompt: PreparedPrompt, position: int, started: float
    ) -> AsyncGenerator[Event, None]:
        plan, group_id = rollout.plan, f"{rollout.id}-{position}"
        ends: dict[int, CandidateEnd] = {}
        sent: set[int] = set()

        def named(end: CandidateEnd) -> TrajectoryEvent:
            sent.add(end.ending.index)
            return TrajectoryEvent(prompt_id=prompt.id, group_id=group_id, trajectory=_trajectory(end, rollout.wanted))

        stream = self._engine.run_group(group_id, plan, prompt, stream_tokens=rollout.stream_tokens)
        async with aclosing(stream) as happenings:
            async for happening in happenings:
                if isinstance(happening, CandidateTokens):
                    yield _tokens(prompt.id, happening, rollout.wanted)
                    continue
                ends[happening.ending.index] = happening
                # With early stop the engine counts exactly group_size winners: each of them is sure at its end.
                if plan.early_stop and happening.ending.valid:
                    yield named(happening)
        result = conclude(plan, (end.ending for end in ends.values()))
        for index in result.selected:
            if index not in sent:
                yield named(ends[index])
        for ending in result.endings:
            if ending.index not in sent:
                candidate = _candidate(ends[ending.index], rollout.wanted)
                yield CandidateEvent(prompt_id=prompt.id, group_id=group_id, candidate=candidate)
        latency_s = self._clock() - started
        _account(rollout, result, ends, latency_s)
        self._metrics.group_over(result, latency_s)
        yield GroupEvent(
            prompt_id=prompt.id,
            group_id=group_id,
            status=result.status,
            reason=result.reason,
            selected=list(result.selected),
            prompt_token_ids=list(prompt.token_ids),
            lengths=GroupLengths(**lengths_of([ends[i].ending.num_tokens for i in result.selected])._asdict()),
            allocation=Allocation(num_candidates=plan.num_candidates),
        )


def _account(rollout: Rollout, result: GroupResult, ends: dict[int, CandidateEnd], latency_s: float) -> None:
    usage = rollout.usage
    generated = sum(e.num_tokens for e in result.endings)
    returned = sum(ends[i].ending.num_tokens for i in result.selected)
    usage.generated_tokens += generated
    usage.returned_tokens += returned
    usage.wasted_tokens += generated - returned
    usage.num_candidates += len(result.endings)
    for ending in result.endings:
        counter = f"num_{ending.state}"
        setattr(usage, counter, getattr(usage, counter) + 1)
    if rollout.timing.time_to_first_group_s is None:
        rollout.timing.time_to_first_group_s = latency_s
    rollout.versions.update(span["version"] for end in ends.values() for span in end.weight_versions)


def _trajectory(end: CandidateEnd, wanted: Return) -> Trajectory:
    return Trajectory(
        index=end.ending.index,
        token_ids=list(end.token_ids),
        logprobs=list(end.logprobs) if wanted.logprobs and end.logprobs is not None else None,
        text=end.text if wanted.text else None,
        num_tokens=end.ending.num_tokens,
        finish_reason=end.finish_reason,
        stop_reason=end.stop_reason,
        mean_confidence=end.mean_confidence,
        weight_versions=list(end.weight_versions),
    )


def _candidate(end: CandidateEnd, wanted: Return) -> Candidate:
    ending = end.ending
    if not wanted.unselected:
        return Candidate(index=ending.index, state=ending.state, num_tokens=ending.num_tokens)
    return UnselectedCandidate(
        index=ending.index,
        state=ending.state,
        num_tokens=ending.num_tokens,
        token_ids=list(end.token_ids),
        logprobs=list(end.logprobs) if wanted.logprobs and end.logprobs is not None else None,
        text=end.text if wanted.text else None,
    )


def _tokens(prompt_id: str, tokens: CandidateTokens, wanted: Return) -> TokensEvent:
    return TokensEvent(
        prompt_id=prompt_id,
        index=tokens.index,
        offset=tokens.offset,
        token_ids=list(tokens.token_ids),
        logprobs=list(tokens.logprobs) if wanted.logprobs and tokens.logprobs is not None else None,
    )
