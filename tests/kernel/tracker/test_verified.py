"""Drafts change how many tokens a step has, and nothing of what is known of a candidate."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scoring import ScoringTracker
from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.kernel.tracker.verified import VerifiedDrafts
from vllm_rollout.parts.pruning.rules.pruning_plan import WHOLE, HeadKey
from vllm_rollout.parts.pruning.worker.feature_ring import StateKey
from vllm_rollout.parts.pruning.worker.quality_head import HeadWeights
from vllm_rollout.parts.pruning.worker.scorer import PublishedHead

VOCAB_SIZE, HIDDEN_SIZE, NUM_TOKENS, NUM_PROMPT = 7, 5, 12, 3
LENGTHS = {"a": (4, ()), "b": (6, (3, 5)), "c": (None, ()), "d": (5, (6,))}
"""Detection length of each request, and its lengths on trial."""


def head(seed: int) -> HeadWeights:
    generator = torch.Generator().manual_seed(seed)
    return HeadWeights(*(torch.randn(shape, generator=generator) for shape in ((4, HIDDEN_SIZE), (4,), (4,), (1,))))


class Seen:
    """Values of a tracker for each request, by its number of tokens."""

    def __init__(self) -> None:
        self.moments: dict[tuple[str, int], list[float]] = {}
        self.due: dict[tuple[str, int], list[float]] = {}
        self.last: dict[tuple[str, int], float] = {}


def run(steps: list[dict[str, tuple[int, int]]]) -> tuple[Seen, dict[str, bytes], dict[StateKey, torch.Tensor]]:
    """`steps`: of each request in it how many tokens were drafted and how many sampled."""
    generator = torch.Generator().manual_seed(5)
    logits = {id: 3 * torch.randn(NUM_TOKENS, VOCAB_SIZE, generator=generator) for id in LENGTHS}
    hidden = {id: torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator) for id in LENGTHS}
    tracker = ScoringTracker(torch.device("cpu"), 4, num_in_flight=4)
    tracker.scorer.heads = {
        HeadKey(length, BASE_MODEL): PublishedHead(length + 2, head(length)) for length in (4, 5, 6, WHOLE)
    }
    for id, (length, trials) in LENGTHS.items():
        tracker.add_scored(id, NUM_PROMPT, length, trial_lengths=trials, final=id in "ab")
    done, seen = dict.fromkeys(LENGTHS, 0), Seen()
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
        shown, scored = tracker.step, tracker.scored
        for row, token, moments in zip(shown.rows, shown.tokens, shown.moments.tolist(), strict=True):
            seen.moments[ids[row], done[ids[row]] + token + 1] = moments
        if scored.due is not None:
            for id, length, version, values in zip(
                scored.due.request_ids,
                scored.due.lengths,
                scored.due.head_versions,
                scored.due.values.tolist(),
                strict=True,
            ):
                seen.due[id, length] = [version, *values]
        if scored.last is not None:
            for row, token, logit in zip(
                scored.last.rows, scored.last.tokens, scored.last.logits.tolist(), strict=True
            ):
                seen.last[ids[row], done[ids[row]] + token + 1] = logit
        for id, (_, sampled) in step.items():
            done[id] += sampled
    tracked = tracker.copy(list(LENGTHS))
    ended = tracker.scorer.take_last_states(["a", "b"])
    return seen, tracked, dict(zip(ended.keys, ended.states, strict=True))


ONE_BY_ONE = [dict.fromkeys(LENGTHS, (0, 1))] * NUM_TOKENS


@st.composite
def stepwise(draw: st.DrawFn) -> list[dict[str, tuple[int, int]]]:
    """Tokens of a run, sampled in steps with drafts, of which some are rejected. Requests may rest."""
    done, steps = dict.fromkeys(LENGTHS, 0), []
    while waiting := [id for id in LENGTHS if done[id] < NUM_TOKENS]:
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
    expected, expected_statistics, expected_states = run(ONE_BY_ONE)
    seen, statistics, states = run(steps)
    same = {"rtol": 1e-5, "atol": 1e-6, "equal_nan": True}
    for got, wanted in ((seen.moments, expected.moments), (seen.last, expected.last)):
        assert got.keys() == wanted.keys()
        for key, values in wanted.items():
            np.testing.assert_allclose(got[key], values, **same)
    own = {(id, length) for id, (length, _) in LENGTHS.items() if length}
    assert own <= seen.due.keys() <= expected.due.keys(), "of lengths on trial one of a step is enough"
    for key, values in seen.due.items():
        np.testing.assert_allclose(values, expected.due[key], **same)
    for id, kept in expected_statistics.items():
        of_values = np.frombuffer(statistics[id], np.float32), np.frombuffer(kept, np.float32)
        np.testing.assert_allclose(*of_values, **same)
    for key, state in states.items():
        if key in expected_states:
            assert torch.equal(state, expected_states[key])
    assert {StateKey(id, NUM_TOKENS, at_end=True) for id in "ab"} <= states.keys()
