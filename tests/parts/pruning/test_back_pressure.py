"""For a slow reader of a group with pruning nothing is lost or out of order."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.kernel.api.stepped_llm import SteppedLLM
from tests.kernel.api.test_back_pressure import PACES, assert_chunks_join_at_pace
from tests.kernel.core.scheduler_runs import TracedRun
from tests.parts.pruning.scored_runs import prune_by_sign
from tests.parts.pruning.steps import pruned_by
from vllm_rollout.kernel.core.scheduler import RolloutScheduler
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan


@pytest.mark.thorough
@given(*PACES)
def test_chunks_of_pruned_candidates_join_whatever_the_pace(tiny_model, stream_tokens, lengths, steps_per_read) -> None:
    llm = SteppedLLM(TracedRun(RolloutScheduler, tiny_model, num_blocks=12))
    prune_by_sign(llm.run, 5)
    llm.run.logits = {f"g-c{index}-internal": logit for index, logit in enumerate((1.0, -1.0, -1.0, 1.0))}
    plan = GroupPlan(group_size=2, redundancy=2, parts=pruned_by(PruningPlan(5, allow_fewer=True)))
    assert_chunks_join_at_pace(llm, plan, stream_tokens, lengths, steps_per_read)
