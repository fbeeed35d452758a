"""Corrections of older samples follow from closed forms, and no batch makes them nan."""

import math
import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.training.off_policy import (
    Correction,
    decoupled_loss,
    diagnostics,
    diagnostics_by_staleness,
    effective_sample_size,
    importance_weights,
    kept_tokens,
    log_ratios,
    recorded_tokens,
    token_staleness,
    truncated_logprobs,
)

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "off-policy.md"
BEHAVIOR = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
TARGET = torch.tensor([0.2, 0.2, 0.25, 0.35], dtype=torch.float64)
VALUES = torch.tensor([1.0, 3.0, 2.0, 7.0], dtype=torch.float64)
"""Rewards of the four tokens."""
UNTRUNCATED = Correction(rollout_is_threshold=None)


def of_ratios(rows, mask=None, correction=UNTRUNCATED):
    """Weights of tokens with these ratios of trainer to behavior."""
    logs = torch.tensor(rows, dtype=torch.float64).log()
    counted = torch.ones_like(logs) if mask is None else torch.tensor(mask)
    return importance_weights(logs, torch.zeros_like(logs), counted, correction)


def weights_of_all(sequences, correction):
    """Weights of sequences of tokens, and their probabilities under both policies, each [num_sequences, length]."""
    tokens = torch.tensor(sequences)
    target, behavior = TARGET[tokens], BEHAVIOR[tokens]
    found = importance_weights(target.log(), behavior.log(), torch.ones_like(tokens), correction)
    return found.weights, target, behavior


@pytest.mark.parametrize("length", [1, 3])
def test_untruncated_weights_of_sequences_are_unbiased(length):
    sequences = list(product(range(4), repeat=length))
    weights, target, behavior = weights_of_all(sequences, Correction("sequence", None))
    rewards = VALUES[torch.tensor(sequences)].prod(-1)
    found = (behavior.prod(-1) * weights[:, 0] * rewards).sum()
    assert found.item() == pytest.approx((target.prod(-1) * rewards).sum().item(), rel=1e-12)


@pytest.mark.parametrize("threshold", [0.5, 1.0, 2.0, 6.0, 7.0, 100.0])
def test_truncated_weights_are_too_low_by_the_mass_above_the_threshold(threshold):
    weights, target, behavior = weights_of_all([[t] for t in range(4)], Correction("token", threshold))
    bias = (behavior * weights * VALUES[:, None]).sum() - (target * VALUES[:, None]).sum()
    lost = (behavior * (target / behavior - threshold).clamp(min=0)).sum()
    assert -(VALUES.max() * lost + 1e-12) <= bias <= 1e-12
    assert (bias < -1e-6) == (threshold < 7)  # the greatest ratio is 0.35 / 0.05


def test_levels_are_each_token_their_product_and_their_geometric_mean():
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]])
    logs = torch.tensor([[2.0, 4.0, 1.0], [3.0, 3.0, 50.0], [5.0, 5.0, 5.0]]).log()
    found = {level: log_ratios(logs, 0 * logs, mask, level).exp() for level in ("token", "sequence", "geometric")}
    torch.testing.assert_close(found["token"], torch.tensor([[2.0, 4.0, 1.0], [3.0, 3.0, 1.0], [1.0, 1.0, 1.0]]))
    torch.testing.assert_close(found["sequence"], torch.tensor([[8.0], [9.0], [1.0]]).expand(3, 3))
    torch.testing.assert_close(found["geometric"], torch.tensor([[2.0], [3.0], [1.0]]).expand(3, 3))


def test_the_geometric_ratio_has_the_gradient_of_gspo():
    logprobs = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64, requires_grad=True)
    behavior = torch.tensor([[-1.5, -1.0, -9.0]], dtype=torch.float64)
    ratios = log_ratios(logprobs, behavior, torch.tensor([[1, 1, 0]]), "geometric").exp()
    (gradient,) = torch.autograd.grad(ratios[0, 0], logprobs)
    ratio = math.exp((0.5 - 1.0) / 2)
    torch.testing.assert_close(gradient, torch.tensor([[ratio / 2, ratio / 2, 0.0]], dtype=torch.float64))


