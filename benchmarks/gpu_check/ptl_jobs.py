"""Jobs of an engine that measures its own steps, for `vllm_rollout.profiling`; mixed into `engine_child.Child`.

Invariant: as `vllm_rollout.parts.shaping.api.profiler`, without a front end of its own. Candidates of a point start in
one step, with prompts of their own that are in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
from vllm import SamplingParams

from vllm_rollout.parts.shaping.api.profiler import (
    UNTIMED_STEPS,
    candidate_params,
    engine_info,
    kv_bytes_per_token,
    num_prompt_tokens,
    steps_together,
)
from vllm_rollout.parts.shaping.core import ShapingCore
from vllm_rollout.parts.shaping.rules.cost import StepTime


class ProfilingJobs:
    """`self.llm` holds the engine in this process."""

    llm: Any
    _core: Any

    def info(self) -> dict[str, Any]:
        config = self.llm.llm_engine.vllm_config
        kv_bytes = self.llm.llm_engine.collective_rpc(kv_bytes_per_token)
        return engine_info(config, sum(kv_bytes), config.scheduler_config.max_num_seqs)

    def decode(self, *, batch_size: int, context_tokens: int, num_warmup: int, num_steps: int) -> list[StepTime]:
        block_size = self.llm.llm_engine.vllm_config.cache_config.block_size
        num_prompt = num_prompt_tokens(context_tokens, num_warmup, num_steps, block_size)
        prompts = [self._random(slot, num_prompt) for slot in range(batch_size)]
        self._generate(prompts, 1)  # the prefix cache has them now
        steps = self._recorded(prompts, num_warmup + num_steps + UNTIMED_STEPS)
        return steps_together(steps, batch_size)[num_warmup:]

    def prefill(self, *, chunk_tokens: int, num_steps: int) -> list[StepTime]:
        """A companion decodes while new prompts come, one after the other."""
        times = self._core.scheduler.part(ShapingCore).step_times
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
        times = self._core.scheduler.part(ShapingCore).step_times
        times.record(True)
        self._generate(prompts, num_tokens)
        steps = times.take()
        times.record(False)
        return steps

    def _generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        params = [self._profiled(num_tokens) for _ in prompts]
        self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    def _profiled(self, num_tokens: int) -> SamplingParams:
        return candidate_params(f"profile-{next(self._numbers)}", num_tokens, logprobs=0)

    @cached_property
    def _numbers(self) -> Iterator[int]:
        return count()

    def _random(self, slot: int | None, num_tokens: int) -> list[int]:
        """The first `num_tokens` tokens of a slot's prompt, or of a new prompt if `slot` is None."""
        vocab_size = self.llm.llm_engine.model_config.get_vocab_size()
        return np.random.default_rng(slot).integers(0, vocab_size, num_tokens).tolist()
