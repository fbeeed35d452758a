"""Carriers survive the codecs between our processes."""

import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.wire import TAG_KEY, CandidateTag, EndingNote, RunnerReport


@pytest.mark.parametrize("index", [None, 0, 7])
def test_a_tag_reaches_the_scheduler_as_it_was(index):
    assert_tag_arrives(CandidateTag("g", index, GroupTerms(4, 8, False), 64))


def assert_tag_arrives(tag: CandidateTag) -> None:
    params = SamplingParams(extra_args={"other": 1, **tag.to_extra_args()})
    request = EngineCoreRequest(
        request_id="g-c0", prompt_token_ids=[1, 2], mm_features=None, sampling_params=params, pooling_params=None,
        arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
    )  # fmt: skip
    received = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(request))
    assert CandidateTag.of(received.sampling_params.extra_args) == tag
    assert CandidateTag.of(pickle.loads(pickle.dumps(params)).extra_args) == tag  # scheduler -> worker
    assert CandidateTag.of(msgspec.msgpack.decode(msgspec.msgpack.encode(tag.to_extra_args()))) == tag


def test_a_tag_with_all_terms_reaches_the_scheduler_as_it_was():
    assert_tag_arrives(CandidateTag("g", 1, GroupTerms(4, 8, True, 1.5, 8), 64, observed=False, num_resumed=300))


@pytest.mark.parametrize(
    "extra_args", [None, {}, {"rollout_x": 1}, {TAG_KEY: ["g"]}, {TAG_KEY: b""}, {TAG_KEY: b"\x91\x01"}]
)
def test_a_request_without_a_tag_has_none(extra_args):
    assert CandidateTag.of(extra_args) is None


def test_a_note_reaches_the_api_process_as_it_was():
    assert_note_arrives({})


def assert_note_arrives(parts: dict[str, Any]) -> None:
    """A note with these values of parts arrives."""
    weights = [(0, "a"), (9, "b")]
    note = EndingNote("pruned", 17, (1.25, 0.5), weights, parts, refusal="another size", ended_by_itself=True)
    output = EngineCoreOutput(
        "g-c0", [1, 2], finish_reason=FinishReason.ABORT, stop_reason="pruned",
        kv_transfer_params=note.to_params({"remote": [1]}),
    )  # fmt: skip
    outputs = EngineCoreOutputs(outputs=[output])
    (received,) = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs)).outputs
    assert EndingNote.take(received.kv_transfer_params) == (note, {"remote": [1]})
    assert EndingNote.take(note.to_params(None)) == (note, None)
    replaced = EndingNote("failed", 3, None, [], parts, is_replaced=True)
    assert EndingNote.take(msgspec.msgpack.decode(msgspec.msgpack.encode(replaced.to_params(None)))) == (replaced, None)


@pytest.mark.parametrize("params", [None, {}, {"remote": 1}])
def test_an_output_without_a_note_keeps_its_parameters(params):
    assert EndingNote.take(params) == (None, params)


def test_in_a_step_with_drafts_the_last_token_is_found_by_how_many_there_are():
    confidence = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    report = pickle.loads(pickle.dumps(RunnerReport(confidence, first_positions=np.array([10, -1]))))
    assert [report.token_of(0, num_tokens) for num_tokens in (10, 11, 12, 13, 14)] == [None, 0, 1, 2, None]
    assert [RunnerReport(confidence).token_of(1, num_tokens) for num_tokens in (1, 9)] == [0, 0]
