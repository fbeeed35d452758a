"""The fix of vLLM's verification of drafts on a CPU."""

import pytest
import torch

from vllm_rollout.adapter import verification
from vllm_rollout.adapter.verification import expand, mend_expansion


def test_a_value_is_that_of_each_of_its_requests_tokens():
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    assert expand(torch.tensor([0.7, 0.1, 0.0]), ends, 5, 0, 1).tolist() == pytest.approx([0.7, 0.7, 1, 1, 1])
    assert expand(torch.tensor([5, 6, 0]), ends, 5).tolist() == [5, 5, 0, 0, 0]


def test_only_a_wrong_expansion_is_replaced(monkeypatch):
    monkeypatch.setattr(verification.rejection_sampler, "expand_batch_to_tokens", expand)
    mend_expansion()
    assert verification.rejection_sampler.expand_batch_to_tokens is expand
    wrong = lambda x, cu_num_tokens, num_tokens: x.new_zeros(num_tokens)  # noqa: E731
    monkeypatch.setattr(verification.rejection_sampler, "expand_batch_to_tokens", wrong)
    mend_expansion()
    assert verification.rejection_sampler.expand_batch_to_tokens is expand
