"""gpu-check's pieces about moves, over the schedulers of two dry runs whose KV caches hold their tokens."""

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from moving_runs import Core
from vllm.v1.request import Request

from benchmarks.gpu_check.engine import Engine, Settings
from benchmarks.gpu_check.moves import move_8b, move_tokens
from benchmarks.gpu_check.moving_jobs import MovingJobs


class SteppedCore(Core):
    """An engine core whose candidates say by their index what they say, in every group."""

    def preprocess_add_request(self, request: Any) -> tuple[Request, int]:
        made, wave = super().preprocess_add_request(request)
        index = int(made.request_id.rsplit("-", 1)[1])
        self.run._lengths[made.request_id] = 10**6
        self.run.scripts[made.request_id] = [1000 * (1 + index) + number for number in range(made.max_tokens + 1)]
        return made, wave

    def add_request(self, request: Request, request_wave: int = 0) -> None:
        super().add_request(request, request_wave)

    def step_fn(self) -> tuple[dict[int, Any], bool]:
        self.run.step()
        outputs = [output for outputs in self.run.outputs.values() for output in outputs]
        self.run.outputs.clear()
        return {0: SimpleNamespace(outputs=outputs)}, True

    def post_step(self, model_executed: bool) -> None: ...


class DryEngine(Engine):
    """Its child is this process; jobs and answers are JSON all the same."""

    def __init__(self, core: SteppedCore) -> None:
        jobs = self._jobs = MovingJobs()
        front = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))
        jobs.llm = SimpleNamespace(llm_engine=front, reset_prefix_cache=core.scheduler.reset_prefix_cache)

    def _do(self, job: str, *arguments: Any) -> Any:
        return json.loads(json.dumps(getattr(self._jobs, job)(*json.loads(json.dumps(arguments)))))


class DryEngines:
    small = True

    def __init__(self, ranks: Any) -> None:
        self.cores = ranks.cores
        self.num_pairs = 0

    def start_pair(self, settings: Settings) -> Any:
        self.num_pairs += 1
        return nullcontext(tuple(DryEngine(core) for core in self.cores))


@pytest.fixture
def engines(new_ranks) -> DryEngines:
    return DryEngines(new_ranks(core_cls=SteppedCore))


def test_what_moved_groups_say_is_compared(engines):
    result = move_tokens(engines)
    assert result.passed, result.checks
    assert engines.num_pairs == 2
    assert len(result.checks) == 2 * (2 + 2)


def test_tokens_that_differ_fail_the_piece(engines):
    run = engines.cores[1].run
    sample = run.sample

    def wrong(scheduled):
        output = sample(scheduled)
        for row in output.sampled_token_ids:
            row[:] = [token + 1 for token in row]
        return output

    run.sample = wrong
    assert not move_tokens(engines).passed


def test_blocks_that_stay_behind_fail_the_piece(engines):
    engines.cores[0].scheduler.moves.kv._refusal = "a test"
    result = move_tokens(engines)
    assert [check.passed for check in result.checks] == 2 * [True, False, False, True]


def test_seconds_come_by_context(engines):
    result = move_8b(engines)
    assert result.passed, result.checks
    rows = result.values["seconds_by_context"]
    assert list(rows) == ["100", "200"]
    for context, row in rows.items():
        assert row["num_blocks"] >= int(context) // 16
        assert all(row[way]["first_token_s"] >= row[way]["adopt_s"] > 0 for way in ("kv", "recompute"))
