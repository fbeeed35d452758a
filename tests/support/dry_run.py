"""vLLM's scheduler without a model: real scheduling, sampled tokens from a script. For tests.

Invariant: the scheduler under test is unchanged; only the model runner's output is made up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.support.part_modules import modules
from vllm_rollout.adapter.options import Options
from vllm_rollout.kernel.wire import REPORT_ATTRIBUTE, CandidateTag, RunnerReport

EOS_TOKEN = 2
OTHER_TOKEN = 7


class DryRun:
    """One scheduler and a script of output lengths.

    Args:
        scheduler_cls: a Scheduler class.
        model: folder of a model, for its configuration only.
        num_blocks: KV cache size; few blocks make preemption.
        depth: batches in flight: 1 is vLLM's synchronous loop, 2 its asynchronous one.
        flags: of vLLM, by the names of its arguments.
    """

    def __init__(
        self,
        scheduler_cls: type[Scheduler],
        model: str,
        *,
        num_blocks: int = 100_000,
        block_size: int = 16,
        max_num_seqs: int = 256,
        depth: int = 1,
        log_stats: bool = False,
        options: Options | None = None,
        **flags: Any,
    ) -> None:
        config = EngineArgs(
            model=model, enforce_eager=True, block_size=block_size,
            max_num_seqs=max_num_seqs, additional_config={} if options is None else options.into({}),
            **{"max_model_len": 4096, "max_num_batched_tokens": max(8192, max_num_seqs), **flags},
        ).create_engine_config()  # fmt: skip
        config.cache_config.num_gpu_blocks = num_blocks
        config.scheduler_config.async_scheduling = depth > 1
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        kv_cache = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self.scheduler = scheduler_cls(
            vllm_config=config,
            kv_cache_config=kv_cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=block_size,
            log_stats=log_stats,
        )
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(block_size, hash_fn)
        self._depth = depth
        self._in_flight: deque[SchedulerOutput] = deque()
        self._lengths: dict[str, int] = {}
        self._reporting = modules("dry_run").values()
        self._scored_lengths: dict[str, set[int]] = {}
        self.logits: dict[str, float] = {}
        """Logit of a trained head for candidates with a detection length, NaN without such a head, else 0."""
        self.num_sampled: dict[str, int] = {}
        """Tokens the model made, also those the scheduler dropped."""
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self.num_messages = 0
        """Outputs that left the scheduler."""
        self.num_steps = 0

    def add(
        self,
        request_id: str,
        length: int,
        *,
        prompt_token_ids: list[int] | None = None,
        max_tokens: int = 4000,
        extra_args: dict[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
        **sampling: Any,
    ) -> Request:
        """Add a request that ends by itself after `length` tokens."""
        params = SamplingParams(max_tokens=max_tokens, extra_args=extra_args, **sampling)
        params.update_from_generation_config({}, EOS_TOKEN)
        self._lengths[request_id] = length
        request = Request(
            request_id, prompt_token_ids or [5] * 20, params, None, lora_request=lora_request, block_hasher=self._hasher
        )
        self.scheduler.add_request(request)
        tag = CandidateTag.of(request.sampling_params.extra_args)
        parts = () if tag is None else tag.terms.parts.values()
        if lengths := {length for part in parts for length in part.scored_lengths}:
            self._scored_lengths[request_id] = lengths
        return request

    def step(self, before_update: Callable[[], None] = lambda: None) -> bool:
        """Schedule and process one step; False when there was nothing to do."""
        while len(self._in_flight) < self._depth and self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self._in_flight.append(scheduled)
            if not scheduled.total_num_scheduled_tokens:
                break
        if not self._in_flight:
            return False
        scheduled = self._in_flight.popleft()
        self.num_steps += 1
        output = self.sample(scheduled)
        before_update()
        for step_outputs in self.scheduler.update_from_output(scheduled, output).values():
            for core_output in step_outputs.outputs:
                self.num_messages += 1
                self.outputs.setdefault(core_output.request_id, []).append(core_output)
        return True

    def run(self, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                return
        raise RuntimeError(f"requests are left after {max_steps} steps: {sorted(self.scheduler.requests)[:8]}")

    def sample(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        request_ids = list(scheduled.num_scheduled_tokens)
        sampled = []
        for request_id in request_ids:
            request = self.scheduler.requests.get(request_id)
            if request is not None and request.is_prefill_chunk:
                sampled.append([])
                continue
            count = self.num_sampled[request_id] = self.num_sampled.get(request_id, 0) + 1
            sampled.append([EOS_TOKEN if count >= self._lengths[request_id] else OTHER_TOKEN])
        rows = {request_id: row for row, request_id in enumerate(request_ids)}
        output = ModelRunnerOutput(req_ids=request_ids, req_id_to_index=rows, sampled_token_ids=sampled)
        if self._scored_lengths:
            self._report(output)
        return output

    def _report(self, output: ModelRunnerOutput) -> None:
        """Add a worker's report, with what parts say of candidates that reached a length which their terms want."""
        due = [
            request_id
            for request_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True)
            if tokens and self.num_sampled[request_id] in self._scored_lengths.get(request_id, ())
        ]
        report = RunnerReport(np.ones((2, 1, len(output.req_ids)), dtype=np.float32))
        for module in self._reporting:
            report = module.reported(report, self, output.req_ids, due)
        setattr(output, REPORT_ATTRIBUTE, report)

    def num_tokens(self, request_id: str) -> int:
        """Number of delivered tokens of a request."""
        return sum(len(output.new_token_ids) for output in self.outputs.get(request_id, ()))

    def last(self, request_id: str) -> EngineCoreOutput:
        """The output with which a request ended; fails unless there is exactly one."""
        (final,) = [output for output in self.outputs.get(request_id, ()) if output.finished]
        return final

    @property
    def num_free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
