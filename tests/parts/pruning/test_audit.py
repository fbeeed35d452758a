"""Choice of audit groups, and their behaviour."""

from itertools import pairwise
from math import ceil
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parts.pruning.steps import pruned_by
from vllm_rollout.kernel.rules.plan import make_plan
from vllm_rollout.parts.pruning.rules.audit import MAX_ANSWERS, MAX_KINDS, AnswerAudits, AuditTurns, draw_audit
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan

CONTENTS = [f"{number:024x}" for number in range(4000)]


def audited(ratio, seed=7, contents=CONTENTS):
    return [draw_audit(ratio, seed, content, position) for position, content in enumerate(contents)]


@pytest.mark.parametrize("ratio", [0.05, 0.3])
def test_a_share_of_single_groups_is_audited(ratio):
    assert fmean(audited(ratio)) == pytest.approx(ratio, abs=5 * (ratio * (1 - ratio) / len(CONTENTS)) ** 0.5)


@given(st.integers(0, 2**62), st.lists(st.text(max_size=8), max_size=20))
def test_the_draw_can_be_repeated_and_knows_its_ends(seed, contents):
    assert audited(0.5, seed, contents) == audited(0.5, seed, contents)
    assert audited(0.0, seed, contents) == [False] * len(contents)
    assert audited(1.0, seed, contents) == [True] * len(contents)


def test_seeds_and_prompts_draw_anew():
    assert audited(0.5, 1) != audited(0.5, 2)
    assert set(audited(0.5, 0, ["same"] * 64)) == {True, False}, "prompts that are the same are groups of their own"


@given(st.floats(0.01, 1.0), st.integers(1, 300))
def test_answers_have_audits_by_their_number_and_the_first_is_one(ratio, num):
    turns = AuditTurns()
    marks = [turns.take("kind", ratio) for _ in range(num)]
    assert marks[0]
    assert abs(sum(marks) - num * ratio) < 3
    longest = ceil(2.7 / ratio)
    assert all(any(marks[start : start + longest]) for start in range(num - longest))


def test_at_a_twentieth_the_first_is_audited_and_each_13th_21st_or_34th_after_it():
    turns = AuditTurns()
    audited = [number for number in range(400) if turns.take("kind", 0.05)]
    assert audited[:6] == [0, 13, 34, 47, 68, 89]
    assert {later - earlier for earlier, later in pairwise(audited)} == {13, 21, 34}


def test_kinds_of_answers_are_counted_by_themselves_and_a_ratio_of_0_has_no_turn():
    turns = AuditTurns()
    assert [turns.take(kind, 0.5) for kind in ("a", "b", "a", "b")] == [True, True, False, False]
    assert not any(turns.take("never", 0.0) for _ in range(100))
    assert turns.take("never", 0.05)
    assert all(turns.take("always", 1.0) for _ in range(100))


def test_kinds_and_answers_that_are_remembered_are_bounded():
    turns, audits = AuditTurns(), AnswerAudits()
    for number in range(max(MAX_KINDS, MAX_ANSWERS) + 5):
        turns.take(number, 0.5)
        audits.take("kind", 1.0, str(number), str(number))
    assert (len(turns._counts), len(audits._marks)) == (MAX_KINDS, MAX_ANSWERS)


@pytest.mark.parametrize(
    "fields",
    [{"redundancy": 8}, {"selection": "dual_end", "redundancy": 8, "patience": 2.0}, {"selection": "shortest"}],
)
def test_an_audit_group_has_only_candidates_that_are_returned_and_stops_none(fields):
    plan = make_plan(8, parts=pruned_by(PruningPlan(64, allow_fewer=True)), max_candidates=64, **fields)
    audit = plan.audited()
    assert (audit.group_size, audit.num_candidates, audit.patience, audit.selection) == (8, 8, None, "first")
    assert audit.audit
    assert audit.returns_all
    races = "redundancy" in fields
    assert audit.pruning == PruningPlan(64, allow_fewer=True, mode="shadow", audit=True, is_instead_of_race=races)
    assert make_plan(8, 2, max_candidates=64).audited().pruning is None
    assert not make_plan(8, 2, max_candidates=64).returns_all


def test_the_turn_of_the_first_group_of_an_answer_holds_for_all():
    audits, drawn = AnswerAudits(), []
    for answer in range(40):
        first = f"answer-{answer}-0"
        marks = {audits.take("kind", 0.25, f"answer-{answer}-{position}", first) for position in range(8)}
        assert len(marks) == 1
        drawn += 8 * list(marks)
    assert drawn[0]
    assert 8 * 8 <= sum(drawn) <= 8 * 12


def test_an_answer_whose_name_is_used_again_takes_another_turn():
    audits = AnswerAudits()
    assert [audits.take("kind", 0.5, "a", "a") for _ in range(4)].count(True) == 2
