"""Engines in child processes: each with settings and environment of its own, one job after the other.

Invariant: a child is gone when the `with` block ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from vllm_rollout.process import server_environment

MODEL_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
"""Qwen3-8B's numbers."""
SMALL = {
    **MODEL_8B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""For a rehearsal."""


@dataclass(frozen=True)
class Settings:
    """One engine."""

    kind: Literal["rollout", "stock"] = "rollout"
    model: Literal["tiny", "8b"] = "tiny"
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of vLLM's EngineArgs, beyond those that every engine here gets."""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """One request. Tagged when it is of a group."""

    prompt: list[int]
    max_tokens: int
    seed: int | None = None
    ends_at: int | None = None
    """It ends by itself with this token; None: at max_tokens."""
    group: str | None = None
    index: int = 0
    group_size: int = 1
    num_candidates: int = 1
    early_stop: bool = False
    detection_length: int | None = None
    logprobs: int | None = None
    expect: bool = False
    """Work its confidence out from the log probabilities of the whole vocabulary, too."""


class Engine:
    """A child that holds an engine."""

    def __init__(self, settings: Settings, model: Path, log: Path) -> None:
        environment = {**server_environment(str(model)), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **settings.environment}
        command = [sys.executable, "-m", "benchmarks.gpu_check.engine_child", json.dumps(asdict(settings)), str(model)]
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
        try:
            self._answer()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def run(self, requests: list[Wanted]) -> dict[str, Any]:
        """`seconds`, and `candidates` in order: tokens, finish reason, and where there are any state, confidence,
        expected confidence, score (logit and the three numbers of its trace)."""
        return self._do("run", [asdict(request) for request in requests])

    def publish_head(self, detection_length: int) -> None:
        """A head with made-up weights, the same in every engine."""
        self._do("publish_head", detection_length)

    def sleep_and_wake(self) -> None:
        self._do("sleep_and_wake")

    def begin(self, group: str, prompt: list[int], sampling: list[dict[str, Any]]) -> None:
        """Add a group that may move; `moving_jobs.py` says what these answer."""
        self._do("begin", group, prompt, sampling)

    def until(self, group: str, num_tokens: int) -> float:
        return self._do("until", group, num_tokens)

    def release(self, group: str) -> dict[str, Any]:
        return self._do("release", group)

    def adopt(self, group: str, parcel: str, with_kv: bool) -> dict[str, Any]:
        return self._do("adopt", group, parcel, with_kv)

    def confirm(self, group: str) -> None:
        self._do("confirm", group)

    def end(self, group: str) -> dict[str, list[int]]:
        return self._do("end", group)

    def _do(self, job: str, *arguments: Any) -> Any:
        print(json.dumps([job, *arguments]), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        raise RuntimeError(f"the engine ended:\n{self._log.read_text()[-5000:]}")


class Engines:
    """Makes models and engines for a device; `small` on the CPU, where sizes are for a rehearsal."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.small = device == "cpu"
        self._stack = ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._num_started = 0

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start(self, settings: Settings) -> Engine:
        """Use it in a `with` block."""
        self._num_started += 1
        return Engine(settings, self.model(settings.model), self.folder / f"engine{self._num_started}.log")

    @contextmanager
    def start_pair(self, settings: Settings) -> Iterator[tuple[Engine, Engine]]:
        """Two engines at once, on the same device."""
        with self.start(settings) as first, self.start(settings) as second:
            yield first, second

    def model(self, name: str) -> Path:
        path = self.folder / name
        if not path.exists():
            if name == "8b":
                path.mkdir()
                (path / "config.json").write_text(json.dumps(SMALL if self.small else MODEL_8B))
            else:
                from vllm_rollout.model_files import tiny

                tiny(path)
        return path

    def profile(self, model: str, *arguments: str) -> dict[str, Any]:
        """What `vllm-rollout profile` writes."""
        output = self.folder / "ptl.json"
        command = [sys.executable, "-m", "vllm_rollout.cli", "profile", str(self.model(model)), "--output", str(output)]
        subprocess.run([*command, *arguments], check=True, stdout=sys.stderr, env=os.environ)
        return json.loads(output.read_text())
