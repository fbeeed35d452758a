"""Real engines for tests. A start takes 15 to 50 seconds: most modules share `server`.

What a module leaves there is not another one's: names of prompts, groups and runs are its own, and what was learned
goes with `forgetful`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from conformance.prime_rl import make_adapter
from tests.support.waiting import wait_until
from vllm_rollout import process
from vllm_rollout.adapter.compat import SCALE_OUT_FLAG, has
from vllm_rollout.kernel import parts
from vllm_rollout.model_files import tiny
from vllm_rollout.models import resolve
from vllm_rollout.on_cpu import this_cpu
from vllm_rollout.process import ServerProcess, counter, free_port

HERE = Path(__file__).parent
EXAMPLE_PART = HERE.parents[1] / "examples/part"
TIMEOUT_S = 600
"""Upper bound of every wait, in seconds: long enough for a loaded machine, short enough to end a hung run."""
TEST_TIMEOUT_S = 3 * TIMEOUT_S
"""For a test with its fixtures: as long as the longest script may take."""
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


def python_path(*first: Path) -> str:
    """PYTHONPATH with folders in front: what stands there stays, this package of another environment among it."""
    return os.pathsep.join(filter(None, (*map(str, first), os.environ.get("PYTHONPATH"))))


V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": python_path(HERE / "v2_on_cpu")}
"""Model runner V2, the GPU's default, in Triton's interpreter."""


def pytest_configure() -> None:
    # A server is a process group of its own and would outlive a killed pytest: SIGTERM acts as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)
            # By a signal: the test fails, its servers are stopped, and the run goes on.
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S, method="signal"))
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """Engines of a module's own come first: they take longest, and short tests fill the other worker's time. The shared
    server comes last: it ends with the session, and no other engine lives beside it."""
    if HERE not in item.path.parents:
        return 1
    shares = "server" in getattr(item, "fixturenames", ()) and not hasattr(item.module, "server")
    return 2 if shares else 0


process.STOP_TIMEOUT_S = 120.0  # a server killed while it stops would not save its state


def lives(process: psutil.Process) -> bool:
    """A zombie waits for somebody who looks at its exit status."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Server:
    """A server process on 127.0.0.1 and an HTTP client for it."""

    record: Path
    """The trace of its rollouts, where it keeps one."""
    blank: bytes
    """Its state when nothing had been learned."""
    adapters: Sequence[str] = ()
    """Folders of LoRA adapters for the server."""
    goes_by_priority = False

    def __init__(self, command: list[str], log: Path, **environment: str) -> None:
        command = ["setpriv", "--pdeathsig", "TERM", *command]  # pytest-xdist ends an interrupted worker at once
        self._process = ServerProcess(command, free_port(), {**ENVIRONMENT, **environment}, log)
        self.log = log
        self.url = self._process.url
        with ExitStack() as stack:
            stack.enter_context(self._process)
            self.http = stack.enter_context(httpx.Client(base_url=self.url, limits=NO_KEEPALIVE, timeout=TIMEOUT_S))
            self._process.wait_until_healthy(lambda seconds, line: None, TIMEOUT_S)
            self.stop = stack.pop_all().close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

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
    def num_in_engine(self) -> int:
        """Requests in the engines now, as the engines say. With several API processes vLLM's metrics may say an older
        number again.
        """
        return sum(engine["num_running"] + engine["num_waiting"] for engine in self.engines)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, TIMEOUT_S)

    def wait_until_idle(self) -> None:
        """No request is in the engines, and the metrics know of it."""
        gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        self.wait_until(lambda: self.num_in_engine == 0 and not any(map(self.counter, gauges)))

    @property
    def engines(self) -> list[dict[str, Any]]:
        """Ranks of the server, as `GET /v1/engines` lists them."""
        return self.http.get("/v1/engines").json()["engines"]

    def rollout(self, **body: Any) -> dict[str, Any]:
        response = self.http.post("/v1/rollouts", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str = "/v1/rollouts", **body: Any) -> Iterator[dict[str, Any]]:
        """Events of a stream, as they come."""
        with self.http.stream("POST", path, json={"stream": True, **body}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def reward(self, answer: dict[str, Any], reward: Callable[[str, dict[str, Any]], float]) -> dict[str, Any]:
        """Rewards for all trajectories of a rollout, each by its prompt's id and itself; the answer to them."""
        rewards = [
            {"prompt_id": group["prompt_id"], "index": t["index"], "reward": float(reward(group["prompt_id"], t))}
            for group in answer["groups"]
            for t in group["trajectories"]
        ]
        response = self.http.post(f"/v1/rollouts/{answer['id']}/rewards", json={"rewards": rewards})
        assert response.status_code == 200, response.text
        return response.json()


def said_in(events: Iterable[dict[str, Any]], stream_tokens: int = 1) -> dict[tuple[str, int], list[int]]:
    """Tokens of the candidates of a stream, by prompt and index.

    Asserts that chunks have no gap, that only the last chunk is short, that no chunk follows a candidate's end, and
    that a trajectory's end repeats the same tokens once."""
    chunks: dict[tuple[str, int], list[list[int]]] = {}
    ended: dict[tuple[str, int], list[int]] = {}
    for event in events:
        if event["type"] == "tokens":
            key = event["prompt_id"], event["index"]
            assert key not in ended
            assert len(event["logprobs"]) in (0, len(event["token_ids"]))
            parts = chunks.setdefault(key, [])
            assert event["offset"] == sum(map(len, parts))
            assert all(len(part) >= stream_tokens for part in parts)
            parts.append(event["token_ids"])
        elif event["type"] == "trajectory":
            key = event["prompt_id"], event["trajectory"]["index"]
            assert key not in ended
            ended[key] = event["trajectory"]["token_ids"]
    assert event["type"] == "done"
    said = {key: [token for part in parts for token in part] for key, parts in chunks.items()}
    assert {key: said[key] for key in ended} == ended
    return said


@contextmanager
def paused(server: Server) -> Iterator[None]:
    """Hold new requests in the engine, so that they start together however slow the machine is."""
    server.http.post("/pause?mode=keep&clear_cache=false").raise_for_status()
    try:
        yield
    finally:
        server.http.post("/resume").raise_for_status()


def in_one_step(server: Server, num_candidates: int, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Answer of `ask`, whose candidates start in the same step."""
    with ThreadPoolExecutor(1) as pool:
        with paused(server):
            asked = pool.submit(ask)
            server.wait_until(lambda: server.num_in_engine == num_candidates or asked.done())
        return asked.result()


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
        server.wait_until(lambda: server.num_in_engine == num_winners or all(answer.done() for answer in winners))
        losers = [pool.submit(complete, ignore_eos=True) for _ in range(num_losers)]
        return [answer.result() for answer in [*winners, *losers]]


def serve_command(model: str, *flags: str) -> list[str]:
    """Nothing is audited by chance. In the number type that this CPU is fast in, unless flags say another."""
    ours = ("--enforce-eager", "--dtype", this_cpu().dtype, "--rollout-audit-ratio", "0")
    return [sys.executable, "-m", "vllm_rollout.cli", "serve", model, *ours, *flags]


STEP_S = 1e-4
"""A step as the profile of `server` has it: shorter than any real one, so that live steps drift from it."""


def write_profile(model: str, path: Path) -> None:
    """A profile for `server` whose steps all take `STEP_S`."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_rollout.parts.shaping.api.fingerprint import engine_flags, fingerprint_of, hardware_of
    from vllm_rollout.parts.shaping.profile_file import CurveFit, EngineFacts, Profile

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


def mild_adapter(model: str, folder: Path, seed: int) -> Path:
    """About as large as the weights that it is added to, so that states still tell prompts apart."""
    file = make_adapter(Path(model), folder, seed) / "adapter_model.safetensors"
    tensors = {name: 1e-3 * tensor if "lora_B" in name else tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    return folder


def install_example_part(folder: Path) -> Path:
    """Install the package of examples/part there, which adds a part to every server that finds it."""
    source = shutil.copytree(EXAMPLE_PART, folder / "source")
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*pip, str(folder / "parts"), str(source)], check=True, timeout=TIMEOUT_S)
    return folder / "parts"


@pytest.fixture(scope="session")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`vllm-rollout serve` on the tiny model and two adapters, `a` and `b`: 64 candidates at once, chunked prefill from
    256 tokens on, a trainer's methods in the worker, a part of another package.

    In float32: in bfloat16 a seed may say something else in a batch of another size, depending on the CPU's kernels.
    """
    folder = tmp_path_factory.mktemp("server")
    flags = ["--max-model-len", "2048", "--max-num-seqs", "64", "--max-num-batched-tokens", "256", "--dtype", "float32"]
    if has(SCALE_OUT_FLAG):  # before, its endpoints are always there
        flags.append("--enable-scale-out")
    record, profile = folder / "trace.jsonl", folder / "ptl.json"
    if parts.has("page"):
        flags += ["--rollout-record", str(record)]
    if parts.has("shaping"):
        write_profile(tiny_model, profile)
        flags += ["--rollout-profile", str(profile)]
    flags += ["--worker-extension-cls", "trainer_extension.TrainerExtension"]
    adapters = [f"{name}={mild_adapter(tiny_model, folder / name, seed)}" for seed, name in enumerate("ab", start=1)]
    flags += ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules", *adapters]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": python_path(HERE, install_example_part(folder))}
    with Server(serve_command(tiny_model, *flags), folder / "server.log", **environment) as server:
        server.record = record
        if parts.has("pruning"):
            server.blank = server.http.get("/v1/rollouts/state").content
        yield server


def with_other_weights(model: str, folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """A copy of a model in a new folder, each tensor of which was changed."""
    shutil.copytree(model, folder)
    (file,) = folder.glob("*.safetensors")
    save_file({name: change(each) for name, each in load_file(file).items()}, file, {"format": "pt"})
    return str(folder)


@contextmanager
def forgetful(server: Server) -> Iterator[Server]:
    """The server as it was when nothing had been learned, and so it is left."""
    server.http.put("/v1/rollouts/state", content=server.blank).raise_for_status()
    try:
        yield server
    finally:
        server.http.put("/v1/rollouts/state", content=server.blank).raise_for_status()


def emulating(folder: Path, device: dict[str, Any]) -> list[str]:
    """Flags of a server whose device has these settings."""
    (folder / "device.json").write_text(json.dumps(device))
    return ["--rollout-emulate", str(folder / "device.json")]


def run_script(name: str, *arguments: str, own_session: bool = False, **environment: str) -> dict[str, Any]:
    """Run a script of this folder in its own process and return the JSON it prints."""
    folders = [environment.pop("PYTHONPATH", ENVIRONMENT.get("PYTHONPATH")), str(HERE.parents[1])]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    done = subprocess.run(
        [sys.executable, str(HERE / name), *arguments],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, **environment},
        timeout=TEST_TIMEOUT_S,
        start_new_session=own_session,
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stderr[-4000:]
    assert results, done.stdout[-4000:]
    return json.loads(results[0].removeprefix("RESULT "))
