"""Drafts beside vLLM's model runner V1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from vllm_rollout.kernel.worker.runner import add_mixin
from vllm_rollout.parts.drafts.options import DraftsOptions
from vllm_rollout.parts.drafts.worker.drafts import Drafts
from vllm_rollout.parts.drafts.worker.drafts_file import DraftsFile


def drafts_of(worker: Any) -> Drafts | None:
    """The proposer of this worker, with the data of its file. None if drafts come from elsewhere, or from nowhere."""
    runner, config = worker.model_runner, worker.vllm_config
    if config.speculative_config is None or worker.use_v2_model_runner or not get_pp_group().is_last_rank:
        return None
    drafts = runner.drafter
    if not isinstance(drafts, Drafts):
        return None
    draft_in(runner)
    if (path := DraftsOptions.of(config).file) is not None and not get_tp_group().rank_in_group:
        rank = config.parallel_config.data_parallel_index  # data_parallel_rank is 0 in each rank of a dense model
        drafts.keep_in(DraftsFile(Path(f"{path}-{rank}"), drafts.memory, worker.model_config))
    return drafts


def draft_in(runner: Any) -> None:
    """Let an observed model runner draft with its drafter."""
    add_mixin(runner, DraftingRunnerMixin)
    runner.drafter.attend(lambda: runner.input_batch, runner.faults)


class DraftingRunnerMixin:
    """V1 with our drafts. Overrides: _input_fits_in_drafter, and _cannot_verify of our `ObservingV1Mixin`."""

    def _input_fits_in_drafter(self, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> bool:
        # vLLM's answer is for a draft model: False while any request is near the end of the context. Then token 0 is
        # proposed for all requests. Our proposer checks the end of each request.
        return common_attn_metadata is not None

    def _cannot_verify(self) -> bool:
        # vLLM's rejection sampler ends the engine if a request names the tokens whose log probabilities it wants (vLLM
        # issue 42592). Our drafts come in steps of such requests too.
        return bool(self.input_batch.sampling_metadata.logprob_token_ids)
