"""Dry runs of the scheduler with pruning."""

from collections.abc import Mapping
from typing import Any

from vllm.v1.engine import FinishReason

from tests.kernel.core import scheduler_runs
from tests.kernel.core.scheduler_runs import End, TracedRun
from tests.parts.pruning.steps import judge_of, pruned_by, said
from vllm_rollout.parts.pruning.rules.assessment import Assessment
from vllm_rollout.parts.pruning.rules.learning import Learning, Siblings
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.pruning_plan import Observation, PruningPlan
from vllm_rollout.parts.pruning.rules.step import PruningStep

PRUNED: End = ("pruned", FinishReason.ABORT, "pruned")


def add_group(
    run: TracedRun,
    group_id: str,
    lengths: list[int],
    group_size: int,
    *,
    pruning: PruningPlan | None = None,
    logits: list[float] | None = None,
    seed: int = 7,
    **fields: Any,
) -> list[str]:
    """Add a group with pruning. `logits`: what the head will say of the candidates. `fields`: of any group."""
    for index, logit in enumerate(logits or ()):
        run.logits[f"{group_id}-{index}"] = logit
    its = said(pruning and Scoring("rollout", group_id, seed))
    return scheduler_runs.add_group(run, group_id, lengths, group_size, parts=pruned_by(pruning), said=its, **fields)


class SignLearning(Learning):
    """Keeps what has a positive logit, and the best of the others as far as they are needed."""

    def assess(
        self,
        plan: PruningPlan,
        observations: Mapping[int, Observation],
        siblings: Siblings,
    ) -> dict[int, Assessment]:
        best = sorted(observations, key=lambda index: (-observations[index].logit, index))[: siblings.at_least]
        return {
            index: Assessment(
                "head", seen.logit, 0.5, 0.75, seen.logit > 0 or index in best, seen.head_version, seen.confidence
            )
            for index, seen in observations.items()
        }


def prune_by_sign(run: TracedRun, *detection_lengths: int) -> None:
    """From now on a candidate with a negative logit is pruned where the floor allows it."""
    for length in detection_lengths:
        judge_of(run.scheduler).memory.learnings[length] = SignLearning(length)


def assert_nothing_left(run: TracedRun) -> None:
    """The scheduler is as it was before the first request, and no score is awaited."""
    scheduler_runs.assert_nothing_left(run)
    assert run.scheduler.group_steps.part(PruningStep)._scored == {}
