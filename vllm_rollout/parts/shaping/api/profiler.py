"""One real engine that measures its own steps: the child process of `vllm-rollout profile`.

Invariant: the engine is that of a server, with its scheduler, worker, candidates and flags. Only HTTP is missing.

It reads commands from standard input and answers on standard output, one JSON object per line. Logs of all processes go
to standard error. It ends when its input ends.

A point of the profile has a number of candidates and a context length. Each candidate has a random prompt of its own,
so that it reads memory of its own. Prompts are computed once and then found in the prefix cache. The scheduler is
paused while the candidates of a point arrive, so that they start in one step and every step has all of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.output_processor import RequestOutputCollector

from vllm_rollout.adapter.compat import check_vllm_version
from vllm_rollout.config import OUTPUT_INTERVAL_TOKENS
from vllm_rollout.kernel.api.client import RolloutAsyncLLM
from vllm_rollout.kernel.api.engine_calls import EngineCalls
from vllm_rollout.kernel.api.serve import parse
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.wire import CandidateTag
from vllm_rollout.parts.shaping.api.fingerprint import engine_flags, fingerprint_of, hardware_of, versions
from vllm_rollout.parts.shaping.calls import RECORD_STEPS, TAKE_STEPS
from vllm_rollout.parts.shaping.rules.cost import StepTime

UNTIMED_STEPS = 2
"""Steps per run that are not timed: the first follows a wait, and after the last no candidate runs on."""
NUM_TRIES = 2
"""Tries per point. The second is for a prefix cache that has lost some of the prompts."""


class Profiler:
    """Measures steps of an engine. Commands are its public coroutines."""

    def __init__(self, client: RolloutAsyncLLM, *, logprobs: bool) -> None:
        self._client = client
        self._call = EngineCalls(client).call_first
        self._logprobs = 0 if logprobs else None
        self._max_model_len = client.model_config.max_model_len
        self._vocab_size = client.model_config.get_vocab_size()
        self._block_size = client.vllm_config.cache_config.block_size
        self._cached: dict[int, int] = {}
        """Computed tokens of each slot's prompt."""
        self._num_requests = 0

    async def info(self) -> dict[str, Any]:
        """Properties and capacity of the engine."""
        kv_bytes = await self._client.collective_rpc("rollout_kv_bytes_per_token")
        return engine_info(self._client.vllm_config, sum(kv_bytes), self._client.max_candidates)

    async def warm_up(self) -> None:
        """Run a few steps of the kinds that are measured: the first ones compile and allocate."""
        await self.decode(batch_size=2, context_tokens=self._block_size, num_warmup=0, num_steps=2)

    async def decode(self, *, batch_size: int, context_tokens: int, num_warmup: int, num_steps: int) -> list[StepTime]:
        """Times of steps with `batch_size` candidates and a mean context of about `context_tokens` tokens, without
        warm-up.

        Fewer than `num_steps` if the engine did not run all candidates together.
        """
        num_prompt = num_prompt_tokens(context_tokens, num_warmup, num_steps, self._block_size)
        measured: list[StepTime] = []
        for _ in range(NUM_TRIES):
            await self._fill(batch_size, num_prompt)
            steps = await self._run_together(
                [self._prompt(slot, num_prompt) for slot in range(batch_size)],
                num_warmup + num_steps + UNTIMED_STEPS,
            )
            measured = max(measured, steps_together(steps, batch_size)[num_warmup:], key=len)
            if len(measured) >= num_steps:
                break
            self._cached.clear()
        return measured

    async def prefill(self, *, chunk_tokens: int, num_steps: int) -> list[StepTime]:
        """Times of steps that compute a new prompt of `chunk_tokens` tokens while one candidate decodes."""
        companion = None
        await self._call(RECORD_STEPS, True)
        for _ in range(num_steps):
            if companion is None or companion.done():
                companion = asyncio.create_task(
                    self._generate(self._new_prompt(1), self._max_model_len - 1, "companion")
                )
                await self._generate(self._new_prompt(1), 1)  # the companion runs once this request has ended
            await self._generate(self._new_prompt(chunk_tokens), 1)
        steps = await self._steps()
        await self._client.abort("companion")
        if companion is not None:
            await companion
        return [step for step in steps if step.num_tokens > chunk_tokens]

    async def _fill(self, num_slots: int, num_tokens: int) -> None:
        """Compute the first tokens of the first slots' prompts, unless they are cached."""
        missing = [slot for slot in range(num_slots) if self._cached.get(slot, 0) < num_tokens]
        await asyncio.gather(*(self._generate(self._prompt(slot, num_tokens), 1) for slot in missing))
        self._cached.update(dict.fromkeys(missing, num_tokens))

    async def _run_together(self, prompts: list[list[int]], num_tokens: int) -> list[StepTime]:
        await self._call(RECORD_STEPS, True)
        async with self._paused():
            queues = [await self._add(prompt, num_tokens) for prompt in prompts]
        for queue in queues:
            while not (await queue.get()).finished:
                pass
        return await self._steps()

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        await self._client.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        try:
            yield
        finally:
            await self._client.engine_core.resume_scheduler_async()

    async def _steps(self) -> list[StepTime]:
        steps = await self._call(TAKE_STEPS, None)
        await self._call(RECORD_STEPS, False)
        return steps

    async def _generate(self, prompt: list[int], num_tokens: int, request_id: str | None = None) -> None:
        queue = await self._add(prompt, num_tokens, request_id)
        while not (await queue.get()).finished:
            pass

    async def _add(self, prompt: list[int], num_tokens: int, request_id: str | None = None) -> RequestOutputCollector:
        """Add a candidate in a group of its own, sampled as by `/v1/rollouts`."""
        self._num_requests += 1
        name = f"profile-{self._num_requests}"
        params = candidate_params(name, num_tokens, self._logprobs)
        return await self._client.add_request(request_id or name, tokens_input(prompt), params)

    def _prompt(self, slot: int, num_tokens: int) -> list[int]:
        """First `num_tokens` tokens of a slot's prompt."""
        return np.random.default_rng(slot).integers(0, self._vocab_size, self._max_model_len)[:num_tokens].tolist()

    def _new_prompt(self, num_tokens: int) -> list[int]:
        """A new random prompt of `num_tokens` tokens."""
        return np.random.default_rng().integers(0, self._vocab_size, num_tokens).tolist()


