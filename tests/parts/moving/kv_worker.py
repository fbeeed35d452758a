"""A worker whose KV cache holds the tokens themselves, so that a block that has something else in it is found."""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from tests.kernel.core.scheduler_runs import TracedRun
from vllm_rollout.parts.moving.worker.kv_calls import KVCalls

NUM_LAYERS = 2
UNKNOWN = -1
"""Written by a step in flight for a request that has ended."""


class KVWorker(KVCalls):
    """Executes the steps of a dry run as far as the KV cache goes, in their order.

    Before a step writes the tokens that it computes, it looks whether those before them are there.
    """

    rank = 0
    vllm_config = SimpleNamespace(additional_config={})

    def __init__(self, run: TracedRun) -> None:
        self._run, self._sample = run, run.sample
        run.sample = self._execute_and_sample
        self._block_size = run.scheduler.block_size
        config = run.scheduler.kv_cache_config
        shape = (NUM_LAYERS, config.num_blocks, self._block_size)
        self.kv_blocks = torch.full(shape, UNKNOWN, dtype=torch.int64)
        """Token + layer."""
        self.model_runner = SimpleNamespace(kv_cache_config=config, kv_caches=list(self.kv_blocks))
        self.num_computed = 0
        """Tokens, over all steps."""
        self.known: set[str] = set()
        """Requests of which it has a state, to go on from."""
        self._tables: dict[str, list[int]] = {}
        self._executed: SchedulerOutput | None = None

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        self.catch_up()
        return getattr(self, method)(*args)

    def catch_up(self) -> None:
        """Execute all work that was launched before a call."""
        for scheduled in self._run._in_flight:
            self._execute(scheduled)

    def _execute_and_sample(self, scheduled: SchedulerOutput) -> Any:
        self._execute(scheduled)
        return self._sample(scheduled)

    def _execute(self, scheduled: SchedulerOutput) -> None:
        if scheduled is self._executed:
            return
        self._executed = scheduled
        starts = {}
        self.known -= scheduled.finished_req_ids
        for new in scheduled.scheduled_new_reqs:
            self.known.add(new.req_id)
            self._tables[new.req_id], starts[new.req_id] = list(new.block_ids[0]), new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, block_ids, num_computed in rows:
            assert request_id in self.known, f"{request_id} goes on, and nothing is known of it"
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = []
            self._tables[request_id] += block_ids[0] if block_ids else []
            starts[request_id] = num_computed
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            self._compute(request_id, starts[request_id], num_tokens)

    def _compute(self, request_id: str, start: int, num_tokens: int) -> None:
        blocks = torch.tensor(self._tables[request_id])
        end, known = start + num_tokens, list(self._run.requests[request_id].all_token_ids)
        tokens = torch.tensor((known + [UNKNOWN] * num_tokens)[:end])
        positions = torch.arange(end)
        layers = torch.arange(NUM_LAYERS)[:, None]
        places = layers, blocks[positions // self._block_size], positions % self._block_size
        if start < len(known):
            found = self.kv_blocks[places][:, :start]
            assert torch.equal(found, (tokens + layers)[:, :start]), f"{request_id} does not have its own KV"
        self.kv_blocks[places] = torch.where(positions < start, self.kv_blocks[places], tokens + layers)
        self.num_computed += num_tokens
