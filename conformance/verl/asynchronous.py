"""Weights that change while verl's FullyAsyncLLMServerClient waits for answers, as verl's trainers update them.

The order of calls is that of verl's `CheckpointEngineManager.update_weights`. Weights come out of a folder, because
verl's own ways need a GPU.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from conformance.asynchronous import EXPECTED_GAP, Span, sampled_by

PROBE = [*range(20, 120)]
STOPS = [*range(3, 512, 32)]
LEAST_TOKENS = 50
"""Tokens of each running request at an update."""


def let_pause(server: Any) -> bool:
    """Translate an argument that verl 0.9.1 passes at a pause, and that vLLM has no more since 0.32.

    Returns True if it was translated. Runs in verl's server.
    """
    pause = server.engine.pause_generation
    if "wait_for_inflight_requests" in inspect.signature(AsyncLLM.pause_generation).parameters:
        return False

    async def paused(*, wait_for_inflight_requests: bool, clear_cache: bool) -> None:
        await pause(mode="wait" if wait_for_inflight_requests else "abort", clear_cache=clear_cache)

    server.engine.pause_generation = paused
    return True


async def update(server: Any, folder: Path, version: int) -> int:
    """Update the weights. Returns the number of requests that verl aborted."""
    aborted = await server.actor.abort_all_requests.remote()
    await server.actor.collective_rpc.remote("reload_weights", kwargs={"weights_path": str(folder)})
    await server.actor.clear_kv_cache.remote()
    await server.actor.set_global_steps.remote(version)
    await server.actor.resume_generation.remote()
    return int(aborted["aborted_count"])


async def over_updates(
    server: Any, client: Any, folders: Sequence[Path], num_groups: int
) -> tuple[list[list[Any]], list[int]]:
    """Ask for groups, and update the weights while they run. Returns the answers, and requests aborted by each update.

    After each update, the server is probed: KV of older weights would show.
    """
    sampling = {"min_tokens": 200, "stop_token_ids": STOPS}
    asking, aborted = [], []
    for version, folder in enumerate(folders):
        aborted.append(await update(server, folder, version))
        probes = [await probe(server) for _ in range(2)]
        await server.actor.clear_kv_cache.remote()
        fresh = await probe(server)
        for each in probes:
            assert each.token_ids == fresh.token_ids, (each, fresh)
            gaps = [abs(a - b) for a, b in zip(each.log_probs, fresh.log_probs, strict=True)]
            assert max(gaps) < EXPECTED_GAP, gaps
        prompts = [[version + 3, group + 3, *range(20, 90)] for group in range(num_groups)]
        asking += [asyncio.create_task(server.ask(client, prompts=[prompt], **sampling)) for prompt in prompts]
        if version + 1 < len(folders):
            await until_running(server, num_groups * server.config.actor_rollout_ref.rollout.n)
    answers = [(await each)[0] for each in asking]
    return answers, aborted


async def probe(server: Any) -> Any:
    (answers,) = await server.ask(server.client("LLMServerClient"), 1, [PROBE], temperature=0, max_tokens=4)
    return answers[0]


async def until_running(server: Any, num_requests: int) -> None:
    """Wait until as many requests have generated some tokens and go on."""

    def count(server: Any) -> int:
        states = server.engine.output_processor.request_states.values()
        return sum(state.detokenizer.num_output_tokens() >= LEAST_TOKENS for state in states)

    for _ in range(1200):
        if await server.actor.__ray_call__.remote(count) >= num_requests:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{num_requests} requests never ran at once")


def spans_of(row: dict[str, Any]) -> tuple[list[int], list[Span]]:
    return row["token_ids"], [Span(**span) for span in row["spans"]]


def names_its_versions(answer: Any, num: int) -> bool:
    """True if verl's step numbers of an answer are the versions of its first and of its last token."""
    told = sampled_by(answer.token_ids, num)
    steps = answer.extra_fields["min_global_steps"], answer.extra_fields["max_global_steps"]
    return steps == (told[0].version, told[-1].version)
