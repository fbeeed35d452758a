"""Moves in the life of a rollout: ranks that its last groups do not need are freed while it runs."""

from __future__ import annotations

from collections.abc import Callable

from vllm_rollout.kernel.http.engine import CandidateEnd, Engine
from vllm_rollout.kernel.http.plan_port import Given, GroupPart, GroupRecord, PlanPart, RolloutPart, Tell
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.http.rollout import Rollout
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.moving.http.engine import MovesPart
from vllm_rollout.parts.moving.http.scaling import ScaleDownWatch, check


class MovingPlan(PlanPart):
    """All rollouts of the service. Overrides: fields, asked."""

    fields = frozenset(
        (
            "migration",
            "scale_down",
        )
    )

    def __init__(self, given: Given) -> None:
        self._given = given

    def asked(self, request: RolloutRequest) -> RolloutPart:
        return MovingRollout(self._given.engine, self._given.clock)


class MovingRollout(RolloutPart):
    """One rollout. Overrides: check, ready, begun, group, close."""

    watch: ScaleDownWatch | None = None
    """None without `scale_down`."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock

    def check(self, request: RolloutRequest, plan: GroupPlan) -> None:
        check(self._engine, request)

    async def ready(self, request: RolloutRequest, rollout: Rollout) -> None:
        if request.scale_down == "auto":
            moves = self._engine.part(MovesPart)
            self.watch = ScaleDownWatch(moves, rollout.id, rollout.num_responses, self._clock)

    def begun(self, tell: Tell) -> None:
        if self.watch is not None:
            self.watch.begin(tell)

    def group(self, record: GroupRecord) -> GroupPart | None:
        return None if self.watch is None else MovingGroup(self.watch)

    async def close(self) -> None:
        if self.watch is not None:
            await self.watch.end()


class MovingGroup(GroupPart):
    """One group. Overrides: ended."""

    def __init__(self, watch: ScaleDownWatch) -> None:
        self._watch = watch

    def ended(self, end: CandidateEnd) -> None:
        self._watch.candidate_ended()
