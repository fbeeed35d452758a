"""A rollout that is shown and recorded. Invariant: its row can be made at any time."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_rollout.kernel.http.rollout import Rollout
from vllm_rollout.parts.page.http.seen import SeenRollout
from vllm_rollout.parts.page.recording.rows import RolloutRow


@dataclass(slots=True)
class WatchedRollout:
    """A rollout, and what was observed of it."""

    rollout: Rollout
    seen: SeenRollout = field(default_factory=SeenRollout)

    def row(self, *, with_prompts: bool = True, running: bool = False) -> RolloutRow:
        """The rollout as a row of a trace. `running`: include groups that are not over."""
        rollout, seen = self.rollout, self.seen
        plan = rollout.plans[0].group
        caps = [prompt.max_tokens for prompt in rollout.prompts if prompt.max_tokens is not None]
        return RolloutRow.model_construct(
            rollout_id=rollout.id,
            model=rollout.model,
            group_size=plan.group_size,
            max_tokens=max(caps, default=None),
            detection_length=None if plan.pruning is None else plan.pruning.detection_length,
            began=seen.began,
            seconds=seen.seconds,
            num_prompts=len(rollout.prompts),
            num_candidates=rollout.num_responses,
            **{name: rollout.labels.get(name) for name in ("run", "round", "kind")},
            state=seen.state,
            receipt=rollout.receipt,
            weight_versions=sorted(rollout.outcome.versions) or None,
            prompts=seen.rows(running=running) if with_prompts else [],
        )
