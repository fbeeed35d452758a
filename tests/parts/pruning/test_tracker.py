"""Scores of a tracker against a brute-force record of every token, whatever the batches look like."""

import math
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.parts.observing.test_tracker import (
    CPU,
    HIDDEN_SIZE,
    VOCAB_SIZE,
    Steps,
    decode,
    play_batches,
    play_dropped,
)
from tests.parts.pruning.scoring import ScoringTracker
from vllm_rollout.config import CONFIDENCE_WINDOW_TOKENS
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey
from vllm_rollout.parts.pruning.worker.operators import windowed_confidence
from vllm_rollout.parts.pruning.worker.quality_head import HeadWeights
from vllm_rollout.parts.pruning.worker.scored_rows import DUE_COLUMNS
from vllm_rollout.parts.pruning.worker.scorer import PublishedHead


def weights(seed: int) -> HeadWeights:
    generator = torch.Generator().manual_seed(seed)
    return HeadWeights(*(torch.randn(shape, generator=generator) for shape in ((4, HIDDEN_SIZE), (4,), (4,), (1,))))


class Scored(NamedTuple):
    """Values of a due row."""

    values: list[float]
    head_version: int
    feature: list[float] | None


class Request(NamedTuple):
    id: str
    num_prompt_tokens: int
    detection_length: int | None
    is_candidate: bool = True


