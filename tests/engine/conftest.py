"""Real engines for tests. One server per session: a start takes 15 to 50 seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from vllm_rollout import process
from vllm_rollout.adapter.compat import SCALE_OUT_FLAG, has
from vllm_rollout.model_files import tiny
from vllm_rollout.models import resolve
from vllm_rollout.process import ServerProcess, counter, free_port

HERE = Path(__file__).parent
TIMEOUT_S = 600
"""Of everything that is waited for, in seconds: long enough for a loaded machine, short enough to end a hung run."""
LAST_TOKEN = 6
LONG = {"max_tokens": 1900, "ignore_eos": True}
"""Sampling of candidates that cannot end before seconds have passed."""
NO_KEEPALIVE = httpx.Limits(max_keepalive_connections=0)
"""Uvicorn closes connections that are idle for 5 s, and a client that reuses one at that moment fails."""

ENVIRONMENT = {
    **os.environ,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}


def python_path(first: Path) -> str:
    """PYTHONPATH with a folder in front: what stands there stays, this package of another environment among it."""
    return os.pathsep.join(filter(None, (str(first), os.environ.get("PYTHONPATH"))))


def pytest_configure() -> None:
    # A server is a process group of its own and would outlive a killed pytest: SIGTERM acts as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)


process.STOP_TIMEOUT_S = 120.0  # a server killed while it stops would not save its state


class Server:
    """A server process on 127.0.0.1 and an HTTP client for it."""

    record: Path
    """The trace of its rollouts, where it keeps one."""

    def __init__(self, command: list[str], log: Path, **environment: str) -> None:
        self._process = ServerProcess(command, free_port(), {**ENVIRONMENT, **environment}, log)
        self.log = log
        self.url = self._process.url
        with ExitStack() as stack:
            stack.enter_context(self._process)
            self.http = stack.enter_context(httpx.Client(base_url=self.url, limits=NO_KEEPALIVE, timeout=TIMEOUT_S))
            self._process.wait_until_healthy(lambda seconds, line: None, TIMEOUT_S)
            self.stop = stack.pop_all().close

    @property
    def alive(self) -> bool:
        """Raises: ServerError with the end of the log when the process has ended."""
        self._process.check_alive()
        return self.http.get("/health").status_code == 200

    def counter(self, name: str, **labels: str) -> float:
        """Sum of a Prometheus counter over the label sets that match."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = self.http.get("/metrics").text.splitlines()
        return counter("\n".join(line for line in lines if all(label in line for label in wanted)), name)

    @property
    def num_requests(self) -> float:
        """Requests in the engine as of its last step: 0 also when they have not reached it yet."""
        metrics = self.http.get("/metrics").text
        return counter(metrics, "vllm:num_requests_running") + counter(metrics, "vllm:num_requests_waiting")

    @property
    def num_in_engine(self) -> int:
        """Requests in the engines now, also while they make no step."""
        engines = self.http.get("/v1/engines").json()["engines"]
        return sum(engine["num_running"] + engine["num_waiting"] for engine in engines)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"not reached within {TIMEOUT_S} s"
            time.sleep(0.05)

    def wait_until_idle(self) -> None:
        self.wait_until(lambda: self.num_requests == 0)


def ends_after(num_tokens: int) -> dict[str, Any]:
    """Sampling of a candidate of the tiny model that ends by itself with its `num_tokens`-th token, whatever it says.

    The token that stops it is forbidden until then, and from then on nothing else has a chance.
    """
    stop = {"stop_token_ids": [LAST_TOKEN], "logit_bias": {str(LAST_TOKEN): 100}}
    return {"min_tokens": num_tokens - 1, "max_tokens": LONG["max_tokens"], **stop}


