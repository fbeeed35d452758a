"""Weights whose tokens tell their version, and what the kits of asynchronous training read from them."""

from pathlib import Path

import pytest

from conformance.asynchronous import Span, assert_exact, make_versions, num_straddling, sampled_by

TOKENS = [3, 6, 4, 1, 7]  # two of version 0 of three, then three of version 1
SPANS = [Span("default", 0, 2), Span("2", 2, 5)]


def test_tokens_tell_the_versions_that_sampled_them():
    assert sampled_by(TOKENS, 3) == [Span(0, 0, 2), Span(1, 2, 5)]
    assert sampled_by([], 3) == []
    assert num_straddling([TOKENS, TOKENS[:2], []], 3) == 1


def test_each_name_is_one_version():
    answers = [(TOKENS, SPANS), ([2], [Span("3", 0, 1)]), ([], [])]
    assert assert_exact(answers, 3) == {"default": 0, "2": 1, "3": 2}


@pytest.mark.parametrize(
    "answers",
    [
        [(TOKENS, [Span("default", 0, 3), Span("2", 3, 5)])],
        [(TOKENS, [Span("default", 0, 5)])],
        [(TOKENS, [])],
        [(TOKENS, SPANS), ([2], [Span("2", 0, 1)])],
        [(TOKENS, SPANS), ([4], [Span("3", 0, 1)])],
    ],
    ids=["a late boundary", "one span for two versions", "no spans", "one name for two versions", "two names for one"],
)
def test_spans_that_are_not_exact_fail(answers):
    with pytest.raises(AssertionError):
        assert_exact(answers, 3)


def test_a_version_samples_only_its_own_tokens(tiny_model, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    for version, folder in enumerate(make_versions(Path(tiny_model), tmp_path, 3)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            chances = model(torch.tensor([[1, *range(20, 60)]])).logits[0].softmax(-1)
        assert chances[:, version::3].sum(-1).min() > 1 - 1e-6
