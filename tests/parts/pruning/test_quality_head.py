"""The quality head learns, scores as it trained, survives files and never shows half a version."""

import itertools
import json
import math
import struct

import pytest
import torch
from safetensors.torch import load, save

from vllm_rollout.parts.pruning.worker import quality_head
from vllm_rollout.parts.pruning.worker.quality_head import (
    QUALITY_HEAD_BATCH,
    QUALITY_HEAD_HIDDEN,
    QUALITY_HEAD_MIN_LABELS,
    QUALITY_HEAD_PASSES,
    QUALITY_HEAD_PUBLISH_STEPS,
    REPLAY_BUFFER_SIZE,
    HeadMismatch,
    QualityHead,
)
from vllm_rollout.parts.pruning.worker.replay_buffer import MAX_MAGNITUDE, ReplayBuffer, Standardiser

HIDDEN_SIZE = 48


@pytest.fixture(autouse=True)
def _one_thread():
    """Threads that wait for each other on a busy machine make these small products a hundred times slower."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def states(num, seed, noise, hidden_size=HIDDEN_SIZE):
    """Hidden states off centre and of unequal scales, whose success is a direction plus `noise` deviations of noise."""
    world = torch.Generator().manual_seed(99)
    offset = 20 * torch.randn(hidden_size, generator=world)
    scale = torch.rand(hidden_size, generator=world) * 5 + 0.1
    direction = torch.randn(hidden_size, generator=world)
    generator = torch.Generator().manual_seed(seed)
    centred = torch.randn(num, hidden_size, generator=generator)
    margin = centred @ direction / direction.norm() + noise * torch.randn(num, generator=generator)
    return offset + scale * centred, (margin > 0).float()


def trained(num_labels, noise=0.0, seed=0, chunk=100, weights=None):
    head = QualityHead(HIDDEN_SIZE, "model", 16, seed)
    features, labels = states(num_labels, seed=1, noise=noise)
    weights = torch.ones(num_labels) if weights is None else weights
    for rows in torch.arange(num_labels).split(chunk):
        head.add(features[rows], labels[rows], weights[rows])
        train_all(head)
    return head


def train_all(head):
    while head.num_left:
        head.train(budget_s=1.0)


def score(weights, features):
    return torch.relu(features.float() @ weights.w1.T + weights.b1) @ weights.w2 + weights.b2


def auc(scores, labels):
    positive, negative = scores[labels == 1], scores[labels == 0]
    return (positive[:, None] > negative[None, :]).float().mean().item()


def same_weights(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def content(data):
    """Tensors and metadata of safetensors, whose metadata has no order."""
    (length,) = struct.unpack_from("<Q", data)
    return {name: value.tolist() for name, value in load(data).items()}, json.loads(data[8 : 8 + length])[
        "__metadata__"
    ]


def counting_clock():
    """A clock that shows 0, 1, 2, … seconds."""
    return itertools.count().__next__


@pytest.mark.parametrize(("noise", "bar"), [(0.0, 0.95), (1.5, 0.68)])
def test_it_learns(noise, bar):
    # With 1.5 deviations of noise the best possible AUC is 0.81 or so.
    head = trained(3000, noise)
    features, labels = states(4000, seed=2, noise=noise)
    assert auc(score(head.weights, features), labels) > bar
    assert head.num_labels == 3000
    assert head.losses[-1] < head.losses[0]
    assert len(head.losses) == head.version


def test_it_learns_under_inference_mode_from_inference_tensors():
    with torch.inference_mode():
        head = trained(600)
        restored = QualityHead.restore(head.state(), hidden_size=HIDDEN_SIZE, model="model")
        imported = QualityHead.from_safetensors(head.to_safetensors(), hidden_size=HIDDEN_SIZE, model="model")
        features, labels = states(300, seed=3, noise=0.0)
        for other in (head, restored, imported):
            other.add(features, labels, torch.ones(300))
            train_all(other)
            assert auc(score(other.weights, features), labels) > 0.9


def test_a_label_counts_by_its_weight():
    """Every state comes with both labels; the heavier one is what the head must learn."""
    features, labels = states(1500, seed=1, noise=0.0)
    head = QualityHead(HIDDEN_SIZE, "model", 16)
    heavy, light = torch.full((1500,), 9.0), torch.ones(1500)
    for rows in torch.arange(1500).split(100):
        head.add(features[rows], 1 - labels[rows], light[rows])
        head.add(features[rows], labels[rows], heavy[rows])
        train_all(head)
    assert auc(score(head.weights, features), labels) > 0.9


def test_weights_make_up_for_missing_labels():
    """Nine of ten successes were pruned; weighted by 1 / survival probability the mean score is right again."""
    generator = torch.Generator().manual_seed(5)
    features, _ = states(6000, seed=1, noise=0.0)
    labels = (torch.rand(6000, generator=generator) < 0.5).float()
    survival = torch.where(labels == 1, 0.1, 1.0)
    kept = torch.rand(6000, generator=generator) < survival
    rates = {}
    for name, weights in (("weighted", 1 / survival), ("unweighted", torch.ones(6000))):
        head = QualityHead(HIDDEN_SIZE, "model", 16)
        head.add(features[kept], labels[kept], weights[kept])
        train_all(head)
        rates[name] = torch.sigmoid(score(head.weights, features)).mean().item()
    assert rates["weighted"] == pytest.approx(0.5, abs=0.1)
    assert rates["unweighted"] < 0.25


def test_only_the_ratio_of_weights_matters():
    heads = [trained(300, weights=torch.full((300,), weight)) for weight in (1.0, 64.0)]
    assert same_weights(heads[0].weights, heads[1].weights)


def test_folded_weights_score_raw_states_as_the_network_scores_standardised_ones():
    head = trained(1000)
    features, _ = states(200, seed=4, noise=0.0)
    w1, b1, w2, b2 = (parameter.detach() for parameter in head._parameters)
    standardised = (features.double() - head._mean) / head._scale
    expected = torch.relu(standardised @ w1.double().T + b1) @ w2.double() + b2
    torch.testing.assert_close(score(head.weights, features).double(), expected, rtol=1e-4, atol=1e-4)


def test_new_statistics_do_not_change_what_the_network_computes():
    head = trained(400)
    features, labels = states(400, seed=6, noise=0.0)
    before = score(head.weights, features)
    head.add(3 * features + 7, labels, torch.ones(400))
    old_scale = head._scale
    with torch.inference_mode(False):
        head._standardise()
    assert not torch.equal(head._scale, old_scale)
    w1, b1, w2, b2 = (parameter.detach() for parameter in head._parameters)
    after = torch.relu((features - head._mean) / head._scale @ w1.T + b1) @ w2 + b2
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)


def test_a_feature_that_never_moved_gets_no_large_weight():
    head = QualityHead(HIDDEN_SIZE, "model", 16)
    features, labels = states(500, seed=1, noise=0.0)
    features[:, 7] = 3.0
    head.add(features, labels, torch.ones(500))
    train_all(head)
    moved = features.clone()
    moved[:, 7] += 0.01
    assert (score(head.weights, moved) - score(head.weights, features)).abs().max() < 0.5


def test_running_statistics_are_those_of_all_states():
    features, _ = states(500, seed=1, noise=0.0)
    standardiser = Standardiser(HIDDEN_SIZE, memory=10_000)
    for rows in features.split(7):
        standardiser.update(rows)
    float32 = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(standardiser.mean, features.double().mean(0), **float32)
    torch.testing.assert_close(standardiser.variance, features.double().var(0, correction=0), **float32)
    assert standardiser.count == 500


def test_old_states_fade_from_the_statistics():
    standardiser = Standardiser(1, memory=100)
    for value in (0.0, 8.0):
        for _ in range(20):
            standardiser.update(torch.full((50, 1), value))
    assert standardiser.mean.item() > 7.9


def test_the_replay_buffer_keeps_the_newest():
    kept = ReplayBuffer(1, capacity=5)
    for first in range(0, 12, 3):
        values = torch.arange(first, first + 3).float()
        kept.add(values[:, None], torch.zeros(3), torch.ones(3))
    assert sorted(kept.features[:, 0].tolist()) == [7, 8, 9, 10, 11]
    kept.add(torch.arange(20.0, 40.0)[:, None], torch.zeros(20), torch.ones(20))
    assert sorted(kept.features[:, 0].tolist()) == [35, 36, 37, 38, 39]
    assert len(kept) == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_states_of_any_floating_dtype(dtype):
    features, labels = states(300, seed=1, noise=0.0)
    head = QualityHead(HIDDEN_SIZE, "model", 16)
    head.add(features.to(dtype), labels.to(dtype), torch.ones(300, dtype=dtype))
    train_all(head)
    assert {tensor.dtype for tensor in head.weights} == {torch.float32}
    assert [tuple(tensor.shape) for tensor in head.weights] == [
        (QUALITY_HEAD_HIDDEN, HIDDEN_SIZE),
        (QUALITY_HEAD_HIDDEN,),
        (QUALITY_HEAD_HIDDEN,),
        (1,),
    ]
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in head.weights)


def test_it_is_untrained_until_both_labels_are_there():
    head = QualityHead(HIDDEN_SIZE, "model", 16)
    features, _ = states(400, seed=1, noise=0.0)
    head.add(features, torch.ones(400), torch.ones(400))
    head.add(features[: QUALITY_HEAD_MIN_LABELS - 1], torch.zeros(QUALITY_HEAD_MIN_LABELS - 1), torch.ones(31))
    assert head.num_pending_steps == 0
    assert head.train(budget_s=1.0) is None
    assert (head.weights, head.version) == (None, 0)
    head.add(features[:1], torch.zeros(1), torch.ones(1))
    num_labels = 400 + QUALITY_HEAD_MIN_LABELS
    assert head.num_pending_steps == num_labels * QUALITY_HEAD_PASSES // QUALITY_HEAD_BATCH
    train_all(head)
    assert head.version == 1
    assert head.num_steps == num_labels * QUALITY_HEAD_PASSES // QUALITY_HEAD_BATCH


def test_labels_one_by_one_plan_as_many_steps_as_together():
    head = QualityHead(HIDDEN_SIZE, "model", 16)
    features, labels = states(500, seed=1, noise=0.0)
    for row in range(500):
        head.add(features[row : row + 1], labels[row : row + 1], torch.ones(1))
    assert head.num_pending_steps == 500 * QUALITY_HEAD_PASSES // QUALITY_HEAD_BATCH


def test_planned_steps_are_bounded():
    head = QualityHead(4, "model", 16)
    features, labels = states(REPLAY_BUFFER_SIZE, seed=1, noise=0.0, hidden_size=4)
    for _ in range(3):
        head.add(features, labels, torch.ones(len(labels)))
    assert head.num_pending_steps == REPLAY_BUFFER_SIZE * QUALITY_HEAD_PASSES // QUALITY_HEAD_BATCH


@pytest.mark.parametrize(("budget_s", "num_steps"), [(0.0, 1), (0.5, 1), (1.0, 1), (2.5, 2), (10.0, 10)])
def test_training_stops_before_the_step_that_would_not_fit_into_the_budget(budget_s, num_steps):
    head = QualityHead(HIDDEN_SIZE, "model", 16, clock=counting_clock())
    features, labels = states(1000, seed=1, noise=0.0)
    head.add(features, labels, torch.ones(1000))
    planned = head.num_pending_steps
    assert head.train(budget_s) > 0
    assert (head.num_steps, head.num_pending_steps) == (num_steps, planned - num_steps)
    assert head.weights is None


def test_slices_train_what_one_go_trains():
    features, labels = states(600, seed=1, noise=1.0)
    heads = [QualityHead(HIDDEN_SIZE, "model", 16, clock=counting_clock()) for _ in range(2)]
    for head, budget_s in zip(heads, (0.0, 1e9), strict=True):
        head.add(features, labels, torch.ones(600))
        while head.num_left:
            head.train(budget_s)
    assert same_weights(heads[0].weights, heads[1].weights)
    assert list(heads[0].losses) == list(heads[1].losses)
    assert heads[0].version == heads[1].version == 1


@pytest.mark.thorough
def test_a_long_plan_publishes_on_the_way():
    head = QualityHead(4, "model", 16)
    features, labels = states(REPLAY_BUFFER_SIZE, seed=1, noise=0.0, hidden_size=4)
    head.add(features, labels, torch.ones(len(labels)))
    steps = head.num_pending_steps
    assert steps > QUALITY_HEAD_PUBLISH_STEPS
    train_all(head)
    assert head.version == math.ceil(steps / QUALITY_HEAD_PUBLISH_STEPS) == len(head.losses)


def test_the_same_calls_give_the_same_head_and_another_seed_another():
    first, second, other = trained(500, seed=3), trained(500, seed=3), trained(500, seed=4)
    assert same_weights(first.weights, second.weights)
    assert not same_weights(first.weights, other.weights)


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    trained(300)
    assert torch.equal(torch.rand(3), expected)


def test_a_slice_that_raises_leaves_the_weights(monkeypatch):
    head = trained(500)
    weights, version = head.weights, head.version
    features, labels = states(500, seed=8, noise=0.0)
    head.add(features, labels, torch.ones(500))

    def broken(*_):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(quality_head, "binary_cross_entropy_with_logits", broken)
        with pytest.raises(RuntimeError, match="no memory"):
            head.train(budget_s=1.0)
    assert head.weights is weights
    assert head.version == version
    train_all(head)
    assert head.version == version + 1


def test_a_head_that_diverged_is_not_published_and_recovers():
    head = trained(500)
    weights, version = head.weights, head.version
    features, labels = states(1000, seed=8, noise=0.0)
    head.add(features[:500], labels[:500], torch.ones(500))
    with torch.no_grad():
        head._parameters.w2[0] = torch.inf
    with pytest.raises(FloatingPointError, match="diverged"):
        train_all(head)
    assert head.weights is weights
    assert head.version == version
    head.add(features[500:], labels[500:], torch.ones(500))
    train_all(head)
    assert head.version == version + 1
    assert auc(score(head.weights, features), labels) > 0.9


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 2 * MAX_MAGNITUDE])
def test_bad_features_are_refused_and_forgotten(value):
    head, other = trained(300), trained(300)
    features, labels = states(100, seed=2, noise=0.0)
    poisoned = features.clone()
    poisoned[3, 5] = value
    with pytest.raises(ValueError, match=r"features\[3, 5\] must be finite and at most"):
        head.add(poisoned, labels, torch.ones(100))
    for each in (head, other):
        each.add(features, labels, torch.ones(100))
        train_all(each)
    assert same_weights(head.weights, other.weights)


def test_an_outlier_does_not_undo_what_was_learned():
    head = trained(2000)
    features, labels = states(1000, seed=2, noise=0.0)
    head.add(torch.full((1, HIDDEN_SIZE), MAX_MAGNITUDE / 10), torch.zeros(1), torch.ones(1))
    head.add(*states(300, seed=3, noise=0.0), torch.ones(300))
    train_all(head)
    assert auc(score(head.weights, features), labels) > 0.9


@pytest.mark.parametrize(
    ("features", "labels", "weights", "message"),
    [
        (torch.zeros(2, 7), torch.zeros(2), torch.ones(2), r"hidden_size = 48, got torch.float32 \[2, 7\]"),
        (torch.zeros(HIDDEN_SIZE), torch.zeros(1), torch.ones(1), "features must be"),
        (torch.zeros(2, HIDDEN_SIZE).int(), torch.zeros(2), torch.ones(2), "got torch.int32"),
        (
            torch.zeros(2, HIDDEN_SIZE),
            torch.zeros(3),
            torch.ones(2),
            r"labels must be \[num_labels\] = \[2\]",
        ),
        (torch.zeros(2, HIDDEN_SIZE), torch.tensor([0, 0.5]), torch.ones(2), r"labels\[1\] must be 0 or 1, got 0.5"),
        (torch.zeros(1, HIDDEN_SIZE), torch.tensor([torch.nan]), torch.ones(1), r"labels\[0\] must be 0 or 1, got nan"),
        (torch.zeros(2, HIDDEN_SIZE), torch.zeros(2), torch.tensor([1, -1.0]), r"weights\[1\] must be finite and >= 0"),
        (torch.zeros(1, HIDDEN_SIZE), torch.zeros(1), torch.tensor([torch.inf]), r"weights\[0\] must be finite"),
    ],
)
def test_bad_labels_are_refused(features, labels, weights, message):
    head = QualityHead(HIDDEN_SIZE, "model", 16)
    with pytest.raises(ValueError, match=message):
        head.add(features, labels, weights)
    assert head.num_labels == 0


def test_no_labels_change_nothing():
    head = QualityHead(HIDDEN_SIZE, "model", 16)
    head.add(torch.zeros(0, HIDDEN_SIZE), torch.zeros(0), torch.zeros(0))
    assert (head.num_labels, head.num_pending_steps) == (0, 0)


def test_weights_of_zero_teach_nothing_and_break_nothing():
    head = QualityHead(HIDDEN_SIZE, "model", 16)
    features, labels = states(500, seed=1, noise=0.0)
    head.add(features, labels, torch.zeros(500))
    train_all(head)
    assert list(head.losses) == [0.0]


def test_safetensors_round_trip():
    head = trained(700)
    data = head.to_safetensors()
    imported = QualityHead.from_safetensors(data, hidden_size=HIDDEN_SIZE, model="model")
    assert same_weights(imported.weights, head.weights)
    assert (imported.detection_length, imported.version) == (16, head.version)
    assert (imported.num_steps, imported.num_labels, imported.num_pending_steps) == (head.num_steps, 700, 0)
    assert content(imported.to_safetensors()) == content(data)


def test_safetensors_say_what_the_head_is():
    head = trained(700)
    _, metadata = content(head.to_safetensors())
    assert metadata == {
        "kind": "quality head",
        "format_version": "1",
        "hidden_size": "48",
        "model": "model",
        "detection_length": "16",
        "version": str(head.version),
        "num_steps": str(head.num_steps),
        "num_labels": "700",
    }


def test_an_imported_head_trains_on_from_where_it_was():
    head = trained(2000, noise=1.0)
    imported = QualityHead.from_safetensors(head.to_safetensors(), hidden_size=HIDDEN_SIZE, model="model")
    features, labels = states(2000, seed=2, noise=1.0)
    imported.add(features[:80], labels[:80], torch.ones(80))
    assert imported.num_pending_steps > 0
    train_all(imported)
    assert imported.version == head.version + 1
    change = auc(score(imported.weights, features), labels) - auc(score(head.weights, features), labels)
    assert abs(change) < 0.03


def test_an_untrained_head_has_nothing_to_export():
    with pytest.raises(ValueError, match="detection_length 16 is not trained yet"):
        QualityHead(HIDDEN_SIZE, "model", 16).to_safetensors()


@pytest.mark.parametrize(
    ("hidden_size", "model", "field", "found", "expected"),
    [(64, "model", "hidden_size", 48, 64), (48, "other", "model", "model", "other")],
)
def test_a_head_for_something_else_is_a_mismatch(hidden_size, model, field, found, expected):
    head = trained(300)
    for data, read in (
        (head.to_safetensors(), QualityHead.from_safetensors),
        (head.state(), QualityHead.restore),
    ):
        with pytest.raises(HeadMismatch, match=f"the head's {field} is {found!r}, but {expected!r} is served"):
            read(data, hidden_size=hidden_size, model=model)


def edited(data, drop=(), metadata=(), **tensors):
    old_tensors, old_metadata = load(data), content(data)[1]
    kept = {name: value for name, value in (old_tensors | tensors).items() if name not in drop}
    return save(kept, {name: text for name, text in (old_metadata | dict(metadata)).items() if text is not None})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: b"", "must be safetensors, got 0 bytes"),
        (lambda data: b"not a head at all", "must be safetensors, got 17 bytes"),
        (lambda data: data[:-5], "must be safetensors"),
        (lambda data: save({"w1": torch.zeros(1)}), "must say kind 'quality head', got None"),
        (lambda data: edited(data, metadata={"kind": "cat"}), "must say kind 'quality head', got 'cat'"),
        (lambda data: edited(data, metadata={"format_version": "2"}), "format_version must be 1, got '2'"),
        (
            lambda data: edited(data, metadata={"hidden_size": None}),
            "'hidden_size' must be a whole number from 1 to",
        ),
        (lambda data: edited(data, metadata={"detection_length": "-3"}), "'detection_length' must be a whole number"),
        (lambda data: edited(data, drop=["w2"]), r"has no tensor 'w2': it has \['b1', 'b2', 'mean', 'scale', 'w1'\]"),
        (lambda data: edited(data, b2=torch.zeros(2)), r"'b2' must be torch.float32 \[1\], got torch.float32 \[2\]"),
        (lambda data: edited(data, b2=torch.zeros(1).half()), "'b2' must be torch.float32"),
        (lambda data: edited(data, b2=torch.tensor([torch.nan])), "'b2' must be finite"),
        (
            lambda data: edited(data, b2=torch.tensor([2e12])),
            r"'b2' must be finite and in \[-1e\+12, 1e\+12\], got 2e\+12",
        ),
        (lambda data: edited(data, scale=torch.zeros(HIDDEN_SIZE)), "'scale' must be finite and in"),
        (lambda data: edited(data, mean=torch.full((HIDDEN_SIZE,), 1e6)), "'mean' must be finite and in"),
        (lambda data: edited(data, metadata={"version": str(10**24)}), "'version' must be a whole number from 0 to"),
        (lambda data: edited(data, metadata={"num_labels": "9" * 5000}), "'num_labels' must be a whole number"),
        (lambda data: edited(data, metadata={"num_steps": "\u0663"}), "'num_steps' must be a whole number"),
        (lambda data: edited(data, metadata={"detection_length": "4097"}), "a whole number from 0 to 4096"),
        (lambda data: edited(data, extra=torch.zeros(3)), "tensors that no head has"),
    ],
)
def test_anything_else_is_refused(edit, message):
    data = edit(trained(300).to_safetensors())
    with pytest.raises(ValueError, match=message):
        QualityHead.from_safetensors(data, hidden_size=HIDDEN_SIZE, model="model")


def interrupted_head():
    """A head in the middle of its second version."""
    head = trained(500, noise=1.0)
    features, labels = states(333, seed=7, noise=1.0)
    head.add(features, labels, torch.ones(333))
    head.train(budget_s=0.0)
    return head


@pytest.mark.parametrize(
    "make", [lambda: QualityHead(HIDDEN_SIZE, "model", 16, seed=5), interrupted_head], ids=["new", "interrupted"]
)
def test_a_restored_head_goes_on_as_if_nothing_had_happened(make):
    head = make()
    restored = QualityHead.restore(head.state(), hidden_size=HIDDEN_SIZE, model="model")
    assert content(restored.state()) == content(head.state())
    features, labels = states(400, seed=9, noise=1.0)
    for each in (head, restored):
        each.add(features, labels, torch.ones(400))
        train_all(each)
    assert same_weights(restored.weights, head.weights)
    assert content(restored.state()) == content(head.state())


@pytest.mark.parametrize("name", ["replay.features", "adam.w1.exp_avg", "parameter.w1", "losses"])
def test_a_state_that_lacks_something_is_refused(name):
    data = edited(interrupted_head().state(), drop=[name])
    with pytest.raises(ValueError, match=name):
        QualityHead.restore(data, hidden_size=HIDDEN_SIZE, model="model")


def test_a_state_keeps_the_newest_labels_that_fit_and_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_rollout.parts.pruning.worker.quality_head.QUALITY_HEAD_STATE_BYTES", 40 * HIDDEN_SIZE * 4)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(300, HIDDEN_SIZE, generator=generator)
    labels = (features[:, 0] > 0).float()
    head = QualityHead(HIDDEN_SIZE, "model", 8)
    head.add(features, labels, torch.ones(300))
    while head.num_left:
        head.train(60.0)
    saved = load(head.state())
    assert saved["replay.features"].equal(features[-40:])
    assert saved["replay.labels"].equal(labels[-40:])
    restored = QualityHead.restore(head.state(), hidden_size=HIDDEN_SIZE, model="model")
    assert all(a.equal(b) for a, b in zip(restored.weights, head.weights, strict=True))
    restored.add(features[:64], labels[:64], torch.ones(64))
    version = restored.version
    while restored.num_left:
        restored.train(60.0)
    assert restored.version > version
