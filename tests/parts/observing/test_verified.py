"""Drafts change how many tokens a step has, and nothing of what is known of a candidate."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.parts.observing.tracker.tracker import CandidateTracker
from vllm_rollout.parts.observing.tracker.verified import VerifiedDrafts

VOCAB_SIZE, HIDDEN_SIZE, NUM_TOKENS, NUM_PROMPT = 7, 5, 12, 3
IDS = "abcd"
SAME: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6, "equal_nan": True}

Steps = list[dict[str, tuple[int, int]]]
"""Steps with their requests: numbers of drafted and of sampled tokens."""
Moments = dict[tuple[str, int], list[float]]
"""Moments of each request, by its number of tokens."""


def run(
    steps: Steps, tracker: CandidateTracker, see: Callable[[list[str], dict[str, int]], None] = lambda ids, done: None
) -> Moments:
    """Run a tracker that has the requests. `see` is called after each step with the requests of its rows, and how many
    tokens each request had before."""
    generator = torch.Generator().manual_seed(5)
    logits = {id: 3 * torch.randn(NUM_TOKENS, VOCAB_SIZE, generator=generator) for id in IDS}
    hidden = {id: torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator) for id in IDS}
    done, moments = dict.fromkeys(IDS, 0), {}
    for step in steps:
        ids, num_drafted, num_sampled = list(step), [], []
        rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        for id, (drafted, sampled) in step.items():
            num_drafted.append(drafted)
            num_sampled.append(sampled)
            rows += [(logits[id][at], hidden[id][at]) for at in range(done[id], done[id] + sampled)]
            rejected = drafted + 1 - sampled
            rows += [(torch.full((VOCAB_SIZE,), torch.nan), torch.full((HIDDEN_SIZE,), torch.nan))] * rejected
        tracker.start_step()
        tracker.see_hidden_states(torch.stack([state for _, state in rows]))
        num_computed = np.array([NUM_PROMPT + done[id] for id in ids])
        verified = VerifiedDrafts(np.array(num_drafted), np.array(num_sampled)) if any(num_drafted) else None
        tracker.observe(ids, torch.stack([row for row, _ in rows]), num_computed, np.zeros(len(ids), bool), verified)
        shown = tracker.step
        for row, token, values in zip(shown.rows, shown.tokens, shown.moments.tolist(), strict=True):
            moments[ids[row], done[ids[row]] + token + 1] = values
        see(ids, done)
        for id, (_, sampled) in step.items():
            done[id] += sampled
    return moments


ONE_BY_ONE = [dict.fromkeys(IDS, (0, 1))] * NUM_TOKENS


@st.composite
def stepwise(draw: st.DrawFn) -> Steps:
    """Tokens of a run, sampled in steps with drafts, of which some are rejected. Requests may rest."""
    done, steps = dict.fromkeys(IDS, 0), []
    while waiting := [id for id in IDS if done[id] < NUM_TOKENS]:
        step = {}
        for id in draw(st.permutations(waiting)):
            if step and draw(st.booleans()):
                continue
            sampled = draw(st.integers(1, min(4, NUM_TOKENS - done[id])))
            step[id] = (sampled - 1 + draw(st.integers(0, 2)), sampled)
            done[id] += sampled
        steps.append(step)
    return steps


@pytest.mark.thorough
@given(stepwise())
def test_what_is_known_does_not_depend_on_drafts(steps):
    trackers = [CandidateTracker(torch.device("cpu"), 4) for _ in range(2)]
    for tracker in trackers:
        for id in IDS:
            tracker.add(id, NUM_PROMPT)
    assert_same_values(run(steps, trackers[0]), run(ONE_BY_ONE, trackers[1]))
    assert_same_statistics(*trackers)


def assert_same_values(got: dict[Any, Any], wanted: dict[Any, Any]) -> None:
    assert got.keys() == wanted.keys()
    for key, values in wanted.items():
        np.testing.assert_allclose(got[key], values, **SAME)


def assert_same_statistics(tracker: CandidateTracker, other: CandidateTracker) -> None:
    expected = other.copy(list(IDS))
    for id, kept in tracker.copy(list(IDS)).items():
        np.testing.assert_allclose(np.frombuffer(kept, np.float32), np.frombuffer(expected[id], np.float32), **SAME)
