"""Models, machines and lengths of RollPacker's evaluation, for emulated devices and the simulator beside them.

Invariant: every number has its source beside it, and no number of RollPacker's results is an input.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve
from vllm_rollout.simulator.machine import Machine

HBM_BYTES_PER_S = 3.35e12
FLOPS_PER_S = 989e12
HBM_BYTES = 80e9
GPU_SOURCE = "H800 SXM 80 GB, public data sheet: 3.35 TB/s of HBM3, 989 TFLOP/s dense in BF16"
MEMORY_SHARE = 0.9
"""Share of a GPU's memory for weights and KV cache."""
MAX_NUM_SEQS = 1024
"""vLLM's default on such GPUs. No rank ever has that many sequences."""
MESSAGE_S = 0.001
"""Seconds of a message between an engine and its API process. Assumed."""
PROMPT_TOKENS = 200
"""Tokens of a prompt. Assumed, because the paper gives no number."""
CURVE_CONTEXT = 32_768
"""Second context length at which the cost is given. The cost is linear in the context."""

ModelName = Literal["7B/8k", "14B/16k", "32B/32k"]
MODEL_NAMES: tuple[ModelName, ...] = get_args(ModelName)


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the paper, with the GPUs and the length cap of its rollouts there."""

    title: str
    parameters: float
    num_layers: int
    num_kv_heads: int
    head_size: int
    num_gpus: int
    tensor_parallel_size: int
    max_tokens: int

    @property
    def num_ranks(self) -> int:
        return self.num_gpus // self.tensor_parallel_size

    @property
    def weight_bytes(self) -> float:
        return 2 * self.parameters

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_size

    @property
    def cost(self) -> CostModel:
        """A step reads the weights or computes, whichever takes longer, and reads the KV cache. Nothing else takes
        time.

        So times are lower bounds, and ratios are those of an engine that reaches its memory's bandwidth.
        """
        gpus = self.tensor_parallel_size
        weights_s = self.weight_bytes / gpus / HBM_BYTES_PER_S
        compute_s = 2 * self.parameters / gpus / FLOPS_PER_S
        kv_s = self.kv_bytes_per_token / gpus / HBM_BYTES_PER_S
        balance = weights_s / compute_s
        sizes = (1.0, balance, 2 * balance)
        curves = [
            (context, PTLCurve(sizes, tuple(max(weights_s, n * compute_s) + n * context * kv_s for n in sizes)))
            for context in (0.0, float(CURVE_CONTEXT))
        ]
        return CostModel(tuple(curves), prefill_s_per_token=compute_s)

    @property
    def machine(self) -> Machine:
        capacity = (MEMORY_SHARE * HBM_BYTES * self.tensor_parallel_size - self.weight_bytes) / self.kv_bytes_per_token
        return Machine(self.cost, self.num_ranks, MAX_NUM_SEQS, int(capacity))

    def described(self) -> dict[str, Any]:
        """Fields that can be written as JSON, with values derived from them."""
        cost = self.cost
        return asdict(self) | {
            "num_ranks": self.num_ranks,
            "weight_bytes": self.weight_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "step_s_of_1_at_context_0": cost.ptl(1, 0),
            "step_s_of_64_at_context_1000": cost.ptl(64, 1000),
            "prefill_s_per_token": cost.prefill_s_per_token,
            "kv_capacity_tokens_per_rank": self.machine.kv_capacity_tokens,
        }


MODELS: dict[ModelName, Model] = {
    "7B/8k": Model("Qwen2.5-7B, 8k", 7.61e9, 28, 4, 128, 16, 1, 8192),
    "14B/16k": Model("Qwen2.5-14B, 16k", 14.7e9, 48, 8, 128, 32, 2, 16_384),
    "32B/32k": Model("Qwen2.5-32B, 32k", 32.5e9, 64, 8, 128, 64, 2, 32_768),
}
MODEL_SOURCE = (
    "parameters, layers, KV heads and head size: model cards of Qwen2.5; GPUs, tensor parallelism and caps: RollPacker "
    "section 6; BF16 weights and KV cache"
)


BETWEEN_SHARE = 0.5
"""Share of the variance of log lengths that is between prompts: long prompts stay long. The paper gives no number."""


@dataclass(frozen=True, slots=True)
class Tail:
    """Log-normal distribution of the lengths of all answers."""

    median: float
    sigma: float
    """Standard deviation of log lengths, within and between prompts together."""

    def described(self) -> dict[str, float]:
        """The field `log_normal` of an emulated device's lengths."""
        return {
            "mean": self.median * math.exp(self.sigma**2 / 2),
            "sigma": self.sigma * (1 - BETWEEN_SHARE) ** 0.5,
            "prompt_sigma": self.sigma * BETWEEN_SHARE**0.5,
        }


TAILS: dict[ModelName, Tail] = {
    "7B/8k": Tail(550, 1.0),
    "14B/16k": Tail(500, 1.15),
    "32B/32k": Tail(428, 1.4),
}
TAIL_SOURCE = (
    "fitted to two figures of RollPacker section 2.2: a P75 of 755 to 1,100 tokens (here 1,080 to 1,100), and a "
    "longest of 1,024 answers that is at the cap (here one to four of them are expected there); at 16k the longest is "
    "then 33 times the median, 25 to 32 in the paper. The figures are of 14B and 16k; the other caps get the same P75"
)