def test_weights_are_truncated_at_the_threshold_and_the_tokens_are_known():
    found = of_ratios([[0.5, 2.0, 3.0]], [[1, 1, 1]], Correction())
    assert found.weights.tolist() == [pytest.approx([0.5, 2.0, 2.0])]
    assert found.clipped.tolist() == [[False, False, True]]


def test_tokens_outside_of_the_bounds_are_masked_as_icepop_does():
    found = of_ratios([[0.4, 0.6, 4.9, 5.1]], correction=Correction("token", None, {"token": (0.5, 5.0)}))
    assert found.mask.tolist() == [[False, True, True, False]]
    assert found.weights.tolist() == [pytest.approx([0.0, 0.6, 4.9, 0.0])]


@pytest.mark.parametrize(("level", "kept"), [("sequence", [True, False]), ("geometric", [True, True])])
def test_sequences_outside_of_the_bounds_are_masked_whole(level, kept):
    found = of_ratios([[1.5, 1.0], [1.8, 1.8]], correction=Correction(None, rollout_rs={level: (0.5, 2.0)}))
    assert found.mask.tolist() == [[each] * 2 for each in kept]
    assert found.weights.tolist() == found.mask.double().tolist()


def test_masks_of_several_levels_hold_together():
    bounds = {"token": (0.5, 2.0), "geometric": (0.9, 1.1)}
    found = of_ratios([[3.0, 1 / 3], [2.0, 0.5], [1.5, 1.5]], correction=Correction(rollout_rs=bounds))
    assert found.mask.tolist() == [[False, False], [True, True], [False, False]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rollout_is": "turn"}, "rollout_is must be None or one of token, sequence, geometric, got 'turn'"),
        ({"rollout_is_threshold": 0.0}, "rollout_is_threshold must be above 0"),
        ({"rollout_is_threshold": "2"}, "rollout_is_threshold must be above 0.* got '2'"),
        ({"rollout_rs": {"turn": (0, 1)}}, "levels of rollout_rs must be among"),
        ({"rollout_rs": {"token": 2.0}}, "must be .low, high."),
        ({"rollout_rs": {"turn": 2.0}}, "levels of rollout_rs must be among"),
        ({"rollout_rs": {"token": "ab"}}, "must be .low, high.* got 'ab'"),
        ({"rollout_rs": {"token": (0.0, None)}}, "must be .low, high."),
        ({"rollout_rs": {"token": (2.0, 1.0)}}, r"rollout_rs\['token'\] must be \(low, high\)"),
        ({"rollout_rs": {"token": (math.nan, 1.0)}}, "must be"),
        ({"rollout_rs": {"token": (-1.0, 1.0)}}, "with 0 <= low <= high"),
    ],
)
def test_options_that_are_not_allowed_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Correction(**arguments)


def test_a_correction_without_rejection_masks_nothing():
    found = of_ratios([[0.1, 9.0]], correction=Correction("token", 2, None))
    assert found.mask.tolist() == [[True, True]]


@pytest.mark.parametrize("shapes", [((2,), (2,), (2,)), ((2, 3), (2, 3), (2, 1)), ((2, 3), (3, 2), (2, 3))])
def test_other_shapes_are_refused(shapes):
    with pytest.raises(ValueError, match="must all be"):
        importance_weights(*map(torch.zeros, shapes))


LOGITS = [0.3, -0.2, 1.1, 0.0]