def race_joined(
    server: Server, xargs: dict[str, Any], num_winners: int, num_losers: int, max_tokens: int
) -> list[dict[str, Any]]:
    """Completions that join one group, winners first: answers in that order, the same however slow the machine.

    The losers are sent when the winners run and need twice as long: none can end before them, nor in the same step
    (a tie, lost with a whole candidate), nor be cut before them (`length`).
    """

    def complete(**sampling: Any) -> dict[str, Any]:
        body = {"prompt": "hello world", "vllm_xargs": xargs, **sampling, "max_tokens": max_tokens}
        return server.http.post("/v1/completions", json=body).json()

    with ThreadPoolExecutor(num_winners + num_losers) as pool:
        winners = [pool.submit(complete, **ends_after(max_tokens // 2)) for _ in range(num_winners)]
        server.wait_until(lambda: server.num_requests == num_winners or all(answer.done() for answer in winners))
        losers = [pool.submit(complete, ignore_eos=True) for _ in range(num_losers)]
        return [answer.result() for answer in [*winners, *losers]]


def serve_command(model: str, *flags: str) -> list[str]:
    """Nothing is audited by chance."""
    ours = ("--enforce-eager", "--rollout-audit-ratio", "0")
    return [sys.executable, "-m", "vllm_rollout.cli", "serve", model, *ours, *flags]


STEP_S = 1e-4
"""A step as the profile of `server` has it: shorter than any real one, so that live steps drift from it."""


def write_profile(model: str, path: Path) -> None:
    """A profile for `server` whose steps all take `STEP_S`."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_rollout.adapter.api.client.fingerprint import engine_flags, fingerprint_of, hardware_of
    from vllm_rollout.profiling.profile_file import CurveFit, EngineFacts, Profile

    config = EngineArgs(model=model, dtype="float32", enforce_eager=True).create_engine_config()
    facts = EngineFacts(
        tensor_parallel_size=1, max_num_seqs=64, max_model_len=2048, max_num_batched_tokens=256, block_size=32,
        kv_capacity_tokens=65_536, kv_bytes_per_token=64.0,
    )  # fmt: skip
    fit = CurveFit(
        tensor_parallel_size=1, context_tokens=64, mean_context_tokens=64.0, batch_sizes=(1.0, 64.0),
        seconds=(STEP_S, 2 * STEP_S), r_squared=1.0, residuals={},
    )  # fmt: skip
    Profile(
        created="", updated="", command="", model_name="tiny", model=fingerprint_of(config),
        hardware=hardware_of(config), versions={}, serve_flags=(), flags=engine_flags(config), logprobs=True,
        engines=(facts,), fits=(fit,),
    ).write(path)  # fmt: skip


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny(path)
    return str(path)


@pytest.fixture(scope="session")
def default_model() -> str:
    return resolve("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`vllm-rollout serve` on the tiny model: 64 candidates at once, chunked prefill from 256 tokens on.

    In float32: in bfloat16 a seed may say something else in a batch of another size, depending on the CPU's kernels.
    """
    flags = ("--max-model-len", "2048", "--max-num-seqs", "64", "--max-num-batched-tokens", "256", "--dtype", "float32")
    flags += ("--enable-scale-out",) if has(SCALE_OUT_FLAG) else ()  # before, its endpoints are always there
    folder = tmp_path_factory.mktemp("server")
    record, profile = folder / "trace.jsonl", folder / "ptl.json"
    write_profile(tiny_model, profile)
    flags += ("--rollout-record", str(record), "--rollout-profile", str(profile))
    server = Server(serve_command(tiny_model, *flags), folder / "server.log", VLLM_SERVER_DEV_MODE="1")
    server.record = record
    yield server
    server.stop()


def run_script(name: str, *arguments: str, own_session: bool = False, **environment: str) -> dict[str, Any]:
    """Run a script of this folder in its own process and return the JSON it prints."""
    done = subprocess.run(
        [sys.executable, str(HERE / name), *arguments],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, **environment},
        timeout=3 * TIMEOUT_S,
        start_new_session=own_session,
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stderr[-4000:]
    assert results, done.stdout[-4000:]
    return json.loads(results[0].removeprefix("RESULT "))
