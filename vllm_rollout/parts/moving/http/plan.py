"""Moves in the life of a rollout: ranks that its last groups do not need are freed while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vllm_rollout.kernel.http.engine import CandidateEnd, Engine, GroupOrder
from vllm_rollout.kernel.http.plan_port import Given, GroupPart, GroupRecord, PlanPart, RolloutPart, Tell
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.http.rollout import Rollout
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.moving.http.engine import MovesPart
from vllm_rollout.parts.moving.http.fields import Migration, MovedFields, MovingOutlook
from vllm_rollout.parts.moving.http.scaling import ScaleDownWatch, check


class MovingPlan(PlanPart):
    """All rollouts of the service. Overrides: asked."""

    def __init__(self, given: Given) -> None:
        self._given = given

    def asked(self, request: RolloutRequest) -> RolloutPart | None:
        assert isinstance(request, MovedFields)
        if (request.migration, request.scale_down) == ("off", "off"):
            return None
        return MovingRollout(request, self._given.engine, self._given.clock)


class MovingRollout(RolloutPart):
    """One rollout. Overrides: check, ready, begun, group, close."""

    watch: ScaleDownWatch | None = None
    """None without `scale_down`."""

    def __init__(self, request: MovedFields, engine: Engine, clock: Callable[[], float]) -> None:
        self._request = request
        self._engine = engine
        self._clock = clock

    def check(self, request: RolloutRequest, plan: GroupPlan) -> None:
        check(self._engine, self._request)

    async def ready(self, request: RolloutRequest, rollout: Rollout) -> None:
        if self._request.scale_down == "auto":
            moves = self._engine.part(MovesPart)
            self.watch = ScaleDownWatch(moves, rollout.id, rollout.num_responses, self._clock)

    def begun(self, tell: Tell) -> None:
        if self.watch is not None:
            self.watch.begin(tell)

    def group(self, record: GroupRecord) -> GroupPart:
        return MovingGroup(self._request.migration, self.watch)

    async def close(self) -> None:
        if self.watch is not None:
            await self.watch.end()


class MovingGroup(GroupPart):
    """One group. Overrides: ordered, ended."""

    def __init__(self, migration: Migration, watch: ScaleDownWatch | None) -> None:
        self._migration = migration
        self._watch = watch

    def ordered(self, order: GroupOrder) -> GroupOrder:
        if (known := order.outlook) is None:
            return order
        outlook = MovingOutlook(known.lengths, known.prompt_tokens, known.max_tokens, self._migration)
        return replace(order, outlook=outlook)

    def ended(self, end: CandidateEnd) -> None:
        if self._watch is not None:
            self._watch.candidate_ended()
