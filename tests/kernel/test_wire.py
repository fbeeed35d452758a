"""Carriers survive the codecs between our processes."""

import math
import pickle
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.support.steps import group_terms, said
from vllm_rollout.kernel.rules.rewards import AnswerName
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.rules.types import Assessment, Confidence, Scores, TooLate
from vllm_rollout.kernel.wire import TAG_KEY, CandidateTag, EndingNote, RunnerReport
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan
from vllm_rollout.parts.pruning.rules.step import SCORES
from vllm_rollout.parts.rounds.rules.race import RacePlace
from vllm_rollout.parts.rounds.rules.step import LOST

PLAN = PruningPlan(12, "paper", 0.25, 0.4, 0.75, 0.1, 0.9, "shadow", "confidence", True, 33)
ASSESSMENT = Assessment("head", -0.25, 0.375, 0.5, False, 4, Confidence(3.0, 1.5, 2.25))
COLD = Assessment("confidence", 2.25, None, 1.0, True, 0, Confidence(3.0, 1.5, 2.25), cold=True)


@pytest.mark.parametrize(
    "scoring",
    [
        None,
        Scoring("r", "p", 2**62 - 1, prompt_key="id:ü"),
        Scoring("r", "ü", -5, AnswerName("a", 3), AnswerName("b")),
    ],
)
@pytest.mark.parametrize("index", [None, 0, 7])
def test_a_tag_reaches_the_scheduler_as_it_was(scoring, index):
    tag = CandidateTag("g", index, GroupTerms(4, 8, False), 64, said(scoring))
    params = SamplingParams(extra_args={"other": 1, **tag.to_extra_args()})
    request = EngineCoreRequest(
        request_id="g-c0", prompt_token_ids=[1, 2], mm_features=None, sampling_params=params, pooling_params=None,
        arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip
    received = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(request))
    assert CandidateTag.of(received.sampling_params.extra_args) == tag
    assert CandidateTag.of(pickle.loads(pickle.dumps(params)).extra_args) == tag  # scheduler -> worker


@pytest.mark.parametrize("place", [None, RacePlace("round", 3, 7)])
@pytest.mark.parametrize("plan", [None, PLAN])
def test_a_tag_of_a_round_reaches_the_scheduler_as_it_was(plan, place):
    terms = group_terms(4, 8, True, 1.5, num_replaceable=8, pruning=plan, audit_ratio=0.05)
    tag = CandidateTag(
        "g", 1, terms, 64, said(plan and Scoring("r", "p", 1), place=place), observed=False, num_resumed=300
    )
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(tag.to_extra_args()))
    assert CandidateTag.of(received) == tag


@pytest.mark.parametrize("parts", [SCORES.value(Scores(ASSESSMENT, None)), LOST.value(TooLate())])
def test_a_note_of_a_round_reaches_the_api_process_as_it_was(parts):
    note = EndingNote("failed", 3, None, [], parts, is_replaced=True)
    params = msgspec.msgpack.decode(msgspec.msgpack.encode(note.to_params(None)))
    assert EndingNote.take(params) == (note, None)


@pytest.mark.parametrize(
    "extra_args", [None, {}, {"rollout_x": 1}, {TAG_KEY: ["g"]}, {TAG_KEY: b""}, {TAG_KEY: b"\x91\x01"}]
)
def test_a_request_without_a_tag_has_none(extra_args):
    assert CandidateTag.of(extra_args) is None


@pytest.mark.parametrize("assessment", [None, ASSESSMENT, COLD])
def test_a_note_reaches_the_api_process_as_it_was(assessment):
    weights = [(0, "a"), (9, "b")]
    parts = SCORES.value(Scores(assessment, None))
    note = EndingNote("pruned", 17, (1.25, 0.5), weights, parts, refusal="another size", ended_by_itself=True)
    output = EngineCoreOutput(
        "g-c0", [1, 2], finish_reason=FinishReason.ABORT, stop_reason="pruned",
        kv_transfer_params=note.to_params({"remote": [1]}),
    )  # fmt: skip
    outputs = EngineCoreOutputs(outputs=[output])
    (received,) = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs)).outputs
    assert EndingNote.take(received.kv_transfer_params) == (note, {"remote": [1]})
    assert EndingNote.take(note.to_params(None)) == (note, None)
    scores = SCORES.of(EndingNote.take(received.kv_transfer_params)[0].parts)
    assert isinstance(scores.assessment, type(assessment))


def test_a_confidence_that_nobody_could_see_travels_as_it_is():
    unseen = replace(COLD, confidence=Confidence(math.nan, math.inf, 1.0))
    sent = EndingNote("finished", 1, None, [], SCORES.value(Scores(unseen, None)))
    note, _ = EndingNote.take(msgspec.msgpack.decode(msgspec.msgpack.encode(sent.to_params(None))))
    confidence = SCORES.of(note.parts).assessment.confidence
    assert math.isnan(confidence.mean)
    assert confidence.lowest_window == math.inf


@pytest.mark.parametrize("params", [None, {}, {"remote": 1}])
def test_an_output_without_a_note_keeps_its_parameters(params):
    assert EndingNote.take(params) == (None, params)


def test_in_a_step_with_drafts_the_last_token_is_found_by_how_many_there_are():
    confidence = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    report = pickle.loads(pickle.dumps(RunnerReport(confidence, first_positions=np.array([10, -1]))))
    assert [report.token_of(0, num_tokens) for num_tokens in (10, 11, 12, 13, 14)] == [None, 0, 1, 2, None]
    assert [RunnerReport(confidence).token_of(1, num_tokens) for num_tokens in (1, 9)] == [0, 0]


@given(trial_lengths=st.lists(st.integers(2, 4096), max_size=6, unique=True).map(sorted), final=st.booleans())
def test_a_plan_with_several_lengths_comes_through_a_codec_that_knows_no_tuples(trial_lengths, final):
    plan = PruningPlan(1, mode="shadow", trial_lengths=tuple(trial_lengths), final_score=final)
    tag = CandidateTag("g", 0, group_terms(1, 2, pruning=plan), 64, said(Scoring("r", "p", 1)))
    assert CandidateTag.of(tag.to_extra_args()) == tag
