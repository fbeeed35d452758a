"""Which groups are audited, and what they do otherwise."""

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.group.audit import MAX_ANSWERS, AnswerAudits, draw_audit, draw_audits
from vllm_rollout.group.plan import make_plan
from vllm_rollout.group.pruning_plan import PruningPlan

CONTENTS = [f"{number:024x}" for number in range(4000)]


@pytest.mark.parametrize("ratio", [0.05, 0.3])
def test_a_share_of_groups_is_audited_whatever_is_drawn(ratio):
    by_group = draw_audits(ratio, 7, CONTENTS, "group")
    requests = [draw_audits(ratio, 7, [content, "x"], "rollout") for content in CONTENTS]
    by_rollout = [mark for marks in requests for mark in marks]
    for marks in (by_group, by_rollout):
        assert fmean(marks) == pytest.approx(ratio, abs=5 * (ratio * (1 - ratio) / len(CONTENTS)) ** 0.5)
    assert all(len(set(marks)) == 1 for marks in requests), "all groups of a request, or none"


@given(st.integers(0, 2**62), st.lists(st.text(max_size=8), max_size=20), st.sampled_from(["group", "rollout"]))
def test_the_draw_can_be_repeated_and_knows_its_ends(seed, contents, unit):
    assert draw_audits(0.5, seed, contents, unit) == draw_audits(0.5, seed, contents, unit)
    assert draw_audits(0.0, seed, contents, unit) == [False] * len(contents)
    assert draw_audits(1.0, seed, contents, unit) == [True] * len(contents)


def test_seeds_and_prompts_draw_anew():
    assert draw_audits(0.5, 1, CONTENTS, "group") != draw_audits(0.5, 2, CONTENTS, "group")
    one = [draw_audits(0.5, 0, [content], "rollout")[0] for content in CONTENTS[:64]]
    assert set(one) == {True, False}, "a trainer that fixes its seed does not get the same draw in every step"
    twice = draw_audits(0.5, 0, ["same"] * 64, "group")
    assert set(twice) == {True, False}, "prompts that are the same are groups of their own"


@pytest.mark.parametrize(
    "fields",
    [{"redundancy": 8}, {"selection": "dual_end", "redundancy": 8, "patience": 2.0}, {"selection": "shortest"}],
)
def test_an_audit_group_has_only_candidates_that_are_returned_and_stops_none(fields):
    plan = make_plan(8, pruning=PruningPlan(64, allow_fewer=True), max_candidates=64, **fields)
    audit = plan.audited()
    assert (audit.group_size, audit.num_candidates, audit.patience, audit.selection) == (8, 8, None, "first")
    assert audit.audit
    assert audit.returns_all
    races = "redundancy" in fields
    assert audit.pruning == PruningPlan(64, allow_fewer=True, mode="shadow", audit=True, is_instead_of_race=races)
    assert make_plan(8, 2, max_candidates=64).audited().pruning is None
    assert not make_plan(8, 2, max_candidates=64).returns_all


def test_what_is_drawn_for_the_first_group_of_an_answer_holds_for_all():
    audits, seen = AnswerAudits(), set()
    for answer in range(200):
        first = f"answer-{answer}-0"
        marks = {
            audits.draw(0.5, position, CONTENTS[answer], f"answer-{answer}-{position}", first) for position in range(8)
        }
        assert marks == {draw_audit(0.5, 0, CONTENTS[answer])}
        seen |= marks
    assert seen == {True, False}


def test_an_answer_whose_name_is_used_again_draws_anew():
    audits = AnswerAudits()
    drawn = [audits.draw(0.5, seed, "q", "a", "a") for seed in range(40)]
    assert drawn == [draw_audit(0.5, seed, "q") for seed in range(40)]
    assert set(drawn) == {True, False}


def test_draws_of_answers_are_bounded():
    audits = AnswerAudits()
    for number in range(MAX_ANSWERS + 5):
        audits.draw(1.0, 0, "q", str(number), str(number))
    assert len(audits._drawn) == MAX_ANSWERS
    assert not audits.draw(0.0, 0, "q", "late", "0"), "forgotten: it draws by itself"
