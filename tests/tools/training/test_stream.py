"""The stream trainer's gradient is the one of a single backward pass over the whole batch."""

import math
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from vllm_rollout.training import stream
from vllm_rollout.training.stream import StreamTrainer

VOCABULARY = 11
NORMALIZATIONS = ("token", "sample", "group")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
group_sizes = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=5).filter(
    lambda groups: any(map(sum, groups))
)
"""Per group the number of tokens of each sample."""


class Policy(torch.nn.Module):
    def __init__(self, dtype=torch.float64, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, 8, dtype=dtype)
        self.layer = torch.nn.Linear(8, 8, dtype=dtype)
        self.unused = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        self.checkpointed = checkpointed

    def body(self, embedded):
        return torch.tanh(self.layer(embedded)) @ self.embedding.weight.T

    def forward(self, tokens):
        embedded = self.embedding(tokens)
        logits = checkpoint(self.body, embedded, use_reentrant=False) if self.checkpointed else self.body(embedded)
        return -logits.log_softmax(-1).gather(-1, tokens.roll(-1, -1)[..., None])[..., 0]


def group_of(lengths, seed):
    """Tokens, weights of their losses, and which count, each [num_samples, longest]."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(*lengths, 1)
    tokens = torch.randint(VOCABULARY, (len(lengths), longest), generator=generator)
    advantages = torch.randn(len(lengths), 1, generator=generator, dtype=torch.float64)
    return tokens, advantages, torch.arange(longest) < torch.tensor(lengths)[:, None]


def groups_of(sizes):
    return [group_of(lengths, seed) for seed, lengths in enumerate(sizes)]


def losses_of(model, group):
    tokens, advantages, mask = group
    losses = model(tokens)
    return losses * advantages.to(losses.dtype), mask


def whole_batch_gradients(model, groups, normalize):
    """By the definitions, in one backward pass."""
    sums, tokens, groups_tokens = [], [], []
    for group in groups:
        losses, mask = losses_of(model, group)
        sums.append((losses * mask).sum(-1))
        tokens.append(mask.sum(-1))
        groups_tokens.append(mask.sum().clamp(min=1).expand(len(mask)))
    sums, tokens, groups_tokens = map(torch.cat, (sums, tokens, groups_tokens))
    loss = {
        "token": sums.sum() / tokens.sum(),
        "sample": (sums / tokens.clamp(min=1)).mean(),
        "group": (sums / groups_tokens).sum() / len(groups),
    }[normalize]
    named = {name: parameter for name, parameter in model.named_parameters() if name != "unused"}
    return dict(zip(named, torch.autograd.grad(loss, named.values()), strict=True)), loss.item()


def gradients_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_equal(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("normalize", NORMALIZATIONS)
@settings(max_examples=25, deadline=None)
@given(sizes=group_sizes, order=st.randoms())
def test_groups_in_any_order_give_the_gradient_of_the_whole_batch(dtype, normalize, sizes, order):
    model, groups = Policy(dtype), groups_of(sizes)
    expected, loss = whole_batch_gradients(model, groups, normalize)
    trainer = StreamTrainer(model.parameters(), normalize=normalize)
    trainer.begin(1)
    order.shuffle(groups)
    for group in groups:
        trainer.add(*losses_of(model, group))
    result = trainer.finish()
    assert_equal(gradients_of(model), expected, TOLERANCE[dtype])
    assert result.loss == pytest.approx(loss, rel=TOLERANCE[dtype], abs=TOLERANCE[dtype])
    assert (result.parts, result.updated) == (len(groups), False)


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
def test_a_group_in_micro_batches_behind_checkpoints_counts_once(normalize):
    model, groups = Policy(), groups_of([[3, 5, 2], [4]])
    expected, _ = whole_batch_gradients(model, groups, normalize)
    model.checkpointed = True
    trainer = StreamTrainer(model.parameters(), normalize=normalize)
    trainer.begin(1)
    for tokens, advantages, mask in groups:
        for i in range(len(tokens)):
            part = tokens[i : i + 1], advantages[i : i + 1], mask[i : i + 1]
            trainer.add(*losses_of(model, part), group_tokens=int(mask.sum()))
    trainer.finish()
    assert_equal(gradients_of(model), expected, 1e-12)


def test_parts_of_a_group_in_which_no_token_counts_are_refused_and_it_is_counted_instead():
    model, groups = Policy(), groups_of([[3, 5], [0, 0]])
    expected, _ = whole_batch_gradients(model, groups, "group")
    trainer = StreamTrainer(model.parameters(), normalize="group")
    trainer.begin(1)
    trainer.add(*losses_of(model, groups[0]))
    with pytest.raises(ValueError, match=r"group_tokens must be at least 1, got 0.*count\(1\)"):
        trainer.add(*losses_of(model, groups[1]), group_tokens=0)
    trainer.count(1)
    trainer.finish()
    assert_equal(gradients_of(model), expected, 1e-12)


def test_the_update_is_that_of_the_whole_batch_and_none_is_made_before():
    groups, models = groups_of([[3, 5], [4], [1, 1]]), (Policy(), Policy())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    trainer = StreamTrainer(models[0].parameters(), optimizers[0], max_norm=0.01)
    for step in range(3):
        before = models[0].layer.weight.clone()
        trainer.begin(step)
        for group in groups:
            trainer.add(*losses_of(models[0], group))
        assert torch.equal(models[0].layer.weight, before)
        result = trainer.finish()
        for name, gradient in whole_batch_gradients(models[1], groups, "token")[0].items():
            models[1].get_parameter(name).grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.01)
        optimizers[1].step()
        assert result.updated
        assert result.gradient_norm == pytest.approx(norm.item(), rel=1e-9)
        assert_equal(dict(models[0].named_parameters()), dict(models[1].named_parameters()), 1e-9)


def test_an_abandoned_attempt_leaves_nothing():
    model, groups = Policy(), groups_of([[3, 5], [4]])
    trainer = StreamTrainer(model.parameters())
    trainer.begin(1)
    trainer.add(*losses_of(model, groups[0]))
    trainer.abandon()
    assert gradients_of(model) == {}
    trainer.begin(1)
    trainer.add(*losses_of(model, groups[1]))
    trainer.finish()
    assert_equal(gradients_of(model), whole_batch_gradients(model, groups[1:], "token")[0], 1e-12)


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
def test_what_has_no_gradient_is_counted_without_a_pass(normalize):
    model, (group, (tokens, _, mask)) = Policy(), groups_of([[3, 5], [4, 2]])
    without = tokens, torch.zeros(2, 1, dtype=torch.float64), mask
    expected, _ = whole_batch_gradients(model, [group, without], normalize)
    trainer = StreamTrainer(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.0), normalize=normalize)
    trainer.optimizer.step = lambda: expected.update(found=gradients_of(model))
    for groups in ([group], []):
        trainer.begin(1)
        trainer.count({"token": 6, "sample": 2, "group": 1}[normalize])
        for each in groups:
            trainer.add(*losses_of(model, each))
        assert trainer.finish().updated == bool(groups)
    assert_equal(expected.pop("found"), expected, 1e-12)


def test_an_empty_step_says_so_and_updates_nothing():
    model = Policy()
    trainer = StreamTrainer(model.parameters(), torch.optim.AdamW(model.parameters(), weight_decay=0.5))
    before = model.layer.weight.clone()
    trainer.begin(4)
    result = trainer.finish()
    assert (result.step, result.parts, result.weight, result.updated) == (4, 0, 0.0, False)
    assert math.isnan(result.loss)
    assert torch.equal(model.layer.weight, before)
    trainer.begin(5)


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
def test_losses_of_padding_that_are_nan_change_nothing(normalize):
    model, groups = Policy(), groups_of([[3, 5], [4, 0]])
    expected, loss = whole_batch_gradients(model, groups, normalize)
    trainer = StreamTrainer(model.parameters(), normalize=normalize)
    trainer.begin(1)
    for losses, mask in (losses_of(model, group) for group in groups):
        trainer.add(losses.masked_fill(~mask, math.nan), mask)
    assert trainer.finish().loss == pytest.approx(loss, rel=1e-12)
    assert_equal(gradients_of(model), expected, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_passes_before_a_step_are_no_part_of_it_and_those_after_it_add_to_its_gradient(dtype):
    weight = torch.nn.Parameter(torch.ones(2, dtype=dtype))
    trainer = StreamTrainer([weight])
    (weight * 8).sum().backward()
    trainer.begin(1)
    trainer.add_sum((weight * 4).sum(), 2)
    trainer.finish()
    assert weight.grad.tolist() == [2, 2]
    (weight * 3).sum().backward()
    assert weight.grad.tolist() == [5, 5]


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_gradients_of_low_precision_are_summed_in_float32(low):
    """A thousand equal gradients: bfloat16 stands still once one is below half of the sum's last place."""
    errors = {}
    for float32_sums in (False, True):
        weight = torch.nn.Parameter(torch.ones(4, dtype=low))
        trainer = StreamTrainer([weight], float32_sums=float32_sums)
        trainer.begin(1)
        for _ in range(5000):
            trainer.add_sum((weight * 0.75).sum(), 1)
        trainer.finish()
        assert weight.grad.dtype == low
        errors[float32_sums] = (weight.grad - 0.75).abs().max().item()
    assert errors[True] == 0
    assert errors[False] > 0.1


