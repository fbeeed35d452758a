"""Fix of an error in the verification of drafts by vLLM's CPU build.

Invariant: a correct vLLM is not changed.
"""

from __future__ import annotations

import torch
from vllm.logger import init_logger
from vllm.v1.sample import rejection_sampler

logger = init_logger("vllm.vllm_rollout")


def mend_expansion() -> None:
    """Use each request's temperature, top_k and top_p for all its drafts.

    The CPU's replacement of vLLM's kernel writes into a copy. So drafts of a request that samples are verified at an
    undefined temperature (vllm#55005). vLLM has no hook: the function is replaced where it is looked up.
    """
    values, ends = torch.arange(1, 65) / 7, torch.arange(1, 65, dtype=torch.int32)
    if not torch.equal(rejection_sampler.expand_batch_to_tokens(values, ends, len(values)), values):
        rejection_sampler.expand_batch_to_tokens = expand
        logger.info_once("vllm_rollout worker: this vLLM verifies drafts at a wrong temperature on a CPU; mended")


def expand(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Each request's value for each of its tokens, [num_tokens].

    x: [num_requests]. A value `replace_from` in it becomes `replace_to`.
    cu_num_tokens: [num_requests], cumulative numbers of tokens up to and including each request.
    """
    num_of_each = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.where(x != replace_from, replace_to).repeat_interleave(num_of_each)
