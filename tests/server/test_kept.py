"""What deferred candidates have generated, as bytes."""

import zlib
from array import array
from dataclasses import replace

import msgspec
import pytest

from vllm_rollout.group.plans.plan import GroupPlan
from vllm_rollout.group.plans.pruning_plan import PruningPlan
from vllm_rollout.group.plans.resumption import VersionSpan
from vllm_rollout.group.types import Assessment, CandidateState, Confidence, Ending
from vllm_rollout.server import kept as kept_module
from vllm_rollout.server.ended import trajectory_of
from vllm_rollout.server.engine import CandidateEnd
from vllm_rollout.server.kept import keep, read_kept
from vllm_rollout.server.protocol import Return

ASSESSMENT = Assessment("head", 0.5, 0.6, 0.25, True, 3, Confidence(3.0, 2.0, 2.5))


def end(index: int, state: CandidateState, num_tokens: int, **fields) -> CandidateEnd:
    return CandidateEnd(
        ending=Ending(index, state, num_tokens),
        token_ids=[1000 * index + i for i in range(num_tokens)],
        logprobs=[-0.1 * i for i in range(num_tokens)],
        text=None,
        finish_reason="stop" if state == "finished" else "abort",
        stop_reason=None if state == "finished" else state,
        confidence=(2.0, 0.5),
        weight_versions=[{"version": "v", "start": 0, "end": num_tokens}] if num_tokens else [],
        **fields,
    )


def test_candidates_are_read_as_they_were_kept():
    ends = [end(0, "deferred", 4), end(1, "failed", 9), end(2, "finished", 7), end(3, "deferred", 0)]
    first, second, third = read_kept(keep(ends, 3, None))
    assert list(first.token_ids) == [0, 1, 2, 3]
    assert list(first.logprobs) == ends[0].logprobs  # exactly
    assert (first.whole, first.finish_reason, first.stop_reason) == (False, None, None)
    assert (first.confidence, first.spans) == ((2.0, 0.5), [VersionSpan("v", 0, 4)])
    assert (second.whole, second.num_tokens, second.finish_reason) == (True, 7, "stop")
    assert (third.whole, third.num_tokens, third.spans) == (False, 0, [])


def test_only_as_many_as_a_long_round_runs_are_kept():
    assert len(read_kept(keep([end(i, "deferred", 3) for i in range(5)], 2, None))) == 2


def test_one_that_lost_a_tie_is_over_by_itself():
    tie = end(0, "surplus", 3)
    tie = replace(tie, ending=replace(tie.ending, ended_by_itself=True))
    (kept,) = read_kept(keep([tie], 1, None))
    assert (kept.whole, kept.finish_reason, kept.stop_reason) == (True, "stop", None)


@pytest.mark.parametrize(("mode", "expected"), [("active", 0.125), ("shadow", 0.5)])
def test_survival_is_not_forgotten(mode, expected):
    plan = PruningPlan(2, mode=mode)
    judged = end(0, "deferred", 4, assessment=ASSESSMENT, survival_before=0.5)
    (kept,) = read_kept(keep([judged], 1, plan))
    assert kept.survival_probability == expected
    later = end(0, "finished", 9, survival_before=kept.survival_probability)
    trajectory = trajectory_of(later, Return(), GroupPlan(1, pruning=replace(plan, mode="shadow")))
    assert trajectory.survival_probability == trajectory.inclusion_probability == expected


def test_what_is_too_much_is_not_kept(monkeypatch):
    monkeypatch.setattr(kept_module, "MAX_KEPT_BYTES", 600)
    assert keep([end(0, "deferred", 20)], 1, None) is not None
    assert keep([end(0, "deferred", 60)], 1, None) is None


def test_a_token_takes_a_few_bytes():
    """As many as docs/http.md says, of log probabilities as vLLM has them."""
    logprobs = array("f", [-(((7919 * i) % 10_007) / 2503) for i in range(20_000)]).tolist()
    candidate = replace(
        end(0, "deferred", 0), token_ids=[(7919 * i) % 49_152 for i in range(20_000)], logprobs=logprobs
    )
    assert 5 < len(keep([candidate], 1, None)) / 20_000 < 9


GOOD = [False, False, array("i", [1]).tobytes(), None, [["v", 0, 1]], None, None, None, 1.0]


@pytest.mark.parametrize(("position", "value", "words"), [
    (2, b"abc", "must be 0, got 3 bytes"),
    (2, array("i", [-1]).tobytes(), "at least 0"),
    (3, array("d", [1.0, 2.0]).tobytes(), "must be 1, got 16 bytes"),
    (4, [["v", 0, 2]], "must cover its 1 tokens"),
    (4, [["v", 1, 1]], "must cover its 1 tokens"),
    (8, 0.0, "> 0"),
    (0, 3, "Expected `bool`"),
])  # fmt: skip
def test_what_was_not_kept_so_is_refused(position, value, words):
    wrong = [value if i == position else field for i, field in enumerate(GOOD)]
    with pytest.raises(ValueError, match=words):
        read_kept(zlib.compress(msgspec.msgpack.encode([wrong])))


@pytest.mark.parametrize("blob", [b"", b"abc", zlib.compress(b""), zlib.compress(msgspec.msgpack.encode([GOOD]))[:-1]])
def test_bytes_that_are_none_are_refused(blob):
    with pytest.raises(ValueError):  # noqa: PT011
        read_kept(blob)
