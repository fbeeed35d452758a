"""Values of pruning survive the codecs between our processes."""

import math
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.test_wire import assert_note_arrives, assert_tag_arrives
from tests.parts.pruning.steps import group_terms, said
from vllm_rollout.kernel.rules.rewards import AnswerName
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.wire import CandidateTag, EndingNote
from vllm_rollout.parts.pruning.rules.assessment import Assessment, Confidence, Scores
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan
from vllm_rollout.parts.pruning.rules.step import SCORES

PLAN = PruningPlan(12, "paper", 0.25, 0.4, 0.75, 0.1, 0.9, "shadow", "confidence", True, 33)
ASSESSMENT = Assessment("head", -0.25, 0.375, 0.5, False, 4, Confidence(3.0, 1.5, 2.25))
COLD = Assessment("confidence", 2.25, None, 1.0, True, 0, Confidence(3.0, 1.5, 2.25), cold=True)


@pytest.mark.parametrize(
    "scoring",
    [Scoring("r", "p", 2**62 - 1, prompt_key="id:ü"), Scoring("r", "ü", -5, AnswerName("a", 3), AnswerName("b"))],
)
@pytest.mark.parametrize("index", [None, 0, 7])
def test_a_tag_of_a_scored_candidate_reaches_the_scheduler_as_it_was(scoring, index):
    assert_tag_arrives(CandidateTag("g", index, GroupTerms(4, 8, False), 64, said(scoring)))


def test_terms_of_pruning_reach_the_scheduler_as_they_were():
    terms = group_terms(4, 8, True, 1.5, num_replaceable=8, pruning=PLAN, audit_ratio=0.05)
    assert_tag_arrives(CandidateTag("g", 1, terms, 64, said(Scoring("r", "p", 1)), observed=False, num_resumed=300))


@pytest.mark.parametrize("assessment", [None, ASSESSMENT, COLD])
def test_scores_reach_the_api_process_as_they_were(assessment):
    parts = SCORES.value(Scores(assessment, None))
    assert_note_arrives(parts)
    note, _ = EndingNote.take(EndingNote("pruned", 17, None, [], parts).to_params(None))
    assert isinstance(SCORES.of(note.parts).assessment, type(assessment))


def test_a_confidence_that_nobody_could_see_travels_as_it_is():
    unseen = replace(COLD, confidence=Confidence(math.nan, math.inf, 1.0))
    sent = EndingNote("finished", 1, None, [], SCORES.value(Scores(unseen, None)))
    note, _ = EndingNote.take(msgspec.msgpack.decode(msgspec.msgpack.encode(sent.to_params(None))))
    confidence = SCORES.of(note.parts).assessment.confidence
    assert math.isnan(confidence.mean)
    assert confidence.lowest_window == math.inf


@given(trial_lengths=st.lists(st.integers(2, 4096), max_size=6, unique=True).map(sorted), final=st.booleans())
def test_a_plan_with_several_lengths_comes_through_a_codec_that_knows_no_tuples(trial_lengths, final):
    plan = PruningPlan(1, mode="shadow", trial_lengths=tuple(trial_lengths), final_score=final)
    tag = CandidateTag("g", 0, group_terms(1, 2, pruning=plan), 64, said(Scoring("r", "p", 1)))
    assert CandidateTag.of(tag.to_extra_args()) == tag
