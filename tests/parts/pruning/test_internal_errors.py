"""An exception in pruning fails the candidate or the group that it concerns: the engine, and all others, go on."""

from typing import Any

import pytest

from tests.kernel.core.scheduler_runs import LOST, WON, TracedRun
from tests.kernel.core.test_internal_errors import LENGTHS, assert_group_g_fails_alone
from tests.parts.pruning.scored_runs import PRUNED, add_group, assert_nothing_left, prune_by_sign
from tests.parts.pruning.steps import judge_of
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan
from vllm_rollout.parts.pruning.rules.step import PruningStep

PLAN = PruningPlan(detection_length=8, keep_ratio=0.5)


@pytest.fixture
def run(new_run) -> TracedRun:
    """With groups g and i of two of four, where candidate 3 is pruned, h without pruning, and an ordinary request o."""
    run = new_run()
    prune_by_sign(run, 8)
    for group_id in "gi":
        add_group(run, group_id, LENGTHS, 2, pruning=PLAN, logits=[1, 1, 1, -1])
    add_group(run, "h", LENGTHS, 2)
    run.add("o", 70)
    return run


@pytest.mark.parametrize("place", ["judge", "_write_end"])
def test_a_group_whose_rules_of_pruning_raise_fails_alone(run: TracedRun, monkeypatch: Any, place: str):
    run.step()
    steps = run.scheduler.group_steps
    owner, wanted = {
        "judge": (judge_of(steps), lambda group, scoring, due: scoring.prompt_id == "g"),
        "_write_end": (steps.part(PruningStep), lambda id, *_: id.group_id == "g"),
    }[place]
    assert_group_g_fails_alone(run, monkeypatch, owner, wanted, place)
    assert run.ends([f"i-{index}" for index in range(4)]) == [WON, WON, LOST, PRUNED]
    assert_nothing_left(run)