def loss_and_gradient(logits, proximal, behavior, tokens, advantages, mask=None):
    """Loss per token of one sample, and the gradient of their sum by the logits, [num_tokens, vocabulary]."""
    logits = torch.tensor(logits, dtype=torch.float64).requires_grad_()
    logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None]).T
    given = [torch.tensor([row], dtype=torch.float64).requires_grad_() for row in (proximal, behavior, advantages)]
    counted = torch.ones_like(logprobs) if mask is None else torch.tensor([mask])
    importance = importance_weights(given[0], given[1], counted)
    losses = decoupled_loss(logprobs, given[0], given[2], importance)
    losses.sum().backward()
    assert [each.grad for each in given] == [None] * 3
    return losses[0].detach(), logits.grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "learns"),
    [(1.1, 2.0, True), (1.5, 2.0, False), (1.5, -2.0, True), (0.5, 2.0, True), (0.5, -2.0, False)],
)
@pytest.mark.parametrize("proximal_by_behavior", [0.6, 1.7, 5.0])
def test_the_decoupled_loss_clips_around_the_proximal_policy(ratio, advantage, learns, proximal_by_behavior):
    """The gradient is -w * u * A * (onehot - softmax), or 0 where the clipped term is the lesser one."""
    probabilities = torch.tensor(LOGITS, dtype=torch.float64).softmax(-1)
    proximal = probabilities[2].log().item() - math.log(ratio)
    behavior = proximal - math.log(proximal_by_behavior)
    losses, gradient = loss_and_gradient([LOGITS], [proximal], [behavior], [2], [advantage])
    weight = min(proximal_by_behavior, 2.0)
    clipped = min(max(ratio, 0.8), 1.2)
    assert losses.item() == pytest.approx(-weight * min(ratio * advantage, clipped * advantage))
    onehot = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    expected = -weight * ratio * advantage * (onehot - probabilities) * learns
    torch.testing.assert_close(gradient, expected[None])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"), [(1.25, 1.0, -1.25), (1.5, 1.0, -1.3), (0.95, -1.0, 0.95), (0.85, -1.0, 0.9)]
)
def test_the_decoupled_loss_clips_each_side_by_its_own_bound(ratio, advantage, loss):
    zeros = torch.zeros(1, 1)
    importance = importance_weights(zeros, zeros, torch.ones(1, 1))
    current = torch.tensor([[ratio]]).log()
    found = decoupled_loss(current, zeros, torch.tensor([[advantage]]), importance, clip_low=0.1, clip_high=0.3)
    assert found.item() == pytest.approx(loss)


def test_a_decoupled_loss_refuses_advantages_of_samples_as_a_row():
    zeros = torch.zeros(3, 3)
    importance = importance_weights(zeros, zeros, torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"advantages must be \[3, 3\] or \[3, 1\], got \[3\]"):
        decoupled_loss(zeros, zeros, torch.ones(3), importance)
    assert decoupled_loss(zeros, zeros, torch.ones(3, 1), importance).tolist() == [[-1.0] * 3] * 3