def engine_info(config: VllmConfig, kv_bytes_per_token: float, max_num_seqs: int) -> dict[str, Any]:
    """Properties and capacity of an engine."""
    return {
        "model": fingerprint_of(config),
        "hardware": hardware_of(config),
        "versions": versions(),
        "flags": engine_flags(config),
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "block_size": config.cache_config.block_size,
        "kv_capacity_tokens": config.cache_config.kv_cache_size_tokens,
        "kv_bytes_per_token": kv_bytes_per_token,
    }


def num_prompt_tokens(context_tokens: int, num_warmup: int, num_steps: int, block_size: int) -> int:
    """Prompt tokens of a point's candidates: full blocks and one token. So only the first decode step's
    work is left.
    """
    return max(1, (context_tokens - num_warmup - num_steps // 2) // block_size * block_size + 1)


def steps_together(steps: Iterable[StepTime], batch_size: int) -> list[StepTime]:
    """Steps in which exactly `batch_size` candidates decoded, and nothing else ran."""
    return [step for step in steps if step.num_tokens == step.batch_size == batch_size]


def candidate_params(group: str, num_tokens: int, logprobs: int | None) -> SamplingParams:
    """Parameters of a candidate in a group of its own, sampled as by `/v1/rollouts`."""
    tag = CandidateTag(group, 0, GroupTerms(1, 1), OUTPUT_INTERVAL_TOKENS)
    return SamplingParams(
        temperature=1.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=logprobs,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=tag.to_extra_args(),
    )


def kv_bytes_per_token(worker: Any) -> float:
    """Bytes of KV cache per token in this worker's layers."""
    return sum(spec.page_size_bytes / spec.block_size for spec in worker.get_kv_cache_spec().values())


class KVCacheSize:
    """Worker extension with one method for `collective_rpc`."""

    rollout_kv_bytes_per_token = kv_bytes_per_token


async def serve_commands(profiler: Profiler, answer: Callable[[Any], None]) -> None:
    """Carry out commands until the input ends."""
    commands: dict[str, Callable[..., Awaitable[Any]]] = {
        command.__name__: command for command in (profiler.info, profiler.warm_up, profiler.decode, profiler.prefill)
    }
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, arguments = json.loads(line)
        answer(await commands[name](**arguments))


def main(arguments: list[str]) -> None:
    """Run `profiler.py [--no-logprobs] MODEL FLAGS`, FLAGS being those of `vllm-rollout serve`."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    check_vllm_version()
    logprobs = "--no-logprobs" not in arguments
    arguments = [argument for argument in arguments if argument != "--no-logprobs"]
    args = parse(arguments, "vllm-rollout profile MODEL --", "[options]")
    args.model = args.model_tag
    args.worker_extension_cls = f"{KVCacheSize.__module__}.{KVCacheSize.__name__}"
    args.enable_prefix_caching = True

    async def run() -> None:
        async with build_async_engine_client(args) as client:
            assert isinstance(client, RolloutAsyncLLM)
            profiler = Profiler(client, logprobs=logprobs)
            await serve_commands(profiler, lambda result: print(json.dumps(result), file=answers))

    asyncio.run(run())


if __name__ == "__main__":
    # As vllm_rollout.parts.shaping.api.profiler, not as __main__: the workers import KVCacheSize by name.
    from vllm_rollout.parts.shaping.api import profiler

    profiler.main(sys.argv[1:])
