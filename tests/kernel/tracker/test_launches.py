"""A step's demands on the device: it never waits, and it launches few kernels. The meta device stands for a GPU, since
it has no values to wait for. Launches are the operators that a step dispatches."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.scoring import ScoringTracker
from vllm_rollout.kernel.tracker import arguments, dispatch
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey
from vllm_rollout.parts.pruning.worker.quality_head import HeadWeights
from vllm_rollout.parts.pruning.worker.scorer import PublishedHead

HIDDEN_SIZE, VOCAB_SIZE, PROMPT = 8, 32, 5
META, CPU = torch.device("meta"), torch.device("cpu")

WAITING = {"_local_scalar_dense", "nonzero", "item", "is_nonzero", "masked_select", "equal", "unique2", "_unique2"}
"""Operators whose result, or its size, the host must read from the device."""
FREE = {
    *("alias", "detach", "lift_fresh", "select", "slice", "split_with_sizes", "t", "unbind", "unsqueeze"),
    *("empty", "empty_like", "new_empty"),
}
"""Operators that look at memory in another way, or get it."""


class Watch(TorchDispatchMode):
    """Fails on what waits, and counts what is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masks = (
            [index for index in args[1] if index is not None and index.dtype == torch.bool] if name == "index" else []
        )
        if name in WAITING or masks:
            raise AssertionError(f"{name} makes the host wait for the device")
        if name not in FREE:
            self.launched[name] += 1
        return function(*args, **(kwargs or {}))


class Engine:
    """Candidates in a tracker on a device, one step after the other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tracker = ScoringTracker(device)
        shapes = (4, HIDDEN_SIZE), (4,), (4,), (1,)
        head = HeadWeights(*(torch.zeros(shape, device=device) for shape in shapes))
        self.tracker.scorer.heads = {HeadKey(length): PublishedHead(1, head) for length in (2, 6)}
        self.num_computed: dict[str, int] = {}

    def add(self, number: int, detection_length: int | None = 6) -> None:
        for i in range(len(self.num_computed), len(self.num_computed) + number):
            self.tracker.add_scored(f"r{i}", PROMPT, detection_length)
            self.num_computed[f"r{i}"] = PROMPT - 1

    def step(self, *, strangers: int = 0, unfinished: int = 0) -> Counter[str]:
        """One step of everybody, with rows that are no candidate's and rows that sample nothing; what it launched."""
        ids = list(self.num_computed)
        for request_id in ids:
            self.num_computed[request_id] += 1
        all_ids = [*(f"s{i}" for i in range(strangers)), *ids]
        logits = torch.zeros(len(all_ids), VOCAB_SIZE, device=self.device)
        hidden = torch.zeros(len(all_ids), HIDDEN_SIZE, device=self.device)
        reached = np.array([99] * strangers + [self.num_computed[request_id] for request_id in ids])
        mask = np.arange(len(all_ids)) >= len(all_ids) - unfinished
        with Watch() as watch:
            self.tracker.start_step()
            self.tracker.see_hidden_states(hidden)
            self.tracker.observe(all_ids, logits, reached, mask)
        return watch.launched


def test_no_step_makes_the_host_wait(monkeypatch):
    engine = Engine(META)
    engine.add(3)
    engine.add(2, detection_length=2)
    engine.add(2, detection_length=None)
    for number in range(8):
        engine.step(strangers=number % 2, unfinished=number % 3)
        engine.add(1)
    due = engine.tracker.scored.due
    assert due is not None
    assert due.values.shape == (len(due.request_ids), 4)


def test_the_watch_sees_what_waits():
    with Watch(), pytest.raises(AssertionError, match="_local_scalar_dense makes the host wait"):
        torch.zeros(3).sum().item()
    with Watch(), pytest.raises(AssertionError, match="index makes the host wait"):
        torch.zeros(3)[torch.zeros(3) > 0]


@pytest.fixture
def engine(monkeypatch):
    """On the CPU, where each operator of ours is one launch, as it is on a GPU."""
    for operator in ("token_confidence", "update_confidence"):
        if (implementation := dispatch.active_implementation("cpu", operator)).name != "c++":
            pytest.skip(implementation.reason)
    monkeypatch.setattr(arguments, "check_range", lambda *arguments: None)  # looks at CPU tensors only
    engine = Engine(CPU)
    engine.add(32)
    engine.step()
    return engine


STEADY = Counter(token_confidence=1, update_confidence=1)


@pytest.mark.parametrize("num_new", [0, 1, 64])
@pytest.mark.parametrize(("strangers", "unfinished"), [(0, 0), (3, 2), (3, 1)])
def test_new_candidates_strangers_and_prefill_chunks_cost_no_launch_and_no_copy_of_logits(
    engine, num_new, strangers, unfinished
):
    engine.add(num_new)
    assert engine.step(strangers=strangers, unfinished=unfinished) == STEADY


def test_what_the_host_knows_of_a_step_goes_to_the_device_in_one_copy(engine, monkeypatch):
    copies = []
    upload = ScoringTracker.upload
    monkeypatch.setattr(ScoringTracker, "upload", lambda *arguments: copies.append(1) or upload(*arguments))
    for number in range(1, 6):
        engine.add(1)
        engine.step(strangers=1)
        assert len(copies) == number
    assert engine.tracker.scored.due is not None


def test_due_candidates_cost_the_same_launches_however_many_they_are(engine):
    few, crowd = Engine(CPU), Engine(CPU)
    few.add(1)
    crowd.add(40)
    launched = [few.step() for _ in range(6)]
    assert [crowd.step() for _ in range(6)] == launched
    assert len(crowd.tracker.scored.due.request_ids) == 40
    assert launched[:5] == [STEADY] * 5
    assert sum(launched[5].values()) < 60