@pytest.mark.parametrize("bad", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("place", ["proximal", "behavior", "advantages"])
def test_masked_values_and_unknown_log_probabilities_leave_no_nan(bad, place):
    given = {"proximal": [-1.0, -1.0], "behavior": [-1.0, -1.0], "advantages": [1.0, 1.0], place: [-1.0, bad]}
    mask = [True, place != "advantages"]
    losses, gradient = loss_and_gradient([LOGITS, LOGITS], tokens=[1, 2], mask=mask, **given)
    assert losses[1] == 0
    assert (gradient[1] == 0).all()
    assert losses.isfinite().all()
    assert gradient.isfinite().all()


def test_a_log_probability_that_is_not_finite_makes_the_ratio_0():
    found = log_ratios(torch.tensor([[-1.0, -math.inf]]), torch.tensor([[-math.inf, -math.inf]]), torch.ones(1, 2))
    assert found.isneginf().all()


def test_a_token_that_left_the_current_policys_support_has_no_loss():
    proximal = torch.tensor([[-1.0, -1.0]])
    importance = importance_weights(proximal, proximal, torch.ones(1, 2))
    current = torch.tensor([[-math.inf, -1.0]])
    assert decoupled_loss(current, proximal, -torch.ones(1, 1), importance).tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_a_token_outside_the_trainers_support_takes_its_sequence_out_at_a_level_of_sequences(level):
    logs = torch.tensor([[-1.0, -math.inf], [-1.0, -2.0]])
    found = importance_weights(logs, torch.full((2, 2), -1.5), torch.ones(2, 2), Correction(level))
    assert found.mask.tolist() == [[False, False], [True, True]]
    assert diagnostics(found)["outside_share"] == 0.25


@pytest.mark.parametrize("mask", [[[0, 0], [0, 0]], [[1, 1], [1, 1]]])
def test_a_batch_in_which_nothing_trains_has_zeros(mask):
    found = of_ratios([[9.0, 9.0], [9.0, 9.0]], mask, Correction(rollout_rs={"token": (0.5, 5.0)}))
    numbers = diagnostics(found)
    assert found.weights.sum() == 0
    assert numbers["ess"] == numbers["ess_share"] == 0
    assert numbers["masked_share"] == mask[0][0]
    assert all(map(math.isfinite, numbers.values()))
    assert diagnostics(of_ratios([[], []]))["num_tokens"] == 0


def test_far_apart_policies_do_not_overflow():
    far = torch.tensor([[1000.0, -1000.0]])
    found = importance_weights(far, torch.zeros(1, 2), torch.ones(1, 2), UNTRUNCATED)
    assert found.weights.tolist() == [pytest.approx([math.exp(20), 0.0])]
    losses = decoupled_loss(2 * far, far, -torch.ones(1, 1), found)
    assert losses.tolist() == [pytest.approx([math.exp(40), 0.0])]
    assert all(map(math.isfinite, diagnostics(found).values()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_floats_are_computed_in_float32(dtype):
    proximal, behavior = torch.tensor([[-7.3, -0.11]]).to(dtype), torch.tensor([[-9.9, -0.13]]).to(dtype)
    found = importance_weights(proximal, behavior, torch.ones(1, 2), UNTRUNCATED)
    assert found.weights.dtype == torch.float32
    torch.testing.assert_close(found.weights, (proximal.float() - behavior.float()).exp(), rtol=0, atol=0)
    assert decoupled_loss(proximal, proximal, torch.ones(1, 1, dtype=dtype), found).dtype == torch.float32
    logits = torch.randn(2, 50).to(dtype)
    kept = kept_tokens(logits, top_p=0.9)
    assert kept.equal(kept_tokens(logits.float(), top_p=0.9))
    assert truncated_logprobs(logits, torch.tensor([0, 1]), kept).dtype == torch.float32


def test_weights_carry_no_gradient():
    logprobs = torch.zeros(1, 2, requires_grad=True)
    found = importance_weights(logprobs, logprobs, torch.ones(1, 2))
    assert not any(each.requires_grad for each in found)


@pytest.mark.parametrize(("weights", "expected"), [([0.3] * 7, 7), ([1.0, 0.0, 0.0], 1), ([], 0), ([0.0], 0)])
def test_effective_sample_size(weights, expected):
    assert effective_sample_size(torch.tensor(weights)) == pytest.approx(expected)


def test_diagnostics_are_means_and_shares_of_the_tokens_that_count():
    correction = Correction(rollout_rs={"token": (0.0, 4.0)})
    found = of_ratios([[1.0, 3.0], [8.0, 0.5], [0.0, 77.0]], [[1, 1], [1, 1], [1, 0]], correction)
    assert diagnostics(found) == pytest.approx(
        {
            "num_tokens": 5,
            "ess": 3.5**2 / 5.25,
            "ess_share": 3.5**2 / 5.25 / 5,
            "clipped_share": 1 / 5,
            "masked_share": 2 / 5,
            "outside_share": 1 / 5,
            "mean_ratio": 12.5 / 4,
            "k1": -math.log(12) / 4,
            "k3": (12.5 - 4 - math.log(12)) / 4,
        }
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_diagnostics_look_at_the_tokens_of_a_mask_of_any_type(dtype):
    found = of_ratios([[1.0, 3.0, 5.0], [2.0, 0.5, 9.0]], [[1, 1, 1], [1, 1, 0]], Correction())
    numbers = diagnostics(found, torch.tensor([[0, 1, 0], [0, 1, 1]], dtype=dtype))
    assert numbers["num_tokens"] == 2
    assert (numbers["mean_ratio"], numbers["clipped_share"]) == pytest.approx((1.75, 0.5))
    with pytest.raises(ValueError, match=r"among must be \[2, 3\], as the weights, got \[2, 1\]"):
        diagnostics(found, torch.ones(2, 1, dtype=dtype))


def test_expected_k1_and_k3_are_the_divergence():
    weights = importance_weights(TARGET.log()[:, None], BEHAVIOR.log()[:, None], torch.ones(4, 1), UNTRUNCATED)
    each = [diagnostics(weights, torch.arange(4)[:, None] == token) for token in range(4)]
    divergence = (BEHAVIOR * (BEHAVIOR / TARGET).log()).sum().item()
    for name in ("k1", "k3"):
        found = sum(p * row[name] for p, row in zip(BEHAVIOR.tolist(), each, strict=True))
        assert found == pytest.approx(divergence)


def test_diagnostics_by_staleness_are_those_of_the_tokens_of_each():
    found = of_ratios([[1.0, 3.0, 5.0], [2.0, 1.0, 9.0]], [[1, 1, 1], [1, 1, 0]], Correction())
    rows = diagnostics_by_staleness(found, torch.tensor([[3, 0, 0], [3, 3, 8]]))
    assert {staleness: row["num_tokens"] for staleness, row in rows.items()} == {0: 2, 3: 3}
    assert (rows[0]["mean_ratio"], rows[0]["clipped_share"]) == pytest.approx((4.0, 1.0))
    assert (rows[0]["ess_share"], rows[3]["ess_share"]) == pytest.approx((1.0, 4**2 / 6 / 3))
    assert rows[3]["k3"] == pytest.approx((1 - math.log(2)) / 3)
    with pytest.raises(ValueError, match=r"staleness must be \[2, 3\], as the weights, got \[3\]"):
        diagnostics_by_staleness(found, torch.zeros(3))


def spans_of(steps, lengths):
    """Spans of consecutive lengths, as the server returns them."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    rows = zip(steps, [0, *ends], ends, strict=False)
    return [{"version": str(step), "start": start, "end": end} for step, start, end in rows]


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 5)), max_size=6), st.integers(0, 9))
def test_staleness_is_the_current_version_minus_that_of_each_token(parts, ahead):
    steps, lengths = [step for step, _ in parts], [length for _, length in parts]
    current = max(steps, default=0) + ahead
    found = token_staleness(spans_of(steps, lengths), sum(lengths), current)
    assert found.tolist() == [current - step for step, length in parts for _ in range(length)]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([("default", 0, 4)], "version 'default' must be an integer"),
        ([(None, 0, 4)], "version None must be an integer"),
        ([("8", 0, 4)], "version '8' must be at most current_version 7"),
        ([("6", 1, 4)], "must start at 0"),
        ([("6", 0, 2), ("7", 3, 4)], "'start': 3, 'end': 4} must start at 2"),
        ([("6", 0, 3), ("7", 2, 4)], "must start at 3"),
        ([("6", 0, 5)], "end at most at num_tokens 4"),
        ([("6", 0, -1)], "must start at 0"),
        ([("6", 0, 3)], "must cover num_tokens 4 tokens, and end at 3"),
        ([], "must cover num_tokens 4 tokens, and end at 0"),
    ],
)
def test_spans_that_do_not_fit_are_refused(spans, message):
    with pytest.raises(ValueError, match=message):
        token_staleness([{"version": v, "start": start, "end": end} for v, start, end in spans], 4, 7)


def test_names_of_versions_are_turned_into_steps():
    steps = {"default": 0, "step-5": 5}
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "step-5", "start": 1, "end": 3}]
    assert token_staleness(spans, 3, 7, steps.__getitem__).tolist() == [7, 2, 2]
    with pytest.raises(ValueError, match="version 'default' must be an integer"):
        token_staleness(spans, 3, 7, {}.__getitem__)


def brute_force(logits, temperature, top_k, top_p):
    """Probabilities of one row after temperature, top-k and top-p, token by token."""
    scores = [math.exp(logit / temperature) for logit in logits]
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    kept = order[:top_k] if top_k > 0 else order
    mass = sum(scores[token] for token in kept)
    chosen, before = [], 0.0
    for token in kept:
        if before < top_p:
            chosen.append(token)
        before += scores[token] / mass
    total = sum(scores[token] for token in chosen)
    return [scores[token] / total if token in chosen else 0.0 for token in range(len(scores))]


@pytest.mark.parametrize("top_k", [-1, 0, 1, 3, 9, 40])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-9])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_truncated_log_probabilities_are_those_of_a_softmax_over_the_kept_tokens(temperature, top_k, top_p):
    logits = 2 * torch.randn(5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    kept = kept_tokens(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    every = torch.arange(9).expand(5, 9)
    found = truncated_logprobs(
        logits[:, None].expand(5, 9, 9), every, kept[:, None].expand(5, 9, 9), temperature=temperature
    ).exp()
    expected = [brute_force(row, temperature, top_k, top_p) for row in logits.tolist()]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_ties_at_the_last_place_of_top_k_are_all_kept():
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0, -math.inf]])
    assert kept_tokens(logits, top_k=2).tolist() == [[True, True, True, False, False]]
    assert kept_tokens(logits).tolist() == [[True] * 4 + [False]]


def test_top_p_keeps_the_fewest_tokens_that_have_its_mass():
    assert kept_tokens(torch.zeros(1, 4), top_p=0.5).sum() == 2
    logits = torch.randn(200, 9, generator=torch.Generator().manual_seed(0))
    assert (kept_tokens(logits, top_k=3, top_p=1 - 1e-9).sum(-1) <= 3).all()


@pytest.mark.parametrize("top_k", [0, 40])
@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.95, 0.99])
def test_the_kept_tokens_are_those_of_vllms_sampler_also_if_logits_are_equal(top_k, top_p):
    """Logits of bfloat16 have many equal ones."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    logits = (2 * torch.randn(64, 3000, generator=torch.Generator().manual_seed(1))).bfloat16().float()
    k = torch.full((64,), top_k) if top_k else None
    theirs = apply_top_k_top_p_pytorch(logits.clone(), k, torch.full((64,), top_p)) > -math.inf
    assert kept_tokens(logits, top_k=top_k, top_p=top_p).equal(theirs)


def test_ids_outside_of_the_vocabulary_are_refused():
    for bad in (-1, 5):
        with pytest.raises(IndexError):
            recorded_tokens([[1, bad]], 5)


def test_a_level_that_is_none_is_refused():
    with pytest.raises(ValueError, match="level must be one of token, sequence, geometric, got 'tokens'"):
        log_ratios(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), "tokens")


def test_a_recorded_set_gives_one_support_for_both_policies():
    """With the engine's set the ratio is 1 for equal logits. A token outside of the trainer's own set is masked."""
    logits = torch.tensor([[2.0, 1.0, 0.5, -3.0], [0.0, 0.1, 0.2, 0.3], [5.0, 4.0, 3.0, 2.0]], requires_grad=True)
    recorded = recorded_tokens([[0, 1], [3, 2], []], 4)
    tokens = torch.tensor([1, 2, 0])
    ours = truncated_logprobs(logits, tokens, recorded)[None]
    engines = torch.tensor([[-math.log(1 + math.e), -math.log(1 + math.exp(0.1)), -0.5]])
    found = importance_weights(ours, engines, torch.ones(1, 3), UNTRUNCATED)
    assert found.weights.tolist() == [pytest.approx([1.0, 1.0, 0.0])]
    assert ours.isneginf().tolist() == [[False, False, True]]
    decoupled_loss(ours, ours, torch.ones(1, 1), found).sum().backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[~recorded] == 0).all()
    own = truncated_logprobs(logits, tokens, kept_tokens(logits, top_k=1))[None]
    numbers = diagnostics(importance_weights(own, engines, torch.tensor([[1, 1, 0]])))
    assert (numbers["outside_share"], numbers["masked_share"]) == (1.0, 1.0)


def test_settings_of_sampling_that_are_not_allowed_are_refused():
    logits = torch.zeros(1, 3)
    with pytest.raises(ValueError, match="temperature must be above 0, got 0"):
        kept_tokens(logits, temperature=0.0)
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], got 1.5"):
        kept_tokens(logits, top_p=1.5)
    with pytest.raises(ValueError, match=r"token_ids \[\.\.\.\], got \[1, 3\], \[1, 3\] and \[3\]"):
        truncated_logprobs(logits, torch.zeros(3, dtype=torch.long), logits > -1)


def trajectory_of(logprobs, spans):
    rows = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    ids = [3] * len(logprobs)
    return SimpleNamespace(token_ids=ids, logprobs=logprobs, num_tokens=len(ids), weight_versions=rows)


def test_the_example_of_the_guide_runs(capsys, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    trajectories = [
        trajectory_of([-1.0, -2.0], [("7", 0, 2)]),
        trajectory_of([-1.0, -1.0, -1.0], [("5", 0, 1), ("7", 1, 3)]),
    ]
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    asked = []

    def answer_logprobs(*arguments):
        asked.append(arguments)
        return logprobs, torch.tensor([[1, 1, 0], [1, 1, 1]])

    monkeypatch.setattr("vllm_rollout.training.logprobs.answer_logprobs", answer_logprobs)
    given = {
        "answer": SimpleNamespace(groups=[SimpleNamespace(prompt_token_ids=[1], trajectories=trajectories)]),
        "step": 7,
        "model": "a model",
        "advantages": torch.tensor([[1.0], [-1.0]]),
    }
    exec(code, given)
    assert asked == [("a model", ([1], [1]), [[3, 3], [3, 3, 3]])]
    assert given["losses"].tolist() == [[-1.0, -2.0, 0.0], [1.0, 1.0, 1.0]]
    table = diagnostics_by_staleness(given["importance"], torch.tensor([[0, 0, 0], [2, 0, 0]]))
    assert capsys.readouterr().out == f"{table}\n"


def test_corrections_of_the_guide_are_accepted():
    rows = re.findall(r"^\| .* \| `(Correction\(.*\))` \|", GUIDE.read_text(), re.MULTILINE)
    assert len(rows) == 5
    assert all(isinstance(eval(row, {"Correction": Correction}), Correction) for row in rows)


def test_diagnostics_of_the_guide_are_there():
    section = GUIDE.read_text().partition("## Read the diagnostics")[2]
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))))
    assert len(named) > 5
    assert named < diagnostics(of_ratios([[1.0]])).keys()


@pytest.mark.parametrize("level", ["sequence", "geometric"])
@pytest.mark.parametrize("rollout_is", [None, "token"])
def test_a_sequence_with_a_token_outside_of_the_support_is_masked_also_by_a_low_bound_of_0(level, rollout_is):
    logprobs = torch.tensor([[-1.0, -math.inf, -2.0], [-1.0, -1.0, -2.0]])
    behavior = torch.tensor([[-1.0, -1.0, -2.0]] * 2)
    correction = Correction(rollout_is, rollout_rs={level: (0.0, 5.0)})
    mask = importance_weights(logprobs, behavior, torch.ones(2, 3), correction).mask
    assert mask.tolist() == [[False] * 3, [True] * 3]
