"""Demands of scores on the device: no step waits, and due candidates launch few kernels."""

import pytest
import torch

from tests.parts.observing.test_launches import CPU, HIDDEN_SIZE, META, PROMPT, STEADY, Engine, count_copies
from tests.parts.observing.test_launches import as_on_a_gpu as as_on_a_gpu
from tests.parts.pruning.scoring import ScoringTracker
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey
from vllm_rollout.parts.pruning.worker.quality_head import HeadWeights
from vllm_rollout.parts.pruning.worker.scorer import PublishedHead


class ScoredEngine(Engine):
    """Candidates are scored at `detection_length`, from when it is set. Overrides: new_tracker, track."""

    detection_length: int | None = 6

    def new_tracker(self) -> ScoringTracker:
        tracker = ScoringTracker(self.device)
        shapes = (4, HIDDEN_SIZE), (4,), (4,), (1,)
        head = HeadWeights(*(torch.zeros(shape, device=self.device) for shape in shapes))
        tracker.scorer.heads = {HeadKey(length): PublishedHead(1, head) for length in (2, 6)}
        return tracker

    def track(self, request_id: str) -> None:
        self.tracker.add_scored(request_id, PROMPT, self.detection_length)


@pytest.fixture
def engine(as_on_a_gpu) -> ScoredEngine:
    engine = ScoredEngine(CPU)
    engine.add(32)
    engine.step()
    return engine


def test_no_step_makes_the_host_wait_for_scores():
    engine = ScoredEngine(META)
    for number, length in ((3, 6), (2, 2), (2, None)):
        engine.detection_length = length
        engine.add(number)
    engine.detection_length = 6
    for number in range(8):
        engine.step(strangers=number % 2, unfinished=number % 3)
        engine.add(1)
    due = engine.tracker.scored.due
    assert due is not None
    assert due.values.shape == (len(due.request_ids), 4)


def test_what_the_host_knows_of_due_candidates_goes_to_the_device_in_the_same_copy(engine, monkeypatch):
    copies = count_copies(monkeypatch)
    for number in range(1, 6):
        engine.add(1)
        engine.step(strangers=1)
        assert len(copies) == number
    assert engine.tracker.scored.due is not None


@pytest.mark.parametrize("num_new", [0, 1, 64])
@pytest.mark.parametrize(("strangers", "unfinished"), [(0, 0), (3, 2), (3, 1)])
def test_candidates_that_will_be_scored_cost_no_launch_more(engine, num_new, strangers, unfinished):
    engine.add(num_new)
    assert engine.step(strangers=strangers, unfinished=unfinished) == STEADY


def test_due_candidates_cost_the_same_launches_however_many_they_are(as_on_a_gpu):
    few, crowd = ScoredEngine(CPU), ScoredEngine(CPU)
    few.add(1)
    crowd.add(40)
    launched = [few.step() for _ in range(6)]
    assert [crowd.step() for _ in range(6)] == launched
    assert len(crowd.tracker.scored.due.request_ids) == 40
    assert launched[:5] == [STEADY] * 5
    assert sum(launched[5].values()) < 60
