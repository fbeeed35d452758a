"""Scores in the order of a step: one test per rule, then whole runs in random order of events."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel.rules.group_steps import Run
from tests.kernel.rules.test_step import assert_each_ends_once, cancels, races
from tests.parts.pruning.steps import group_terms, said, steps_of
from tests.support.steps import group_steps
from vllm_rollout.kernel.rules.types import CandidateId
from vllm_rollout.parts.pruning.rules.assessment import Confidence
from vllm_rollout.parts.pruning.rules.judge import Judge
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey, Observation, PruningPlan
from vllm_rollout.parts.pruning.rules.step import PRUNING, PruningStep

PLAN = PruningPlan(4, keep_ratio=0.5, min_labels=8)
SCORING = Scoring("rollout", "q", 7)


def seen(score: float) -> Observation:
    return Observation(Confidence(score, score, score))


def warm_judge() -> Judge:
    """A judge for which high confidence succeeds."""
    judge = Judge()
    entries = judge.learning_of(HeadKey(PLAN.detection_length)).calibrators["confidence"]
    for number in range(200):
        entries.observe(number % 10)
        entries.add(number % 10, number % 10 > 4)
    return judge


def test_races_are_settled_before_scores_are_judged():
    run = Run(steps_of(warm_judge()))
    run.launch("a", [4, 9, 9], group_terms(1, 3, pruning=PLAN), said(SCORING))
    for _ in range(3):
        run.step()
    verdicts = run.step({PRUNING: {CandidateId("a", index): seen(1) for index in range(3)}})
    assert set(verdicts.stop.values()) == {"surplus"}


@pytest.mark.parametrize("end", ["drop", "fresh"])
def test_no_reward_is_awaited_for_a_group_that_broke_or_whose_step_failed(end):
    judge = warm_judge()
    steps, terms = steps_of(judge), group_terms(2, 4, pruning=replace(PLAN, keep_ratio=1.0))
    ids = [steps.launch("a", terms, index, said=said(SCORING))[0] for index in range(4)]
    steps.close_step({PRUNING: {id: seen(1) for id in ids}}, lambda id: 4)
    assert judge.ledger.awaits(PLAN.detection_length)
    if end == "drop":
        steps.drop("a")
    else:
        steps.fresh()
    assert not judge.ledger.awaits(PLAN.detection_length)
    assert judge.ledger.reward("rollout", "q", 0, 1.0) == ("unfinished", None)


def test_who_ended_in_a_step_in_which_nobody_was_pruned_keeps_its_place():
    steps, terms = group_steps(), group_terms(2, 4, pruning=PLAN)
    launched = [steps.launch("a", terms, index, said=said(SCORING)) for index in range(4)]
    ids, group = [id for id, _ in launched], launched[0][1]
    steps.ended(ids[0], group, "stop", 50)
    assert steps.close_step({PRUNING: {ids[3]: seen(1)}}, lambda id: 4).stop == {}
    steps.ended(ids[1], group, "stop", 30)
    steps.ended(ids[2], group, "stop", 40)
    assert steps.close_step({}, lambda id: 5).lost_ties == {ids[2]}
    assert [group.state(id.index) for id in ids] == ["finished", "finished", "surplus", "surplus"]


def test_pruning_settles_the_race_again():
    """The candidates left by pruning cannot reach group_size by themselves: the truncated one counts now."""
    plan = PruningPlan(4, keep_ratio=0.05, allow_fewer=True, min_labels=8, min_survival=0.05)
    judge = warm_judge()
    run = Run(steps_of(judge))
    run.launch("a", [9, 9, 9, 9], group_terms(1, 4, pruning=plan), said(Scoring("r", "q", 1)))
    for _ in range(3):
        run.step()
    verdicts = run.step({PRUNING: {CandidateId("a", index): seen(0) for index in range(4)}})
    assert set(verdicts.stop.values()) == {"pruned"}
    assert 1 <= len(run.running) < 4


def test_the_ledger_knows_every_end_and_forgets_nothing_that_may_be_rewarded():
    judge = warm_judge()
    run = Run(steps_of(judge))
    run.launch("a", [6, 9, 2], group_terms(2, 3, early_stop=False, patience=1.0, pruning=PLAN), said(SCORING))
    for _ in range(3):
        run.step()
    run.step({PRUNING: {CandidateId("a", index): seen(9) for index in range(2)}})
    while run.running:
        run.step()
    rollout = judge.ledger._rollouts["rollout"]
    for (_, index), entry in rollout.items():
        assert (entry.state, entry.num_tokens) == (run.groups["a"].state(index), run.ends[CandidateId("a", index)][1])
    assert run.steps.part(PruningStep)._scored == {}


@pytest.mark.thorough
@settings(max_examples=200)
@given(races, cancels, st.data())
def test_every_candidate_has_one_end_whatever_happens_and_whoever_is_pruned(groups, cancels, data):
    run, chance = Run(steps_of(warm_judge())), data.draw(st.randoms(use_true_random=False))
    for number, (lengths, size, early_stop) in enumerate(groups):
        plan = PruningPlan(3, allow_fewer=True, min_labels=8) if data.draw(st.booleans()) else None
        terms = group_terms(min(size, len(lengths)), len(lengths), early_stop, None if early_stop else 1.5, plan)
        run.launch(str(number), lengths, terms, said(plan and Scoring("r", str(number), number)))

    def see() -> dict[str, dict[CandidateId, Observation]]:
        return {PRUNING: {id: seen(chance.uniform(0, 9)) for id, tokens in run.running.items() if tokens == 2}}

    assert_each_ends_once(run, cancels, see)
    assert run.steps.part(PruningStep)._scored == {}
