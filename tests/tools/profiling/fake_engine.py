"""A measuring engine whose steps take what a formula says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vllm_rollout.parts.shaping.rules.cost import PTLCurve, StepTime

MODEL = {
    "architecture": "LlamaForCausalLM",
    "hidden_size": 576,
    "num_layers": 30,
    "vocab_size": 49152,
    "dtype": "bfloat16",
}
HARDWARE = {"device": "a CPU", "num_devices": 1, "cpu": "a CPU", "num_cpus": 2}
CURVE = PTLCurve((1, 6, 16, 64), (0.030, 0.035, 0.060, 0.300))
"""Step times at context 0."""
CONTEXT_SHARE = 1e-3
"""Each token of context adds this share."""
PREFILL_S_PER_TOKEN = 0.001
STEP_PREFILL_S = 0.02


class FakeEngine:
    """Takes commands as the real one does; `stop_after` interrupts it after so many measurements."""

    def __init__(
        self, tensor_parallel_size: int = 1, flags: Sequence[str] = (), changes: Mapping[str, Any] | None = None
    ) -> None:
        self.size = tensor_parallel_size
        self.flags = tuple(flags)
        self.changes = dict(changes or {})
        """To what `info` says."""
        self.stop_after: int | None = None
        self.speed = 1.0
        self.measured: list[tuple[int, int]] = []
        """Batch size and context of every decode command."""
        self.chunks: list[int] = []
        self.incapable: set[int] = set()
        """Batch sizes, and chunk sizes, that never run all together."""

    def info(self) -> dict[str, Any]:
        info = {
            "model": MODEL,
            "hardware": HARDWARE,
            "versions": {"vllm": "0.32.0"},
            "flags": {"enforce_eager": "--enforce-eager" in self.flags},
            "max_model_len": 1024,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 2048,
            "block_size": 32,
            "kv_capacity_tokens": 30_000,
            "kv_bytes_per_token": 23040.0,
        }
        return {**info, **self.changes}

    def warm_up(self) -> None:
        pass

    def decode(self, *, batch_size: int, context_tokens: int, num_warmup: int, num_steps: int) -> list[StepTime]:
        self._count()
        self.measured.append((batch_size, context_tokens))
        if batch_size in self.incapable:
            return []
        middle = context_tokens - num_steps // 2
        return [
            StepTime(batch_size, batch_size, middle + i, self.seconds(batch_size, middle + i)) for i in range(num_steps)
        ]

    def prefill(self, *, chunk_tokens: int, num_steps: int) -> list[StepTime]:
        self._count()
        self.chunks.append(chunk_tokens)
        if chunk_tokens in self.incapable:
            return []
        seconds = self.seconds(1, chunk_tokens / 2) + STEP_PREFILL_S + PREFILL_S_PER_TOKEN * chunk_tokens
        return [StepTime(2, chunk_tokens + 1, chunk_tokens / 2, seconds)] * num_steps

    def seconds(self, batch_size: int, context: float) -> float:
        return CURVE(batch_size) * (1 + CONTEXT_SHARE * context) / self.size * self.speed

    def _count(self) -> None:
        if self.stop_after is not None and len(self.measured) + len(self.chunks) >= self.stop_after:
            raise KeyboardInterrupt


class Engines:
    """Starts fake engines and remembers them."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes
        self.started: list[FakeEngine] = []
        self.stop_after: int | None = None
        self.speed = 1.0
        self.incapable: set[int] = set()

    @contextmanager
    def __call__(self, tensor_parallel_size, flags, on_wait):
        on_wait(0.5, "loading [weights]")
        engine = FakeEngine(tensor_parallel_size, flags, self.changes)
        engine.stop_after, engine.speed, engine.incapable = self.stop_after, self.speed, self.incapable
        self.started.append(engine)
        yield engine
