"""The last hidden states of candidates, and what the scorer makes of several detection lengths and of ends."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.parts.observing.test_launches import Watch
from tests.parts.pruning.scoring import ScoringTracker
from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.kernel.wire import nothing_seen
from vllm_rollout.parts.pruning.rules.pruning_plan import WHOLE, HeadKey
from vllm_rollout.parts.pruning.worker.feature_ring import FeatureRing, StateKey
from vllm_rollout.parts.pruning.worker.last_states import LastStates
from vllm_rollout.parts.pruning.worker.operators import quality_head
from vllm_rollout.parts.pruning.worker.quality_head import HeadWeights
from vllm_rollout.parts.pruning.worker.quality_heads import QualityHeads
from vllm_rollout.parts.pruning.worker.scorer import PublishedHead

HIDDEN_SIZE = 6
CPU = torch.device("cpu")
PROMPT_TOKENS = 3


class Steps:
    """Candidates that sample one token in each step; remembers the state behind each."""

    def __init__(self, num_in_flight: int = 1) -> None:
        self.tracker = ScoringTracker(CPU, 2, num_in_flight)
        self.states: dict[tuple[str, int], torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(1)

    def add(self, request_id: str, *lengths: int, final: bool = True, adapter: str = BASE_MODEL) -> None:
        self.tracker.add_scored(
            request_id, PROMPT_TOKENS, lengths[0], trial_lengths=lengths[1:], final=final, adapter=adapter
        )

    def step(self, **numbers: int) -> None:
        """Each request samples its output token of that number, from 1."""
        hidden = torch.randn(len(numbers), HIDDEN_SIZE, generator=self._generator)
        for row, (request_id, number) in enumerate(numbers.items()):
            self.states[request_id, number] = hidden[row]
        self.tracker.start_step()
        self.tracker.see_hidden_states(hidden)
        computed = np.array([PROMPT_TOKENS + number - 1 for number in numbers.values()])
        logits = torch.randn(len(numbers), 11, generator=self._generator)
        self.tracker.observe(list(numbers), logits, computed, np.zeros(len(numbers), dtype=bool))

    def ended(self) -> dict[StateKey, torch.Tensor]:
        ended = self.tracker.scored.ended
        return {} if ended is None else dict(zip(ended.keys, ended.states, strict=True))


def head(seed: int) -> HeadWeights:
    generator = torch.Generator().manual_seed(seed)
    return HeadWeights(*(torch.randn(shape, generator=generator) for shape in ((4, HIDDEN_SIZE), (4,), (4,), (1,))))


def test_a_candidate_is_due_at_each_of_its_lengths_and_scored_by_their_heads():
    steps = Steps()
    steps.tracker.scorer.heads[HeadKey(4)] = PublishedHead(7, head(1))
    steps.add("a", 2, 4, 5)
    steps.add("b", 3)
    due = {}
    for number in range(1, 8):
        steps.step(a=number, b=number)
        if (seen := steps.tracker.scored.due) is not None:
            for row, (id, length, version) in enumerate(
                zip(seen.request_ids, seen.lengths, seen.head_versions, strict=True)
            ):
                due[id, length] = (number, version)
                assert torch.equal(seen.features[row], steps.states[id, number])
    assert due == {("a", 2): (2, 0), ("b", 3): (3, 0), ("a", 4): (4, 7), ("a", 5): (5, 0)}


@pytest.mark.parametrize("num_in_flight", [0, 1, 3])
def test_the_states_that_may_be_the_last_are_handed_over_by_their_numbers(num_in_flight):
    steps = Steps(num_in_flight)
    steps.add("a", 2)
    steps.add("b", 2)
    for number in range(1, 6):
        steps.step(a=number, b=number)
    steps.tracker.discard("a")
    steps.step(b=6)
    ended = steps.ended()
    assert {(key.request_id, key.num_tokens) for key in ended} == {("a", 5 - back) for back in range(num_in_flight + 1)}
    for key, state in ended.items():
        assert key.at_end
        assert torch.equal(state, steps.states[key.request_id, key.num_tokens])
    steps.step(b=7)
    assert steps.ended() == {}


def test_a_slot_s_former_candidate_leaves_nothing_to_the_next():
    steps = Steps(3)
    steps.add("a", 9)
    for number in range(1, 6):
        steps.step(a=number)
    steps.tracker.discard("a")
    steps.tracker.scorer.take_last_states([])
    steps.add("b", 9)
    steps.step(b=1)
    steps.tracker.discard("b")
    (key,) = steps.tracker.scorer.take_last_states([]).keys
    assert key == StateKey("b", 1, at_end=True)
    steps.add("c", 9)
    steps.tracker.discard("c")  # it never sampled a token
    assert steps.tracker.scorer.take_last_states([]) is None


def test_who_does_not_ask_has_no_last_state():
    steps = Steps()
    steps.add("a", 2, final=False)
    steps.step(a=1)
    steps.tracker.discard("a")
    assert steps.tracker.scorer.take_last_states(["a"]) is None
    assert steps.tracker.scored.last is None


def test_every_token_has_the_logit_it_would_have_as_the_last_one():
    steps = Steps()
    steps.add("a", 9)
    steps.add("b", 9, final=False)
    steps.step(b=1, a=1)
    assert steps.tracker.scored.last is None  # no head yet
    steps.tracker.scorer.heads[HeadKey(WHOLE)] = PublishedHead(5, head(2))
    steps.step(b=2, a=2)
    last = steps.tracker.scored.last
    assert (last.rows.tolist(), last.head_versions.tolist()) == ([1], [5])
    wanted = quality_head(steps.states["a", 2][None], torch.tensor([0]), *head(2))
    assert torch.allclose(last.logits, wanted)


def test_each_adapter_s_end_is_scored_by_its_own_head():
    steps = Steps()
    names = {"a": "x", "b": BASE_MODEL, "c": "y", "d": "x"}
    for id, adapter in names.items():
        steps.add(id, 9, adapter=adapter)
    for version, adapter in ((3, "x"), (4, BASE_MODEL)):
        steps.tracker.scorer.heads[HeadKey(WHOLE, adapter)] = PublishedHead(version, head(version))
    steps.step(a=1, b=1, c=1, d=1)
    last = steps.tracker.scored.last
    of_row = dict(zip(last.rows.tolist(), zip(last.head_versions.tolist(), last.logits, strict=True), strict=True))
    assert [of_row[row][0] for row in range(4)] == [3, 4, 0, 3]
    assert of_row[2][1].isnan()
    for row, (id, adapter) in enumerate(names.items()):
        if adapter != "y":
            weights = head(3 if adapter == "x" else 4)
            assert torch.allclose(of_row[row][1], quality_head(steps.states[id, 1][None], torch.tensor([0]), *weights))


def test_a_reward_that_comes_before_the_worker_knows_of_the_end_finds_its_state():
    steps = Steps()
    heads = QualityHeads(
        steps.tracker.scorer,
        FeatureRing(HIDDEN_SIZE, torch.float32, 4096),
        hidden_size=HIDDEN_SIZE,
        model="m",
        device=CPU,
    )
    for id in "abc":
        steps.add(id, 2)
    for number in (1, 2, 3):
        steps.step(a=number, b=number, c=number)
    steps.tracker.discard("b")  # known to have ended, and no step since
    keys = [StateKey("a", 3, True), StateKey("b", 2, True), StateKey("b", 2), StateKey("gone", 3, True)]
    features, found = heads.take_features(keys)
    assert found == [0, 1]
    assert torch.equal(features, torch.stack([steps.states["a", 3], steps.states["b", 2]]))
    assert heads.take_features(keys)[1] == []
    assert len(heads._ring) == 0, "what else may have been the last one is dropped"


@pytest.mark.parametrize("num_in_flight", [0, 1, 3])
@pytest.mark.parametrize("is_read", [False, True])
def test_a_reward_that_comes_before_or_after_the_report_of_an_end_finds_its_state(num_in_flight, is_read):
    steps = Steps(num_in_flight)
    ring = FeatureRing(HIDDEN_SIZE, torch.float32, 4096)
    heads = QualityHeads(steps.tracker.scorer, ring, hidden_size=HIDDEN_SIZE, model="m", device=CPU)
    for id in "abc":
        steps.add(id, 9)
    steps.step(a=1, b=1, c=1)
    steps.tracker.discard("a")
    steps.tracker.discard("b")
    steps.step(c=2)
    report = replace(steps.tracker.scored, ring=ring)  # of the step, which may be read when the next ones have begun
    for number in range(3, 3 + num_in_flight):
        steps.step(c=number)
    if is_read:
        report.add_to(nothing_seen(1))
    for id in "ab":
        features, found = heads.take_features([StateKey(id, 1, True)])
        assert found == [0]
        assert torch.equal(features[0], steps.states[id, 1])
    if not is_read:
        report.add_to(nothing_seen(1))
    assert len(ring) == 0, "nothing waits for a reward that has come"


def test_a_ring_of_states_grows_with_the_tracker():
    steps = Steps()
    ids = [f"r{number}" for number in range(7)]
    for id in ids:
        steps.add(id, 9)
        steps.step(**{id: 1})
    for id in ids:
        steps.tracker.discard(id)
    ended = steps.tracker.scorer.take_last_states([])
    for key, state in zip(ended.keys, ended.states, strict=True):
        assert torch.equal(state, steps.states[key.request_id, 1])
    assert len(ended.keys) == 7


def test_what_moves_is_scored_where_it_goes_on():
    here, there = Steps(), Steps()
    here.add("a", 2, 5)
    for number in (1, 2, 3):
        here.step(a=number)
    there.add("a", 2, 5)
    there.tracker.restore("a", here.tracker.copy(["a"])["a"])
    there.step(a=4)
    assert there.tracker.scored.due is None
    there.step(a=5)
    assert there.tracker.scored.due.lengths == [5]
    there.tracker.discard("a")
    assert [key.num_tokens for key in there.tracker.scorer.take_last_states([]).keys] == [4, 5]


def test_of_several_tokens_in_a_candidates_first_step_all_states_are_kept():
    """A candidate that has moved, and has drafts."""
    last = LastStates(2, 4, lambda arrays: [torch.from_numpy(array) for array in arrays])
    slots, positions = np.array([1, 1, 1]), np.array([5, 6, 7])
    states = torch.arange(3.0)[:, None].expand(3, HIDDEN_SIZE)
    last.see(slots, positions, torch.from_numpy(slots), torch.from_numpy(positions), states)
    last.end(1, "a")
    assert [key.num_tokens - 1 for key, _ in last._ended] == [5, 6, 7]


def test_endings_cost_the_same_launches_however_many_they_are():
    launched = []
    for num in (1, 40):
        steps = Steps()
        ids = [f"r{number}" for number in range(num)]
        for id in (*ids, "z"):
            steps.add(id, 9)
        steps.step(**dict.fromkeys((*ids, "z"), 1))
        with Watch() as watch:
            for id in ids:
                steps.tracker.discard(id)
            steps.step(z=2)
        launched.append({name: count for name, count in watch.launched.items() if name != "view"})
        assert len(steps.ended()) == num
    assert launched[0] == launched[1]
