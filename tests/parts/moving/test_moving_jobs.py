"""Pieces of benchmarks.gpu_check about moves, over the schedulers of two dry runs whose KV caches hold their tokens."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import Request

from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.engine import Engine
from benchmarks.gpu_check.models import Models
from benchmarks.gpu_check.moves import move_8b, move_float32
from benchmarks.gpu_check.moving_jobs import MovingJobs
from benchmarks.gpu_check.record import Record
from tests.parts.moving.moving_runs import Core
from vllm_rollout.parts.moving.core.moving import GroupMoves


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


class Jobs(MovingJobs):
    """Moving jobs whose child process is this process."""

    def __init__(self, core: SteppedCore) -> None:
        self.llm = SimpleNamespace(reset_prefix_cache=core.scheduler.reset_prefix_cache)
        self._core = core


class DryEngine(Engine):
    """Jobs and answers are pickled all the same."""

    def __init__(self, core: SteppedCore) -> None:
        self._jobs = Jobs(core)

    def _do(self, job: str, *arguments: Any, **named: Any) -> Any:
        return pickle.loads(pickle.dumps(getattr(self._jobs, job)(*pickle.loads(pickle.dumps(arguments)))))


@pytest.fixture
def bench(new_ranks, tmp_path) -> Bench:
    cores = new_ranks(core_cls=SteppedCore).cores
    engines = {str(number): DryEngine(core) for number, core in enumerate(cores)}
    made = Bench("a piece", "cpu", tmp_path, Models(tmp_path, small=True), Record(tmp_path / "lease"), 2, engines)
    made.cores = cores
    return made


def checks(bench: Bench) -> list[bool]:
    return [line["passed"] for line in bench.record.lines() if line["kind"] == "check"]


def test_what_moved_groups_say_is_compared(bench):
    move_float32(bench)
    assert bench.all_passed
    assert len(checks(bench)) == 2 + 2


def test_tokens_that_differ_fail_the_piece(bench):
    run = bench.cores[1].run
    sample = run.sample

    def wrong(scheduled):
        output = sample(scheduled)
        for row in output.sampled_token_ids:
            row[:] = [token + 1 for token in row]
        return output

    run.sample = wrong
    move_float32(bench)
    assert not bench.all_passed


def test_blocks_that_stay_behind_fail_the_piece(bench):
    bench.cores[0].scheduler.part(GroupMoves).kv._refusal = "a test"
    move_float32(bench)
    assert checks(bench) == [True, False, False, True]


def test_seconds_come_by_context(bench):
    move_8b(bench)
    assert bench.all_passed
    *_, result = [line for line in bench.record.lines() if line["kind"] == "result"]
    assert list(result["value"]) == ["100", "200"]
    for row in result["value"].values():
        assert all(row[way]["first_token_s"] >= row[way]["adopt_s"] > 0 for way in ("kv", "recompute"))
    for line in bench.record.lines():
        if line["kind"] == "value":
            assert line["num_blocks"] >= line["context"] // 16