def broken(*_):
    raise RuntimeError("out of memory")


def test_after_a_backward_pass_that_failed_only_abandoning_helps():
    model, groups = Policy(), groups_of([[3, 5]])
    trainer = StreamTrainer(model.parameters())
    trainer.begin(7)
    losses, mask = losses_of(model, groups[0])
    losses.register_hook(broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.add(losses, mask)
    for attempt in (trainer.finish, lambda: trainer.add(*losses_of(model, groups[0]))):
        with pytest.raises(RuntimeError, match=r"step 7 ended by an error.*abandon\(\)"):
            attempt()
    trainer.abandon()
    trainer.begin(7)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_loss_is_one_number_of_any_shape(shape):
    weight = torch.nn.Parameter(torch.ones(2))
    trainer = StreamTrainer([weight])
    trainer.begin(1)
    for share in (3, torch.tensor(1)):
        trainer.add_sum((weight * 2).sum().reshape(shape), share)
    result = trainer.finish()
    assert (result.parts, result.weight, result.loss) == (2, 4, 2)
    assert weight.grad.tolist() == [1, 1]


def test_an_error_after_a_backward_pass_is_not_forgotten():
    weight = torch.nn.Parameter(torch.ones(2))
    trainer = StreamTrainer([weight])
    trainer.begin(7)
    with pytest.raises(RuntimeError, match="shape"):
        trainer.add_sum(weight.sum(), torch.ones(2))
    with pytest.raises(RuntimeError, match="step 7 ended by an error"):
        trainer.finish()


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("place", ["buckets", "get_total_norm", "clip_grads_with_norm_"])
def test_a_finish_that_failed_sums_and_divides_no_gradient_twice(place, monkeypatch):
    weight = torch.nn.Parameter(torch.ones(2))
    trainer = StreamTrainer([weight], max_norm=1.0)
    trainer.begin(7)
    trainer.add_sum(weight.sum(), 2)
    with monkeypatch.context() as patched:
        patched.setattr(stream, place, broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.finish()
    with pytest.raises(RuntimeError, match=r"step 7 ended by an error.*abandon\(\)"):
        trainer.finish()


def test_a_step_that_could_not_begin_can_begin_again():
    weights = [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2)]
    trainer = StreamTrainer(weights)
    weights[1].requires_grad_(False)
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        trainer.begin(1)
    weights[1].requires_grad_(True)
    trainer.begin(1)
    trainer.add_sum(sum(weights).sum(), 2)
    trainer.finish()
    assert [weight.grad.tolist() for weight in weights] == [[0.5, 0.5]] * 2


def test_what_is_not_finite_is_no_update():
    weight = torch.nn.Parameter(torch.ones(2))
    trainer = StreamTrainer([weight], torch.optim.SGD([weight], lr=1.0))
    trainer.begin(3)
    trainer.add_sum((weight * math.inf).sum(), 1)
    with pytest.raises(FloatingPointError, match="gradient norm of step 3 is inf over 1 parts"):
        trainer.finish()
    assert weight.tolist() == [1, 1]


def test_misuse_is_named():
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="has none that requires a gradient"):
        StreamTrainer([])
    with pytest.raises(ValueError, match="one of token, sample, group, got 'batch'"):
        StreamTrainer([weight], normalize="batch")
    with pytest.raises(ValueError, match="max_norm must be above 0"):
        StreamTrainer([weight], max_norm=0)
    trainer = StreamTrainer([weight])
    with pytest.raises(RuntimeError, match="cannot finish: no step is open"):
        trainer.finish()
    trainer.begin(1)
    with pytest.raises(RuntimeError, match="step 2 cannot begin: step 1 is open with 0 parts"):
        trainer.begin(2)
    with pytest.raises(ValueError, match=r"got \[2\] and \[1, 2\]"):
        trainer.add(weight, torch.ones(1, 2))
    with pytest.raises(ValueError, match="requires_grad False"):
        trainer.add(weight.detach()[None], torch.ones(1, 2))


