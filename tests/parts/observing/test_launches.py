"""A step's demands on the device: it never waits, and it launches few kernels. The meta device stands for a GPU, since
it has no values to wait for. Launches are the operators that a step dispatches."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_rollout.parts.observing.tracker import arguments, dispatch
from vllm_rollout.parts.observing.tracker.tracker import CandidateTracker

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
        self.tracker = self.new_tracker()
        self.num_computed: dict[str, int] = {}

    def new_tracker(self) -> CandidateTracker:
        return CandidateTracker(self.device)

    def track(self, request_id: str) -> None:
        self.tracker.add(request_id, PROMPT)

    def add(self, number: int) -> None:
        for i in range(len(self.num_computed), len(self.num_computed) + number):
            self.track(f"r{i}")
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


def test_no_step_makes_the_host_wait():
    engine = Engine(META)
    engine.add(7)
    for number in range(8):
        engine.step(strangers=number % 2, unfinished=number % 3)
        engine.add(1)


def test_the_watch_sees_what_waits():
    with Watch(), pytest.raises(AssertionError, match="_local_scalar_dense makes the host wait"):
        torch.zeros(3).sum().item()
    with Watch(), pytest.raises(AssertionError, match="index makes the host wait"):
        torch.zeros(3)[torch.zeros(3) > 0]


@pytest.fixture
def as_on_a_gpu(monkeypatch) -> None:
    """On the CPU, where each operator of ours is one launch, as it is on a GPU."""
    for operator in ("token_confidence", "update_confidence"):
        if (implementation := dispatch.active_implementation("cpu", operator)).name != "c++":
            pytest.skip(implementation.reason)
    monkeypatch.setattr(arguments, "check_range", lambda *arguments: None)  # looks at CPU tensors only


@pytest.fixture
def engine(as_on_a_gpu) -> Engine:
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
    copies = count_copies(monkeypatch)
    for number in range(1, 6):
        engine.add(1)
        engine.step(strangers=1)
        assert len(copies) == number


def count_copies(monkeypatch) -> list[int]:
    """A list that gets one entry for each copy from now on."""
    copies: list[int] = []
    upload = CandidateTracker.upload
    monkeypatch.setattr(CandidateTracker, "upload", lambda *arguments: copies.append(1) or upload(*arguments))
    return copies
