"""QualityHeads: what the tracker scores with is always one whole, published head."""

import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load

from tests.parts.pruning.scoring import new_scorer
from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.parts.pruning.rules.memory import MAX_DETECTION_LENGTHS
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey
from vllm_rollout.parts.pruning.worker import quality_head, quality_heads
from vllm_rollout.parts.pruning.worker.feature_ring import FeatureRing, StateKey
from vllm_rollout.parts.pruning.worker.quality_head import (
    QUALITY_HEAD_BATCH,
    QUALITY_HEAD_PASSES,
    HeadMismatch,
    QualityHead,
)
from vllm_rollout.parts.pruning.worker.quality_head_file import HeadBytes, read_head_file
from vllm_rollout.parts.pruning.worker.quality_heads import QualityHeads
from vllm_rollout.parts.pruning.worker.scorer import PublishedHead

HIDDEN_SIZE = 8
LENGTH = 16
PUBLISH_STEPS = 4
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch):
    """Many versions from few labels, on one thread: steps this small only wait for the others."""
    monkeypatch.setattr(quality_head, "QUALITY_HEAD_PUBLISH_STEPS", PUBLISH_STEPS)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Clock:
    """Each look at it takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def new_heads(*, hidden_size: int = HIDDEN_SIZE, model: str = "model") -> QualityHeads:
    ring = FeatureRing(hidden_size, torch.float32, 4096 * hidden_size)
    return QualityHeads(
        new_scorer(CPU), ring, hidden_size=hidden_size, model=model, device=CPU, clock=Clock()
    )  # fmt: skip


def learn(heads: QualityHeads, length: int = LENGTH, num: int = 100, seed: int = 0, hidden_size: int = HIDDEN_SIZE):
    features = torch.randn(num, hidden_size, generator=torch.Generator().manual_seed(seed))
    heads.learn(HeadKey(length), features, (features[:, 0] > 0).tolist(), [1.0] * num)


def train(heads: QualityHeads) -> None:
    while heads.train(60.0):
        pass


def trained(*lengths: int, num: int = 100, **kwargs) -> QualityHeads:
    heads = new_heads(**kwargs)
    for length in lengths or (LENGTH,):
        learn(heads, length, num, hidden_size=kwargs.get("hidden_size", HIDDEN_SIZE))
    train(heads)
    return heads


def published(heads: QualityHeads) -> dict[int, PublishedHead]:
    """Published heads of the base model, by detection length."""
    return {key.detection_length: head for key, head in heads.scorer.heads.items() if key.adapter == BASE_MODEL}


def tensors(heads: QualityHeads) -> list[dict]:
    """All that a state holds; its metadata comes in no certain order."""
    return [{name: value.tolist() for name, value in load(state).items()} for _, state in heads.state()]


def same(one: PublishedHead, other: PublishedHead) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.weights, other.weights, strict=True))


def test_nothing_is_published_before_training_has_come_to_a_version():
    heads = new_heads()
    learn(heads)
    for _ in range(PUBLISH_STEPS - 1):
        assert heads.train(0.0) > 0
    assert published(heads) == {}
    assert heads.export(HeadKey(LENGTH)) is None
    assert heads.infos()[0].version == 0
    assert heads.train(0.0) > 0
    assert heads.train(0.0) > 0  # publishing takes the place of a step
    assert published(heads)[LENGTH].version == 1


def test_each_version_is_published_whole_and_those_before_stay_as_they_were():
    heads = new_heads()
    learn(heads, num=200)
    seen: list[PublishedHead] = []
    copies = []
    left = True
    while left:
        left = heads.train(0.0)
        head = published(heads).get(LENGTH)
        if head is not None and (not seen or head is not seen[-1]):
            seen.append(head)
            copies.append([tensor.clone() for tensor in head.weights])
    assert [head.version for head in seen] == list(range(1, len(seen) + 1))
    assert len(seen) == -(-heads.infos()[0].num_steps // PUBLISH_STEPS)
    for head, copy in zip(seen, copies, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(head.weights, copy, strict=True))
    assert not same(seen[0], seen[-1])


def test_what_is_published_is_what_is_exported():
    heads = trained()
    file = QualityHead.from_safetensors(heads.export(HeadKey(LENGTH)), hidden_size=HIDDEN_SIZE, model="model")
    assert published(heads)[LENGTH].version == file.version
    assert same(published(heads)[LENGTH], PublishedHead(0, file.weights))


def test_detection_lengths_learn_and_publish_apart():
    heads = trained(LENGTH)
    first = published(heads)[LENGTH]
    learn(heads, 32, seed=1)
    train(heads)
    assert set(published(heads)) == {LENGTH, 32}
    assert published(heads)[LENGTH] is first
    assert [(s.detection_length, s.num_labels) for s in heads.infos()] == [(LENGTH, 100), (32, 100)]


def test_training_stops_when_its_budget_is_spent_and_says_what_is_left():
    heads = new_heads()
    learn(heads, LENGTH, 100)
    learn(heads, 32, 100)
    num_planned = 2 * (100 * QUALITY_HEAD_PASSES // QUALITY_HEAD_BATCH)
    lefts = [heads.train(0.0)]
    while lefts[-1]:
        lefts.append(heads.train(0.0))
    assert len(lefts) == num_planned + sum(info.version for info in heads.infos())  # one slice publishes each
    assert lefts == sorted(lefts, reverse=True)
    assert heads.train(60.0) == 0


def test_a_head_that_is_put_scores_at_once_also_with_the_version_that_was_there():
    heads, other = trained(), new_heads()
    learn(other, seed=5)
    train(other)
    assert published(heads)[LENGTH].version == published(other)[LENGTH].version
    assert not same(published(heads)[LENGTH], published(other)[LENGTH])
    assert heads.put(other.export(HeadKey(LENGTH))) == other.infos()[0]
    assert same(published(heads)[LENGTH], published(other)[LENGTH])
    learn(heads, seed=6)
    train(heads)
    assert published(heads)[LENGTH].version > published(other)[LENGTH].version


@pytest.mark.parametrize(
    ("other", "error", "said"),
    [
        ({"hidden_size": 12}, HeadMismatch, "12.*8"),
        ({"model": "another"}, HeadMismatch, "'another'.*'model'"),
    ],
)
def test_a_head_of_something_else_leaves_the_old_one_scoring(other, error, said):
    heads = trained()
    before = published(heads)
    with pytest.raises(error, match=said):
        heads.put(trained(**other).export(HeadKey(LENGTH)))
    with pytest.raises(error, match=said):
        heads.restore([trained(32).state()[0], *trained(**other).state()])
    assert published(heads) == before
    assert [s.detection_length for s in heads.infos()] == [LENGTH]


@pytest.mark.parametrize("data", [b"", b"garbage", b"\x00" * 64, b"\xff" * 64])
def test_garbage_leaves_the_old_head_scoring(data):
    heads = trained()
    before = published(heads)
    with pytest.raises(ValueError, match="safetensors"):
        heads.put(data)
    with pytest.raises(ValueError, match="safetensors"):
        heads.restore([(BASE_MODEL, data)])
    with pytest.raises(ValueError, match="kind"):
        heads.put(heads.state()[0][1])
    with pytest.raises(ValueError, match="kind"):
        heads.restore([(BASE_MODEL, heads.export(HeadKey(LENGTH)))])
    assert published(heads) == before


def test_a_head_that_says_it_is_untrained_is_refused():
    heads = trained()
    file = read_head_file(heads.export(HeadKey(LENGTH)), "quality head", hidden_size=HIDDEN_SIZE, model="model")
    metadata = {name: file.metadata[name] for name in ("hidden_size", "model", "detection_length", "num_steps")}
    data = HeadBytes("quality head", file.tensors, metadata | {"num_labels": 0, "version": 0}).whole()
    with pytest.raises(ValueError, match="version must be at least 1, got 0"):
        heads.put(data)
    assert published(heads)[LENGTH].version > 0


def test_no_more_heads_than_detection_lengths_are_taken():
    heads = new_heads()
    for length in range(1, MAX_DETECTION_LENGTHS + 1):
        learn(heads, length)
    learn(heads, 100)
    train(heads)
    assert len(heads.infos()) == len(published(heads)) == MAX_DETECTION_LENGTHS
    data, more = trained(100).export(HeadKey(100)), []
    for length in range(100, 109):
        other = new_heads()
        learn(other, length, 2)
        more += other.state()
    with pytest.raises(ValueError, match="at most 8 different detection lengths"):
        heads.put(data)
    with pytest.raises(ValueError, match="at most 8 different detection lengths"):
        heads.restore(more)
    with pytest.raises(ValueError, match="at most 8 different detection lengths"):
        heads.restore(more[:1] * 2)
    assert heads.put(trained(3).export(HeadKey(3))).detection_length == 3
    assert set(published(heads)) == set(range(1, MAX_DETECTION_LENGTHS + 1))
    heads.put(data, known=list(range(1, MAX_DETECTION_LENGTHS + 1)), spare=5)
    assert set(published(heads)) == {1, 2, 3, 4, 6, 7, 8, 100}


def test_a_head_is_read_in_parts_as_it_was_when_it_was_opened():
    heads = trained()
    for open_head, write in ((heads.open, heads.export), (heads.copy_state, lambda key: heads.state()[0][1])):
        whole = write(HeadKey(LENGTH))
        while not (size := open_head("reader", HeadKey(LENGTH))):
            pass
        learn(heads, seed=3)
        train(heads)
        parts = [heads.read("reader", start, min(size, start + 1000)) for start in range(0, size, 1000)]
        assert b"".join(parts) == whole
        with pytest.raises(KeyError):
            heads.read("reader", 0, 1)
    assert heads.open("reader", HeadKey(99)) is None


def test_what_is_read_at_a_time_is_bounded():
    heads = trained()
    for reader in range(3 * quality_heads.MAX_OPEN):
        heads.open(str(reader), HeadKey(LENGTH))
    assert len(heads._open) == quality_heads.MAX_OPEN


def test_what_is_restored_scores_and_trains_on_as_what_was_saved():
    saved = trained(LENGTH, 32)
    states = saved.state()
    heads = new_heads()
    heads.restore(states)
    assert tensors(heads) == tensors(saved)
    for some in (saved, heads):
        learn(some, LENGTH, seed=9)
        train(some)
    assert tensors(heads) == tensors(saved)
    assert set(published(heads)) == {LENGTH, 32}
    assert all(same(published(heads)[length], published(saved)[length]) for length in (LENGTH, 32))


def test_restoring_takes_the_place_of_all_heads_untrained_ones_too():
    untrained = new_heads()
    learn(untrained, LENGTH, 10)
    heads = trained(LENGTH, 32)
    heads.restore(untrained.state())
    assert published(heads) == {}
    assert [(s.detection_length, s.version) for s in heads.infos()] == [(LENGTH, 0)]
    heads.restore(trained(LENGTH, num=120).state())
    assert published(heads)[LENGTH].version > 0
    heads.restore([])
    assert published(heads) == {}
    assert heads.infos() == []


def test_training_that_diverges_leaves_the_published_head_alone(monkeypatch):
    heads = trained()
    before = published(heads)
    learn(heads, seed=3)
    step = QualityHead._step

    def diverge(head: QualityHead) -> float:
        loss = step(head)
        with torch.no_grad():
            head._parameters.b2.fill_(torch.nan)
        return loss

    monkeypatch.setattr(QualityHead, "_step", diverge)
    with pytest.raises(FloatingPointError):
        train(heads)
    assert published(heads) == before
    monkeypatch.undo()
    learn(heads, seed=4)
    train(heads)
    assert published(heads)[LENGTH].version > before[LENGTH].version


def test_features_that_overflowed_are_left_out_and_the_others_learned():
    heads = new_heads()
    states = torch.randn(4, HIDDEN_SIZE)
    states[1, 3], states[2, 0] = torch.inf, torch.nan
    keys = [StateKey(id, LENGTH) for id in "abcd"]
    heads._ring.put(keys, states)
    features, found = heads.take_features([StateKey("x", LENGTH), *keys])
    assert found == [1, 4]
    assert torch.equal(features, states[[0, 3]])
    heads.learn(HeadKey(LENGTH), features, [True, False], [1.0, 2.0])
    assert heads.infos()[0].num_labels == 2
    assert heads.take_features(keys)[1] == []


def test_no_label_makes_no_head():
    heads = new_heads()
    heads.learn(HeadKey(LENGTH), *heads.take_features([StateKey("gone", LENGTH)])[:1], [], [])
    assert heads.infos() == []
    assert heads.train(1.0) == 0


def test_a_reader_never_sees_half_a_version():
    """It may look between any two calls of what trains and publishes."""
    heads = new_heads()
    learn(heads, num=100)
    known: dict[int, float] = {}
    torn: list[int] = []

    def look(*_: object) -> None:
        head = heads.scorer.heads.get(HeadKey(LENGTH))
        if head is not None:
            total = sum(tensor.sum().item() for tensor in head.weights)
            if known.setdefault(head.version, total) != total:
                torn.append(head.version)

    sys.setprofile(look)
    try:
        while heads.train(0.0):
            pass
    finally:
        sys.setprofile(None)
    assert not torn
    assert len(known) > 2


def test_adapters_learn_publish_and_are_saved_apart():
    heads = trained()
    of_base = published(heads)[LENGTH]
    features = torch.randn(100, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    key = HeadKey(LENGTH, "a")
    heads.learn(key, features, (features[:, 0] < 0).tolist(), [1.0] * 100)
    train(heads)
    assert published(heads) == {LENGTH: of_base}
    assert not same(heads.scorer.heads[key], of_base)
    assert [info.key for info in heads.infos()] == [HeadKey(LENGTH), key]
    restored = new_heads()
    assert restored.restore(heads.state()) == [HeadKey(LENGTH), key]
    assert same(restored.scorer.heads[key], heads.scorer.heads[key])
    restored.put(heads.export(key), adapter="b")
    assert same(restored.scorer.heads[HeadKey(LENGTH, "b")], heads.scorer.heads[key])
    restored.forget(key)
    assert set(restored.scorer.heads) == {HeadKey(LENGTH), HeadKey(LENGTH, "b")}
    assert restored.losses(key) == []
    assert restored.export(key) is restored.open("reader", key) is restored.copy_state("reader", key) is None


def test_every_adapter_has_as_many_heads_as_the_base_model():
    heads = new_heads()
    for adapter in (BASE_MODEL, "a"):
        for length in range(1, MAX_DETECTION_LENGTHS + 2):
            heads.learn(HeadKey(length, adapter), torch.randn(2, HIDDEN_SIZE), [True, False], [1.0, 1.0])
    assert len(heads.infos()) == 2 * MAX_DETECTION_LENGTHS
    lengths = range(1, MAX_DETECTION_LENGTHS + 1)
    data = trained(100).export(HeadKey(100))
    with pytest.raises(ValueError, match="at most 8 different detection lengths"):
        heads.put(data, adapter="a")
    heads.put(data, known=list(lengths), spare=5, adapter="a")
    assert {info.key for info in heads.infos()} >= {HeadKey(5), HeadKey(100, "a")}
    assert HeadKey(5, "a") not in {info.key for info in heads.infos()}
    assert heads.put(data, adapter="b").key == HeadKey(100, "b")
    restored = new_heads()
    restored.restore(heads.state(), known=[HeadKey(length, "c") for length in lengths])
    with pytest.raises(ValueError, match="at most 8 different detection lengths"):
        restored.restore(heads.state(), known=[HeadKey(99, "a")])


class OnGpu:
    """A tensor that notes how it is copied."""

    def __init__(self, is_pinned: bool = False) -> None:
        self.is_pinned = is_pinned

    def pin_memory(self) -> "OnGpu":
        return OnGpu(is_pinned=True)

    def to(self, device: torch.device, non_blocking: bool = False) -> tuple[str, bool, bool]:
        return device.type, self.is_pinned, non_blocking


def test_a_head_is_published_to_a_gpu_without_a_wait_for_its_step():
    scorer = new_scorer(CPU)
    ring = FeatureRing(HIDDEN_SIZE, torch.float32, 64)
    heads = QualityHeads(scorer, ring, hidden_size=HIDDEN_SIZE, model="m", device=torch.device("cuda"))
    key = HeadKey(5)
    heads._heads[key] = SimpleNamespace(version=1, weights=[OnGpu() for _ in range(4)])
    heads._publish(key)
    assert scorer.heads[key].weights == (("cuda", True, True),) * 4
