"""Drafts change how many tokens a step has, and nothing of the scores of a candidate."""

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.parts.observing.test_verified import (
    HIDDEN_SIZE,
    IDS,
    NUM_PROMPT,
    NUM_TOKENS,
    ONE_BY_ONE,
    SAME,
    Moments,
    Steps,
    assert_same_statistics,
    assert_same_values,
    run,
    stepwise,
)
from tests.parts.pruning.scoring import ScoringTracker
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.kernel.wire import CandidateTag
from vllm_rollout.parts.observing.tracker.verified import VerifiedDrafts
from vllm_rollout.parts.pruning.rules.pruning_plan import WHOLE, HeadKey, PruningPlan
from vllm_rollout.parts.pruning.rules.step import TERMS
from vllm_rollout.parts.pruning.rules.terms import PruningTerms
from vllm_rollout.parts.pruning.worker.feature_ring import StateKey
from vllm_rollout.parts.pruning.worker.quality_head import HeadWeights
from vllm_rollout.parts.pruning.worker.scorer import PublishedHead

LENGTHS = dict(zip(IDS, [(4, ()), (6, (3, 5)), (None, ()), (5, (6,))], strict=True))
"""Detection length of each request, and its lengths on trial."""


def head(seed: int) -> HeadWeights:
    generator = torch.Generator().manual_seed(seed)
    return HeadWeights(*(torch.randn(shape, generator=generator) for shape in ((4, HIDDEN_SIZE), (4,), (4,), (1,))))


class ScoredRun:
    """Values of a tracker for each request, by its number of tokens."""

    def __init__(self, steps: Steps) -> None:
        self.tracker = ScoringTracker(torch.device("cpu"), 4, num_in_flight=4)
        self.tracker.scorer.heads = {
            HeadKey(length, BASE_MODEL): PublishedHead(length + 2, head(length)) for length in (4, 5, 6, WHOLE)
        }
        for id, (length, trials) in LENGTHS.items():
            self.tracker.add_scored(id, NUM_PROMPT, length, trial_lengths=trials, final=id in "ab")
        self.due: dict[tuple[str, int], list[float]] = {}
        self.last: dict[tuple[str, int], float] = {}
        self.moments: Moments = run(steps, self.tracker, self._see)
        ended = self.tracker.scorer.take_last_states(["a", "b"])
        self.states = dict(zip(ended.keys, ended.states, strict=True))

    def _see(self, ids: list[str], done: dict[str, int]) -> None:
        due, last = self.tracker.scored.due, self.tracker.scored.last
        if due is not None:
            rows = zip(due.request_ids, due.lengths, due.head_versions, due.values.tolist(), strict=True)
            self.due |= {(id, length): [version, *values] for id, length, version, values in rows}
        if last is not None:
            for row, token, logit in zip(last.rows, last.tokens, last.logits.tolist(), strict=True):
                self.last[ids[row], done[ids[row]] + token + 1] = logit


@pytest.mark.thorough
@given(stepwise())
def test_scores_do_not_depend_on_drafts(steps):
    expected, seen = ScoredRun(ONE_BY_ONE), ScoredRun(steps)
    assert_same_statistics(seen.tracker, expected.tracker)
    assert_same_values(seen.moments, expected.moments)
    assert_same_values(seen.last, expected.last)
    own = {(id, length) for id, (length, _) in LENGTHS.items() if length}
    assert own <= seen.due.keys() <= expected.due.keys(), "of lengths on trial one of a step is enough"
    for key, values in seen.due.items():
        np.testing.assert_allclose(values, expected.due[key], **SAME)
    for key, state in seen.states.items():
        if key in expected.states:
            assert torch.equal(state, expected.states[key])
    assert {StateKey(id, NUM_TOKENS, at_end=True) for id in "ab"} <= seen.states.keys()


def test_a_step_over_several_lengths_scores_a_candidate_at_its_own():
    """As `Scorer.begin` has them from the plan, whose lengths on trial may be the shorter ones."""
    tracker = ScoringTracker(torch.device("cpu"), 4, num_in_flight=4)
    plan = PruningPlan(6, mode="shadow", trial_lengths=(3, 5))
    tag = CandidateTag("g", 0, GroupTerms(1, 1, parts=TERMS.value(PruningTerms(plan))), 1)
    tracker.scorer.begin(tracker.add("a", NUM_PROMPT), tag, BASE_MODEL)
    due = []
    for num_computed, verified in ((0, None), (1, None), (2, None), (3, VerifiedDrafts(np.array([3]), np.array([4])))):
        num_rows = 1 if verified is None else 4
        tracker.start_step()
        tracker.see_hidden_states(torch.zeros(num_rows, HIDDEN_SIZE))
        reached, unfinished = np.array([NUM_PROMPT + num_computed]), np.zeros(1, dtype=bool)
        tracker.observe(["a"], torch.zeros(num_rows, 11), reached, unfinished, verified)
        due.append(tracker.scored.due and tracker.scored.due.lengths)
    assert due == [None, None, [3], [6]]
