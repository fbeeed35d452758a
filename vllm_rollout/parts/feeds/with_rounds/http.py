"""Groups of a feed that are stopped at a weights update, and go on from their tokens later.

Invariant: a trajectory reads as if its candidate had run at once. Its `weight_versions` say which weights sampled it.
"""

from __future__ import annotations

from dataclasses import replace

from vllm_rollout.kernel.http.engine import Engine, GroupOrder
from vllm_rollout.kernel.http.plan_port import GroupPart, GroupRecord, Launch, Over, RolloutPart
from vllm_rollout.kernel.http.rollout import Rollout
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.selection import deferred
from vllm_rollout.kernel.rules.types import Ending
from vllm_rollout.parts.feeds.http.running import AdmittedGroup, KeptOutput
from vllm_rollout.parts.rounds.http.answers import DeferredEvent
from vllm_rollout.parts.rounds.http.kept import MAX_KEPT_BYTES, read_kept
from vllm_rollout.parts.rounds.http.resumed import ResumedGroup, packed
from vllm_rollout.parts.rounds.rules.resumption import is_whole


class GoingOn(RolloutPart):
    """A rollout of a feed that can be stopped. Overrides: group."""

    def __init__(self, engine: Engine, rollout: Rollout, group: AdmittedGroup) -> None:
        self.engine, self.rollout, self.admitted = engine, rollout, group

    def group(self, record: GroupRecord) -> GroupPart:
        return _StoppableGroup(self, record)


class _StoppableGroup(GroupPart):
    """Overrides: launching, over, keep."""

    def __init__(self, part: GoingOn, record: GroupRecord) -> None:
        self._engine, self._rollout, self._group = part.engine, part.rollout, part.admitted
        self._record = record

    def launching(self, launch: Launch) -> Launch:
        if (before := self._group.before) is None:
            return launch
        try:
            kept = read_kept(before.packed)
        except ValueError as error:
            name = self._record.prompt.id
            self._rollout.warnings.append(f"prompt {name!r} starts anew: its tokens cannot be read ({error}).")
            return launch
        want_text = "text" in self._rollout.included or self._rollout.is_graded

        def resumed(order: GroupOrder) -> ResumedGroup:
            order = replace(order, plan=_plan_of(order.plan, len(kept)))
            return ResumedGroup(kept, self._engine, order, want_text=want_text, indices=before.indices)

        return lambda order: resumed(order).events()

    async def over(self, over: Over) -> None:
        was_cut = any(ending.state == "deferred" for ending in over.result.endings)
        is_over = over.result.status == "complete" and self._record.plan.early_stop
        if self._group.is_stopping and was_cut and not is_over:
            over.deferred_because = "cut"
            over.result = deferred(over.result, "cut")
            over.event = DeferredEvent(prompt_id=self._record.prompt.id, group_id=self._record.id, reason="cut")

    async def keep(self, over: Over) -> None:
        if over.deferred_because is None:
            return
        record, group = self._record, self._group
        ends = [end for end in record.ends.values() if _goes_on(end.ending)]
        are_enough = len(ends) >= record.plan.group_size  # else it could not complete
        blob, indices = await packed(record, ends, len(ends)) if are_enough else (None, ())
        if blob is None:
            next_step = "starts anew" if group.before is None else "goes on from its earlier tokens"
            why = (
                f"its candidates have more than {MAX_KEPT_BYTES} bytes" if are_enough else "too many candidates failed"
            )
            self._rollout.warnings.append(f"prompt {record.prompt.id!r} {next_step}: {why}.")
        else:
            num_tokens = sum(record.ends[index].ending.num_tokens for index in indices)
            group.kept = KeptOutput(blob, list(indices), num_tokens)
            over.final = [ending for ending in over.result.endings if ending.index not in indices]
        group.was_stopped = True


def _goes_on(ending: Ending) -> bool:
    """True unless the candidate was stopped for another reason, or failed."""
    return ending.state == "deferred" or is_whole(ending)


def _plan_of(plan: GroupPlan, num_kept: int) -> GroupPlan:
    """The plan of the candidates that go on. Pruned and failed ones are not launched again."""
    group_size = min(plan.group_size, num_kept)
    return replace(plan, group_size=group_size, redundancy=num_kept - group_size)
