"""Random workloads with pruning on vLLM's scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel.core.scheduler_runs import LOOPS, Loop, TracedRun
from tests.kernel.core.test_scheduler_properties import MAX_LENGTH, GroupSpec, Sample, Workload, check, workloads
from tests.kernel.core.test_scheduler_properties import play as play_any
from tests.parts.pruning.scored_runs import assert_nothing_left, prune_by_sign
from tests.parts.pruning.steps import pruned_by, said
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan

DETECTION_LENGTHS = (1, 5, 20)

plans = st.builds(
    lambda length, mode, allow_fewer: PruningPlan(length, mode=mode, allow_fewer=allow_fewer),
    st.sampled_from(DETECTION_LENGTHS),
    st.sampled_from(["active", "active", "shadow"]),
    st.booleans(),
)


def play(workload: Workload, loop: Loop, model: str) -> TracedRun:
    def say(group_id: str, group: GroupSpec) -> dict[str, Any]:
        return said(group.plan and Scoring("rollout", group_id, 7))

    return play_any(workload, loop, model, lambda run: prune_by_sign(run, *DETECTION_LENGTHS), say)


@pytest.mark.thorough
@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(workload=workloads((st.none() | plans).map(pruned_by)), loop=st.sampled_from(LOOPS))
def test_whatever_happens_groups_with_pruning_keep_their_promises(workload, loop, tiny_model):
    run = play(workload, loop, tiny_model)
    check(workload, run, loop)
    assert_nothing_left(run)


def test_the_random_workloads_reach_preempted_and_pruned_candidates(tiny_model):
    pool = [Sample(MAX_LENGTH - index, logit=(-1.0) ** index) for index in range(6)]
    workload = Workload([GroupSpec(3, pool, parts=pruned_by(PruningPlan(20)))])
    for loop in LOOPS:
        run = play(workload, loop, tiny_model)
        assert any(request.num_preemptions for request in run.requests.values())
        assert "pruned" in run.states().values()
        check(workload, run, loop)
