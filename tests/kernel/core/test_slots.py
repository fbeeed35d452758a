"""Requests that only decode are scheduled as stock vLLM schedules them, with fewer questions to its KV cache."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from tests.kernel.core.scheduler_runs import LOOPS, Loop
from tests.support.dry_run import DryRun

BLOCK = 4
PROMPTS = [[5] * 3, [5] * 8, [5] * 9 + [6] * 7, [6] * 12]
"""Prompts, of which some share KV blocks."""
requests = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=8)
"""Prompt, length and step of arrival of each."""


def steps(
    scheduler_cls: type[Scheduler], model: str, workload: list[tuple[int, int, int]], **kwargs: Any
) -> Iterator[Any]:
    """The scheduler's output and the state of its KV cache, step by step."""
    run = DryRun(scheduler_cls, model, block_size=BLOCK, **kwargs)
    pool = run.scheduler.kv_cache_manager.block_pool
    schedule, said = run.scheduler.schedule, []
    run.scheduler.schedule = lambda: said.append(schedule()) or said[-1]
    for step in range(3000):
        for number, (prompt, length, arrival) in enumerate(workload):
            if arrival == step:
                run.add(f"r{number}", length, prompt_token_ids=PROMPTS[prompt])
        goes_on = run.step()
        yield [shown(output) for output in said], run.num_free_blocks, len(pool.cached_block_hash_to_block)
        said.clear()
        if not goes_on and step > 60:
            return
    raise AssertionError("the workload does not end")


def shown(output: SchedulerOutput) -> tuple[Any, ...]:
    cached = output.scheduled_cached_reqs
    new = [(request.req_id, request.block_ids, request.num_computed_tokens) for request in output.scheduled_new_reqs]
    return output.num_scheduled_tokens, new, cached.req_ids, cached.new_block_ids, cached.num_computed_tokens


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(workload=requests, num_blocks=st.integers(16, 60), max_num_seqs=st.integers(1, 8))
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_blocks_are_given_cached_and_freed_as_by_stock_vllm(tiny_model, loop: Loop, workload, num_blocks, max_num_seqs):
    sizes = {"num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "depth": loop.depth}
    ours, stock = (steps(cls, tiny_model, workload, **sizes) for cls in (loop.scheduler_cls, loop.stock_cls))
    assert list(ours) == list(stock)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_a_decoding_request_is_asked_about_where_a_block_begins_or_ends(tiny_model, loop: Loop):
    run = DryRun(loop.scheduler_cls, tiny_model, depth=loop.depth)  # blocks of 16
    run.add("a", 160)
    coordinator = run.scheduler.kv_cache_manager.coordinator
    cache, asked = coordinator.cache_blocks, []
    coordinator.cache_blocks = lambda *args: asked.append(args) or cache(*args)
    run.run()
    assert len(asked) < 160 / 4
