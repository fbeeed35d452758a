"""What vLLM's CPU build does wrong when it verifies drafts, mended.

Invariant: where vLLM is right, nothing is replaced.
"""

from __future__ import annotations

import torch
from vllm.logger import init_logger
from vllm.v1.sample import rejection_sampler

logger = init_logger("vllm.vllm_rollout")


def mend_expansion() -> None:
    """Make temperature, top_k and top_p of a request those of each of its drafts.

    The CPU's stand-in for vLLM's kernel writes into a copy, so that drafts of a request that samples are verified at
    whatever temperature lies in memory (vllm#55005). There is no seam: the function is replaced where it is looked up.
    """
    values, ends = torch.arange(1, 65) / 7, torch.arange(1, 65, dtype=torch.int32)
    if not torch.equal(rejection_sampler.expand_batch_to_tokens(values, ends, len(values)), values):
        rejection_sampler.expand_batch_to_tokens = expand
        logger.info_once("vllm_rollout worker: this vLLM verifies drafts at a wrong temperature on a CPU; mended")


def expand(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Each request's value for each of its tokens, [num_tokens].

    x: [num_requests]; `replace_from` in it stands for `replace_to`.
    cu_num_tokens: [num_requests], how many tokens there are up to each request, its own included.
    """
    num_of_each = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.where(x != replace_from, replace_to).repeat_interleave(num_of_each)
