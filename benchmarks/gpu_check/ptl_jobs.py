"""Jobs of an engine that measures its own steps, for `vllm_rollout.profiling`; mixed into `engine_child.Child`.

Invariant: as `vllm_rollout.adapter.api.start.profiler`, without a front end of its own: candidates of a point start in
one step, with prompts of their own that the prefix cache has.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from vllm import SamplingParams

from vllm_rollout.adapter.api.client.fingerprint import engine_flags, fingerprint_of, hardware_of, versions
from vllm_rollout.adapter.api.start.profiler import UNTIMED_STEPS
from vllm_rollout.adapter.wire import CandidateTag
from vllm_rollout.config import OUTPUT_INTERVAL_TOKENS
from vllm_rollout.group.lengths.cost import StepTime
from vllm_rollout.group.plans.terms import GroupTerms


class ProfilingJobs:
    """`self.llm` holds the engine in this process."""

    llm: Any
    _core: Any

    def info(self) -> dict[str, Any]:
        config = self.llm.llm_engine.vllm_config
        kv_bytes = self.llm.llm_engine.collective_rpc(_kv_bytes_per_token)
        return {
            "model": fingerprint_of(config),
            "hardware": hardware_of(config),
            "versions": versions(),
            "flags": engine_flags(config),
            "max_model_len": config.model_config.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "block_size": config.cache_config.block_size,
            "kv_capacity_tokens": config.cache_config.kv_cache_size_tokens,
            "kv_bytes_per_token": sum(kv_bytes),
        }

    def decode(self, *, batch_size: int, context_tokens: int, num_warmup: int, num_steps: int) -> list[StepTime]:
        block_size = self.llm.llm_engine.vllm_config.cache_config.block_size
        num_prompt = max(1, (context_tokens - num_warmup - num_steps // 2) // block_size * block_size + 1)
        prompts = [self._random(slot, num_prompt) for slot in range(batch_size)]
        self._generate(prompts, 1)  # the prefix cache has them now
        steps = self._recorded(prompts, num_warmup + num_steps + UNTIMED_STEPS)
        alike = [step for step in steps if step.num_tokens == step.batch_size == batch_size]
        return alike[num_warmup:]

    def prefill(self, *, chunk_tokens: int, num_steps: int) -> list[StepTime]:
        """A companion decodes while new prompts come, one after the other."""
        times = self._core.scheduler.step_times
        engine = self.llm.llm_engine
        engine.add_request("companion", {"prompt_token_ids": self._random(None, 1)}, self._profiled(4 * num_steps + 8))
        times.record(True)
        for number in range(num_steps):
            for _ in range(2):
                engine.step()
            prompt = {"prompt_token_ids": self._random(None, chunk_tokens)}
            engine.add_request(f"chunk-{number}", prompt, self._profiled(1))
        while engine.has_unfinished_requests():
            engine.step()
        steps = times.take()
        times.record(False)
        return [step for step in steps if step.num_tokens > chunk_tokens]

    def _recorded(self, prompts: list[list[int]], num_tokens: int) -> list[StepTime]:
        times = self._core.scheduler.step_times
        times.record(True)
        self._generate(prompts, num_tokens)
        steps = times.take()
        times.record(False)
        return steps

    def _generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        params = [self._profiled(num_tokens) for _ in prompts]
        self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    def _profiled(self, num_tokens: int) -> SamplingParams:
        """Of a candidate of a group of its own, as `/v1/rollouts` samples."""
        self._numbers["group"] += 1
        tag = CandidateTag(f"profile-{self._numbers['group']}", 0, GroupTerms(1, 1), OUTPUT_INTERVAL_TOKENS)
        return SamplingParams(
            temperature=1.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            flat_logprobs=True,
            extra_args=tag.to_extra_args(),
        )

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {"group": 0}

    def _random(self, slot: int | None, num_tokens: int) -> list[int]:
        """The beginning of a slot's prompt; None: one that was never seen."""
        vocab_size = self.llm.llm_engine.model_config.get_vocab_size()
        return np.random.default_rng(slot).integers(0, vocab_size, num_tokens).tolist()


def _kv_bytes_per_token(worker: Any) -> float:
    return sum(spec.page_size_bytes / spec.block_size for spec in worker.get_kv_cache_spec().values())
