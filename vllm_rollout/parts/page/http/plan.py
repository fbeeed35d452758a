"""Rollouts are shown, recorded and traced, and get a receipt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from vllm_rollout.kernel.http.engine import CandidateEnd, GroupOrder
from vllm_rollout.kernel.http.plan_port import Given, GroupPart, GroupRecord, Over, PlanPart, RolloutPart, Tell
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.http.rollout import Rollout
from vllm_rollout.kernel.rules.prompt_key import history_key
from vllm_rollout.kernel.rules.rewards import Grade, Reward
from vllm_rollout.parts.page.http import tracing
from vllm_rollout.parts.page.http.part import PagePart
from vllm_rollout.parts.page.http.receipts import receipt
from vllm_rollout.parts.page.http.recorder import TraceRecorder
from vllm_rollout.parts.page.http.viewers import Viewers
from vllm_rollout.parts.page.http.watched import SeenGroup, WatchedRollout


class PagePlan(PlanPart):
    """All rollouts of the service. Overrides: asked, rewarded."""

    def __init__(self, given: Given) -> None:
        page = given.engine.find(PagePart)
        self.recorder: TraceRecorder | None = None if page is None else page.recorder
        self.viewers = Viewers(given.engine, records=self.recorder is not None)

    def asked(self, request: RolloutRequest) -> PageRollout:
        return PageRollout(self.viewers, self.recorder)

    def rewarded(self, rollout_id: str, rewards: Sequence[Reward]) -> None:
        self.viewers.rewards_posted(rollout_id, rewards)
        if self.recorder is not None:
            self.recorder.rewards_posted(rollout_id, rewards)


class PageRollout(RolloutPart):
    """One rollout. Overrides: ready, begun, group, filtered, rewarded, finished, over."""

    watched: WatchedRollout

    def __init__(self, viewers: Viewers, recorder: TraceRecorder | None) -> None:
        self._viewers = viewers
        self._recorder = recorder
        self._trace = tracing.begin()

    async def ready(self, request: RolloutRequest, rollout: Rollout) -> None:
        self.watched = WatchedRollout(rollout)

    def begun(self, tell: Tell) -> None:
        self._viewers.begun(self.watched)

    def group(self, record: GroupRecord) -> GroupPart:
        return PageGroup(self.watched, record, self._trace)

    def filtered(self, prompt_id: str) -> None:
        self.watched.filtered(prompt_id)

    def rewarded(self, rewards: Iterable[tuple[str, int, float]]) -> None:
        self.watched.rewarded(rewards)

    async def finished(self) -> None:
        self.watched.rollout.outcome.receipt = await receipt(self.watched)

    def over(self, *, left: bool) -> None:
        watched = self.watched
        watched.over(left=left)
        self._viewers.over(watched)
        if self._trace is not None:
            self._trace.end(watched.row(), watched.rollout.outcome.usage)
        if self._recorder is not None:
            self._recorder.rollout_over(watched)


class PageGroup(GroupPart):
    """One group. Overrides: ordered, ended, graded, restarted, decided."""

    def __init__(self, watched: WatchedRollout, record: GroupRecord, trace: tracing.RolloutTrace | None) -> None:
        key = watched.rollout.plans[record.position].key
        self._trace = trace
        self._seen = watched.groups[record.position] = SeenGroup(
            watched, record, "" if key == history_key(record.prompt.id, ()) else key
        )

    def ordered(self, order: GroupOrder) -> GroupOrder:
        if self._trace is None:
            return order
        began = self._seen.rollout.began + self._seen.record.started_s
        return replace(order, trace_headers=self._trace.begin_group(self._seen.record.position, began))

    def ended(self, end: CandidateEnd) -> None:
        self._seen.candidate_ended(end)

    def graded(self, index: int, grade: Grade) -> None:
        self._seen.graded(index, grade)

    def restarted(self) -> None:
        self._seen.begin_again()

    def decided(self, over: Over) -> None:
        result, deferred = over.result, over.deferred_because is not None
        self._seen.over(
            "deferred" if deferred else result.status, over.deferred_because or result.reason, result.selected
        )
