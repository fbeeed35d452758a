"""Audit groups whose candidates come one by one: who has a place in them, who is stopped, what is learned of them."""

from dataclasses import replace

import pytest
from group_steps import end_step, states
from hypothesis import given
from hypothesis import strategies as st
from test_step import PLAN, SCORING, Run, seen, warm_judge

from tests.support.reports import report_of
from vllm_rollout.group.judging.judge import Judge
from vllm_rollout.group.judging.ledger import Scoring
from vllm_rollout.group.plans.terms import GroupTerms
from vllm_rollout.group.racing.lifecycle import NOTHING, Group, Settlement
from vllm_rollout.group.step.step import LaunchRefused
from vllm_rollout.group.types import CandidateId, HeadKey


def audited(group_size: int, num_candidates: int, num_launched: int | None = None, **terms) -> Group:
    group = Group(GroupTerms(group_size, num_candidates, **terms), audit=True)
    for _ in range(num_candidates if num_launched is None else num_launched):
        group.launch()
    return group


def test_those_that_come_first_run_to_their_ends_and_the_others_not_at_all():
    group = audited(2, 4)
    assert [group.is_unwanted(index) for index in range(4)] == [False, False, True, True]
    assert group.settle() == Settlement(stop=(2, 3))
    assert end_step(group, (1, "stop", 5)) == NOTHING
    assert end_step(group, (0, "stop", 500)) == Settlement()
    assert states(group) == ["finished", "finished", "surplus", "surplus"]
    assert group.complete
    assert group.over


def test_one_that_comes_when_all_places_are_taken_is_surplus():
    group = audited(2, 4, num_launched=2)
    end_step(group, (0, "stop", 5))
    assert group.is_unwanted(group.launch())
    assert group.settle() == Settlement(stop=(2,))
    assert end_step(group, (1, "stop", 9)) == Settlement()
    assert group.is_unwanted(group.launch())
    assert group.settle() == Settlement(stop=(3,))
    assert group.over


def test_one_without_a_place_that_ends_at_once_has_lost():
    group = audited(1, 2)
    assert end_step(group, (1, "stop", 1)) == Settlement(lost_ties=(1,))
    assert states(group) == ["running", "surplus"]


def test_a_lost_candidate_leaves_its_place_to_one_that_comes_later():
    group = audited(2, 4, num_launched=3)
    end_step(group, (0, "failed", 3))
    assert not group.is_unwanted(group.launch())
    assert end_step(group, (1, "stop", 5), (3, "stop", 9)) == Settlement()
    assert states(group) == ["failed", "finished", "surplus", "finished"]


def test_without_early_stop_everybody_has_a_place():
    group = audited(2, 4, early_stop=False)
    assert group.settle() == NOTHING
    end_step(group, *((index, "stop", 5 + index) for index in range(4)))
    assert states(group) == ["finished"] * 4


def test_truncated_candidates_keep_their_places():
    group = audited(2, 4)
    group.settle()
    assert end_step(group, (0, "length", 8), (1, "stop", 3)) == Settlement()
    assert states(group) == ["finished", "finished", "surplus", "surplus"]


@given(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 3))
def test_whatever_the_lengths_the_first_that_come_are_those_that_finish(group_size, lengths, pause):
    """Siblings come one by one, `pause` steps apart."""
    run = Run(Judge())
    terms = GroupTerms(group_size, len(lengths), pruning=PLAN, audit_ratio=1.0)
    for index, length in enumerate(lengths):
        id, run.groups["a"] = run.steps.launch("a", terms, index, scoring=SCORING)
        run.lengths[id], run.running[id] = length, 0
        for _ in range(pause):
            run.step()
    while run.running:
        verdicts = run.step()
        assert not verdicts.stop.keys() & verdicts.lost_ties
    states = [run.groups["a"].state(index) for index in range(len(lengths))]
    assert states == ["finished" if index < group_size else "surplus" for index in range(len(lengths))]


def test_the_first_candidate_s_seed_draws_and_all_of_the_group_agree():
    run = Run(Judge())
    terms = GroupTerms(2, 4, pruning=PLAN, audit_ratio=0.3)
    drawn = []
    for number in range(200):
        group_id = f"g{number}"
        for seed in range(4):
            scoring = Scoring(group_id, "q", 10 * number + seed)
            _, group = run.steps.launch(group_id, terms, scoring=scoring)
        plans = {run.steps._scored[CandidateId(group_id, index)].entry.plan for index in range(4)}
        assert plans == {PLAN.audited(races=True) if group.audit else PLAN}
        drawn.append(group.audit)
    assert 30 < sum(drawn) < 90, "60 are expected; by the seeds, always as many"
    again = Run(Judge())
    for number in range(200):
        again.steps.launch(f"g{number}", terms, scoring=Scoring(f"g{number}", "q", 10 * number))
    assert [again.steps._table.find(f"g{number}").audit for number in range(200)] == drawn


def test_siblings_say_the_same_share():
    run = Run(Judge())
    run.steps.launch("a", GroupTerms(2, 4, pruning=PLAN, audit_ratio=0.05), scoring=SCORING)
    with pytest.raises(LaunchRefused, match=r"audit_ratio of this group is 0.05, as its first candidate said, got 0.5"):
        run.steps.launch("a", GroupTerms(2, 4, pruning=PLAN, audit_ratio=0.5), scoring=SCORING)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_nobody_is_pruned_in_an_audit_group_and_its_labels_say_so(ratio):
    judge = warm_judge()
    run = Run(judge)
    run.launch("a", [9, 9, 9, 9], GroupTerms(1, 4, pruning=PLAN, early_stop=False, audit_ratio=ratio), SCORING)
    for _ in range(PLAN.detection_length - 1):
        run.step()
    run.step({CandidateId("a", index): seen(score) for index, score in enumerate((0.0, 1.0, 8.0, 9.0))})
    assert (len(run.running) == 4) == (ratio == 1.0)
    while run.running:
        run.step()
    learning = judge.learning_of(HeadKey(PLAN.detection_length))
    before = report_of(learning).audit.num_labels
    kept = [index for index in range(4) if run.ends[CandidateId("a", index)][0] == "stop"]
    _, statuses, labels = judge.reward("rollout", [("q", index, 1.0, True) for index in kept])
    assert set(statuses) == {"accepted"}
    assert {(label.origin, label.active) for label in labels} == {("audit", False) if ratio else ("race", True)}
    assert report_of(learning).audit.num_labels - before == pytest.approx(4 if ratio else 0, rel=1e-3)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_labels_of_a_group_without_spare_candidates_are_plain_audited_or_not(ratio):
    judge = warm_judge()
    run = Run(judge)
    shadow = replace(PLAN, mode="shadow")
    run.launch("a", [9, 9], GroupTerms(2, 2, pruning=shadow, audit_ratio=ratio), SCORING)
    for _ in range(PLAN.detection_length - 1):
        run.step()
    run.step({CandidateId("a", index): seen(score) for index, score in enumerate((0.0, 9.0))})
    while run.running:
        run.step()
    _, statuses, labels = judge.reward("rollout", [("q", index, 1.0, True) for index in range(2)])
    assert statuses == ["accepted"] * 2
    assert {(label.origin, label.active) for label in labels} == {("plain_audit" if ratio else "plain", False)}
    assert judge.learning_of(HeadKey(PLAN.detection_length)).audit_report().offset == 0