SHARES = {
    "unequal": ([[3, 5], [4], [1, 2, 6]], [[2]]),
    "one has none": ([[3, 5], [4]], []),
    "none has any": ([], []),
}


def run_rank(rank, port, folder):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found = {}
    for dtype in (*TOLERANCE, torch.bfloat16):
        for normalize in NORMALIZATIONS:
            for name, shares in SHARES.items():
                model = Policy(dtype)
                trainer = StreamTrainer(model.parameters(), normalize=normalize)
                trainer.begin(1)
                groups, first = groups_of([*shares[0], *shares[1]]), len(shares[0])
                for group in groups[first:] if rank else groups[:first]:
                    trainer.add(*losses_of(model, group))
                result = trainer.finish()
                found[dtype, normalize, name] = (result.weight, result.parts, gradients_of(model))
    model = Policy()
    trainer = StreamTrainer(model.parameters())
    trainer.begin(rank)
    with pytest.raises(RuntimeError, match=r"steps \[0, 1\] are open"):
        trainer.finish()
    trainer.abandon()
    trainer.begin(5)
    if rank == 1:
        losses, mask = losses_of(model, group_of([2], 0))
        losses.register_hook(broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.add(losses, mask)
    with pytest.raises(RuntimeError, match="step 5 ended by an error"):
        trainer.finish()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.thorough
@pytest.mark.slow
def test_two_processes_have_the_gradient_of_the_whole_batch(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run_rank, (port, tmp_path), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1)]
    for (dtype, normalize, name), (weight, parts, gradients) in ranks[0].items():
        assert ranks[1][dtype, normalize, name][:2] == (weight, parts)
        assert_equal(ranks[1][dtype, normalize, name][2], gradients, 0)
        groups = groups_of([lengths for share in SHARES[name] for lengths in share])
        assert parts == len(groups)
        if not groups:
            assert (weight, gradients) == (0, {})
            continue
        expected, _ = whole_batch_gradients(Policy(dtype), groups, normalize)
        assert_equal(gradients, expected, TOLERANCE.get(dtype, 0.02))
