"""Log probabilities of a batch are those of each answer alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.training.test_incremental import model_of, trajectories, whole
from vllm_rollout.training.logprobs import answer_logprobs, micro_batches


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@settings(max_examples=30, deadline=None)
@given(pairs=trajectories.filter(lambda pairs: any(answer for _, answer in pairs)))
def test_each_answer_has_the_log_probabilities_of_a_pass_of_its_own(kind, pairs):
    model = model_of(kind)
    prompts, answers = [p for p, _ in pairs], [a for _, a in pairs]
    logprobs, mask = answer_logprobs(model, prompts, answers)
    assert logprobs.shape == mask.shape == (len(pairs), max(map(len, answers)))
    assert mask.sum(1).tolist() == list(map(len, answers))
    assert not logprobs[mask == 0].any()
    for row, (prompt, answer) in zip(logprobs, pairs, strict=True):
        torch.testing.assert_close(row[: len(answer)], whole(model, prompt, answer)[0])


def test_gradients_reach_the_model_and_low_precision_is_widened():
    model = model_of("llama", torch.bfloat16)
    logprobs, _ = answer_logprobs(model, [[1, 2]], [[3, 4]])
    assert logprobs.dtype == torch.float32
    logprobs.sum().backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    model.zero_grad()
    with pytest.raises(ValueError, match=r"shorter|longer"):
        answer_logprobs(model, [[1]], [])


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), max_size=30), max_tokens=st.integers(1, 100))
def test_micro_batches_have_every_sequence_once_and_few_tokens(lengths, max_tokens):
    batches = list(micro_batches(lengths, max_tokens))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= max_tokens
