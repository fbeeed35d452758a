"""CandidateTracker against a brute-force record of every token, whatever the batches look like."""

import random
import statistics
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from vllm_rollout.parts.observing.tracker.ops import token_confidence
from vllm_rollout.parts.observing.tracker.tracker import CandidateTracker

VOCAB_SIZE = 11
HIDDEN_SIZE = 6
CPU = torch.device("cpu")


class Request(NamedTuple):
    id: str
    num_prompt_tokens: int
    is_candidate: bool = True


class Steps:
    """Runs a tracker like a model runner, and keeps what it should have seen."""

    def __init__(self, seed: int = 0, *, capacity: int = 4) -> None:
        self.tracker = self.new_tracker(capacity)
        self._generator = torch.Generator().manual_seed(seed)
        self.num_computed: dict[str, int] = {}
        self.confidences: dict[str, list[float]] = {}
        self.features: dict[str, list[torch.Tensor]] = {}
        """The state behind each token."""

    def new_tracker(self, capacity: int) -> CandidateTracker:
        return CandidateTracker(CPU, capacity)

    def track(self, request: Any) -> None:
        self.tracker.add(request.id, request.num_prompt_tokens)

    def add(self, request: Any) -> None:
        self.num_computed.setdefault(request.id, 0)
        self.confidences.setdefault(request.id, [])
        self.features.setdefault(request.id, [])
        if request.is_candidate:
            self.track(request)

    def step(self, rows: list[tuple[Any, int]], *, padded: bool = False) -> None:
        """One step in which each request computes so many tokens; those behind their known tokens sample none.

        `padded`: hidden states of more tokens than there are rows, with an index that picks the rows.
        """
        ids = [request.id for request, _ in rows]
        logits = torch.randn(len(rows), VOCAB_SIZE, generator=self._generator) * 3
        hidden = torch.randn(len(rows), HIDDEN_SIZE, generator=self._generator).bfloat16()
        unfinished = np.zeros(len(rows), dtype=bool)
        for row, (request, num_tokens) in enumerate(rows):
            self.num_computed[request.id] += num_tokens
            num_known = request.num_prompt_tokens + len(self.confidences[request.id])
            assert self.num_computed[request.id] <= num_known
            unfinished[row] = self.num_computed[request.id] < num_known
        confidence = token_confidence(logits, torch.arange(len(rows)))
        for row, request_id in enumerate(ids):
            if not unfinished[row]:
                self.confidences[request_id].append(confidence[row].item())
                self.features[request_id].append(hidden[row])
        self.tracker.start_step()
        if padded:
            index = torch.randperm(2 * len(rows), generator=self._generator)[: len(rows)]
            flat = torch.full((2 * len(rows), HIDDEN_SIZE), 99.0).bfloat16()
            flat[index] = hidden
            self.tracker.see_hidden_states(flat, index)
        else:
            self.tracker.see_hidden_states(hidden)
        reached = np.array([self.num_computed[request_id] for request_id in ids], dtype=np.int32)
        self.tracker.observe(ids, logits, reached, unfinished)
        self._check_moments(rows, unfinished)

    def drop(self, request: Any, num_tokens: int) -> None:
        """The scheduler throws away the newest tokens and computes the request again."""
        for seen in (self.confidences, self.features):
            del seen[request.id][len(seen[request.id]) - num_tokens :]
        self.num_computed[request.id] = 0

    def _check_moments(self, rows: list[tuple[Any, int]], unfinished: np.ndarray) -> None:
        seen = [row for row, (request, _) in enumerate(rows) if request.is_candidate and not unfinished[row]]
        step = self.tracker.step
        if not seen:
            assert step is None
            return
        assert (step.num_rows, step.rows.tolist()) == (len(rows), seen)
        for row, (mean, std) in zip(seen, step.moments.tolist(), strict=True):
            tokens = self.confidences[rows[row][0].id]
            assert mean == pytest.approx(statistics.fmean(tokens), rel=1e-4)
            assert std == pytest.approx(statistics.pstdev(tokens), rel=1e-3, abs=1e-4)


def decode(steps: Steps, requests: list[Any], num_steps: int) -> None:
    for _ in range(num_steps):
        steps.step([(request, 1) for request in requests])


@pytest.mark.parametrize("num_dropped", [1, 2, 15])
def test_tokens_that_are_dropped_and_sampled_again_count_once(num_dropped):
    """As /reset_prefix_cache does to requests whose tokens are in flight."""
    play_dropped(Steps(), Request("a", 4), Request("b", 2), num_dropped)


def play_dropped(steps: Steps, request: Any, other: Any, num_dropped: int) -> None:
    for new in (request, other):
        steps.add(new)
    steps.step([(request, 4), (other, 2)])
    decode(steps, [request, other], 17)
    steps.drop(request, num_dropped)
    steps.step([(request, 4 + 18 - num_dropped), (other, 1)])
    decode(steps, [request, other], 20)


def test_a_step_does_not_show_what_the_one_before_saw():
    steps = Steps()
    request, stranger = Request("a", 3), Request("s", 3, is_candidate=False)
    steps.add(request)
    steps.add(stranger)
    steps.step([(request, 3), (stranger, 3)])
    steps.step([(stranger, 1), (request, 1)])
    steps.tracker.start_step()
    assert steps.tracker.step is None
    steps.tracker.discard("a")
    steps.step([(stranger, 1)])
    assert steps.tracker.step is None
    steps.tracker.discard("a")
    assert len(steps.tracker) == 0


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_batches_look_like_every_candidate_is_seen_with_its_own_tokens(seed):
    rng = random.Random(seed)
    waiting = [Request(f"r{i}", rng.randint(1, 9), rng.random() < 0.85) for i in range(24)]
    play_batches(Steps(seed, capacity=2), waiting, rng)


def play_batches(steps: Steps, waiting: list[Any], rng: random.Random) -> None:
    """Requests come, rest, lose tokens and end, in batches of any order."""
    running: list[Any] = []
    preempted: list[Any] = []
    for _ in range(150):
        if waiting and rng.random() < 0.4:
            running.append(waiting.pop())
            steps.add(running[-1])
        if preempted and rng.random() < 0.5:
            running.append(preempted.pop())
            steps.add(running[-1])
        if running and rng.random() < 0.1:
            request = running.pop(rng.randrange(len(running)))
            steps.num_computed[request.id] = 0
            if rng.random() < 0.5:
                steps.drop(request, rng.randint(0, min(3, len(steps.confidences[request.id]))))
            preempted.append(request)
        if running and rng.random() < 0.15:
            request = running.pop(rng.randrange(len(running)))
            steps.tracker.discard(request.id)
        if rng.random() < 0.3:
            rng.shuffle(running)
        rows = []
        for request in running:
            left = request.num_prompt_tokens + len(steps.confidences[request.id]) - steps.num_computed[request.id]
            rows.append((request, rng.randint(1, left)))
        if rows:
            steps.step(rows, padded=rng.random() < 0.5)


def test_without_a_part_for_rows_hidden_states_are_let_go():
    tracker = CandidateTracker(CPU)
    tracker.add("a", 3)
    tracker.see_hidden_states(torch.randn(1, HIDDEN_SIZE))
    assert tracker._hidden is None
    assert tracker.trace.shape[1] == 0