class ScoredSteps(Steps):
    """Steps whose candidates are scored. Overrides: new_tracker, track, step, drop."""

    def __init__(self, seed: int = 0, *, capacity: int = 4) -> None:
        super().__init__(seed, capacity=capacity)
        self.scored: dict[str, list[Scored]] = {}

    def new_tracker(self, capacity: int) -> ScoringTracker:
        return ScoringTracker(CPU, capacity)

    def track(self, request: Request) -> None:
        self.tracker.add_scored(request.id, request.num_prompt_tokens, request.detection_length)

    def step(self, rows: list[tuple[Request, int]], *, padded: bool = False) -> None:
        super().step(rows, padded=padded)
        self._note_scores()

    def drop(self, request: Request, num_tokens: int) -> None:
        super().drop(request, num_tokens)
        if len(self.confidences[request.id]) < (request.detection_length or 0):
            self.scored.pop(request.id, None)  # it will be due again

    def _note_scores(self) -> None:
        due = self.tracker.scored.due
        if due is None:
            return
        assert due.values.shape == (len(due.request_ids), DUE_COLUMNS)
        features = dict(zip(due.request_ids, due.features.tolist(), strict=True))
        for request_id, row, version in zip(due.request_ids, due.values.tolist(), due.head_versions, strict=True):
            self.scored.setdefault(request_id, []).append(Scored(row, version, features.get(request_id)))

    def check(self, request: Request, *, head: HeadWeights | None = None) -> None:
        """The request was scored once, from its first `detection_length` tokens, or never if it had fewer."""
        length = request.detection_length
        if length is None or len(self.confidences[request.id]) < length:
            assert request.id not in self.scored
            return
        (scored,) = self.scored[request.id]
        trace = torch.tensor([self.confidences[request.id][:length]])
        expected = windowed_confidence(trace, torch.tensor([length]), CONFIDENCE_WINDOW_TOKENS)
        torch.testing.assert_close(torch.tensor([scored.values[1:]]), expected)
        state = self.features[request.id][length - 1]
        assert scored.feature == state.tolist()
        if head is None:
            assert math.isnan(scored.values[0])
            assert scored.head_version == 0
        else:
            logit = torch.relu(state.float() @ head.w1.T + head.b1) @ head.w2 + head.b2
            assert scored.values[0] == pytest.approx(logit.item(), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("detection_length", [1, 2, 5, 40])
def test_a_candidate_is_due_in_the_step_that_makes_its_token(detection_length):
    steps = ScoredSteps()
    request = Request("a", 7, detection_length)
    steps.add(request)
    steps.step([(request, 7)])
    for num_tokens in range(1, detection_length + 5):
        assert (steps.tracker.scored.due is not None) == (num_tokens == detection_length)
        steps.step([(request, 1)])
    steps.check(request)


def test_candidates_of_several_adapters_are_due_in_one_step_each_with_the_head_of_its_own():
    tracker = ScoringTracker(CPU, capacity=2)
    heads = {
        HeadKey(2): weights(0),
        HeadKey(2, "a"): weights(1),
        HeadKey(2, "b"): weights(2),
        HeadKey(3, "a"): weights(3),
    }
    for version, (key, head) in enumerate(heads.items(), start=1):
        tracker.scorer.heads[key] = PublishedHead(version, head)
    keys = [
        HeadKey(3, "a"),
        HeadKey(2, "b"),
        HeadKey(2, "a"),
        HeadKey(2),
        HeadKey(2, "new"),
        HeadKey(2, "b"),
        HeadKey(3),
    ]
    ids = [f"r{number}" for number in range(len(keys))]
    for request_id, key in zip(ids, keys, strict=True):
        tracker.add_scored(request_id, 4, key.detection_length, adapter=key.adapter)
    for (request_id, kept), key in zip(tracker.copy(ids[:3]).items(), keys, strict=False):
        tracker.discard(request_id)  # as if it went on in another worker
        tracker.add_scored(request_id, 4, key.detection_length, adapter=key.adapter)
        tracker.restore(request_id, kept)
    generator = torch.Generator().manual_seed(1)
    computed = np.array([4 + key.detection_length - 2 for key in keys])
    for seen in (computed, computed + 1):  # the token before, and the one that they are due with
        tracker.start_step()
        hidden = torch.randn(len(keys), HIDDEN_SIZE, generator=generator)
        tracker.see_hidden_states(hidden)
        logits = torch.randn(len(keys), VOCAB_SIZE, generator=generator)
        tracker.observe(ids, logits, seen, np.zeros(len(keys), dtype=bool))
    due = tracker.scored.due
    assert sorted(due.request_ids) == ids
    for request_id, logit, version in zip(due.request_ids, due.values[:, 0], due.head_versions, strict=True):
        row = ids.index(request_id)
        head = heads.get(keys[row])
        assert version == (0 if head is None else tracker.scorer.heads[keys[row]].version)
        if head is None:
            assert logit.isnan()
        else:
            w1, b1, w2, b2 = head
            assert torch.allclose(logit, (torch.relu(w1 @ hidden[row] + b1) @ w2 + b2)[0], rtol=1e-4, atol=1e-4)


def test_names_of_adapters_do_not_pile_up():
    tracker = ScoringTracker(CPU)
    for number in range(50):
        tracker.add_scored("r", 4, 2, adapter=f"step {number}")
        assert tracker.scorer._adapter_names[tracker.scorer._adapters.max()] == f"step {number}"
        tracker.discard("r")
        assert not tracker.scorer._adapters.any()
    assert len(tracker.scorer._adapter_names) == 2


@pytest.mark.parametrize(("num_before", "num_steps"), [(0, 6), (4, 2), (5, 1), (6, None), (9, None)])
def test_a_detection_length_counts_from_the_first_token_also_in_a_later_round(num_before, num_steps):
    """With a head the state is scored as at once; the trace of the tokens before is not known."""
    tracker = ScoringTracker(CPU)
    tracker.scorer.heads[HeadKey(6)] = PublishedHead(1, weights(0))
    tracker.add_scored("a", 3 + num_before, 6, num_before=num_before)
    generator = torch.Generator().manual_seed(2)
    due = {}
    for step in range(1, 12):
        tracker.start_step()
        hidden = torch.randn(1, HIDDEN_SIZE, generator=generator).bfloat16()
        tracker.see_hidden_states(hidden)
        tracker.observe(
            ["a"], torch.randn(1, VOCAB_SIZE, generator=generator),
            np.array([3 + num_before + step - 1], dtype=np.int32), np.zeros(1, dtype=bool),
        )  # fmt: skip
        assert tracker.step.moments.isfinite().all()
        if tracker.scored.due is not None:
            due[step] = tracker.scored.due.values[0], hidden
    assert list(due) == ([] if num_steps is None else [num_steps])
    for values, hidden in due.values():
        w1, b1, w2, b2 = weights(0)
        expected = (torch.relu(hidden[0].float() @ w1.T + b1) @ w2 + b2).item()
        assert values[0].item() == pytest.approx(expected, abs=1e-4)
        assert values[1:].isnan().tolist() == [num_before > 0] * (DUE_COLUMNS - 1)


def test_nothing_is_due_when_no_hidden_states_were_seen():
    tracker = ScoringTracker(CPU)
    tracker.add_scored("a", 3, 1)
    tracker.start_step()
    tracker.observe(["a"], torch.randn(1, VOCAB_SIZE), np.array([3]), np.array([False]))
    assert tracker.scored.due is None


def test_without_a_scored_candidate_hidden_states_are_let_go():
    tracker = ScoringTracker(CPU)
    tracker.add("a", 3)
    tracker.see_hidden_states(torch.randn(1, HIDDEN_SIZE))
    assert tracker._hidden is None
    assert tracker.trace.shape[1] == 0
    tracker.add_scored("b", 3, 2)
    tracker.discard("b")
    tracker.see_hidden_states(torch.randn(1, HIDDEN_SIZE))
    assert tracker._hidden is None


def test_a_head_that_is_replaced_scores_those_that_are_due_from_then_on():
    steps = ScoredSteps()
    one, other = weights(1), weights(2)
    a, b = Request("a", 2, 3), Request("b", 2, 4)
    for request in (a, b):
        steps.add(request)
    steps.tracker.scorer.heads[HeadKey(3)] = PublishedHead(1, one)
    steps.step([(a, 2), (b, 2)])
    decode(steps, [a, b], 2)
    steps.tracker.scorer.heads[HeadKey(4)] = PublishedHead(9, other)
    decode(steps, [a, b], 2)
    steps.check(a, head=one)
    steps.check(b, head=other)
    assert steps.scored["b"][0].head_version == 9


@pytest.mark.parametrize("num_dropped", [1, 2, 15])
def test_a_score_counts_tokens_that_are_dropped_and_sampled_again_once(num_dropped):
    steps, request = ScoredSteps(), Request("a", 4, 20)
    play_dropped(steps, request, Request("b", 2, None), num_dropped)
    steps.check(request)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_batches_look_like_every_candidate_is_scored_once_from_its_own_tokens(seed):
    rng = random.Random(seed)
    steps = ScoredSteps(seed, capacity=2)
    heads = {3: weights(3)}
    steps.tracker.scorer.heads[HeadKey(3)] = PublishedHead(1, heads[3])
    everybody = [
        Request(f"r{i}", rng.randint(1, 9), rng.choice([1, 2, 3, 3, 18, None]), rng.random() < 0.85) for i in range(24)
    ]
    play_batches(steps, list(everybody), rng)
    assert sum(len(scores) for scores in steps.scored.values()) > 5
    for request in everybody:
        if request.is_candidate and request.id in steps.confidences:
            steps.check(request, head=heads.get(request.detection_length))
        else:
            assert request.id not in steps.scored
