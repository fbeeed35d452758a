"""What `benchmarks.rounds_simulated` simulates: models, machines and lengths of RollPacker's evaluation.

Invariant: every number has its source beside it, and no number of RollPacker's results is an input.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from vllm_rollout.group.cost import CostModel, PTLCurve
from vllm_rollout.group.rounds import RunTerms
from vllm_rollout.simulator.generate import LengthDistribution
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.rounds.settings import RoundSetting

PROMPTS_PER_ROUND = 128
GROUP_SIZE = 8
"""P0 and R0 (RollPacker section 6)."""

HBM_BYTES_PER_S = 3.35e12
FLOPS_PER_S = 989e12
HBM_BYTES = 80e9
GPU_SOURCE = "H800 SXM 80 GB, public data sheet: 3.35 TB/s of HBM3, 989 TFLOP/s dense in BF16"
MEMORY_SHARE = 0.9
"""Of a GPU's memory for weights and KV cache."""
MAX_NUM_SEQS = 1024
"""vLLM's default on such GPUs; no rank ever has so many."""
MESSAGE_S = 0.001
"""Between an engine and its API process: assumed."""
PROMPT_TOKENS = 200
"""Assumed; the paper does not say."""
CURVE_CONTEXT = 32_768
"""Second knot of the cost over contexts, which is linear in them."""

ModelName = Literal["7B/8k", "14B/16k", "32B/32k"]
MODEL_NAMES: tuple[ModelName, ...] = get_args(ModelName)


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the paper, as it is rolled out there."""

    title: str
    parameters: float
    num_layers: int
    num_kv_heads: int
    head_size: int
    num_gpus: int
    tensor_parallel_size: int
    max_tokens: int
    rollout_share: float
    """Of a synchronous step's time (Table 1, which is of 14B; the range there is 0.66 to 0.72)."""
    tail_batching: float
    """The paper's end-to-end speed-up of tail batching alone (Table 2)."""

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
        """A step reads the weights or computes, whichever takes longer, and reads the KV cache: nothing else, so that
        times are bounds from below and ratios are those of an engine that reaches its memory's bandwidth."""
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
        """JSON-able, with what follows from it."""
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
    "7B/8k": Model("Qwen2.5-7B, 8k", 7.61e9, 28, 4, 128, 16, 1, 8192, 0.7, 1.30),
    "14B/16k": Model("Qwen2.5-14B, 16k", 14.7e9, 48, 8, 128, 32, 2, 16_384, 0.7, 1.48),
    "32B/32k": Model("Qwen2.5-32B, 32k", 32.5e9, 64, 8, 128, 64, 2, 32_768, 0.7, 2.21),
}
MODEL_SOURCE = (
    "parameters, layers, KV heads and head size: model cards of Qwen2.5; GPUs, tensor parallelism and caps: RollPacker "
    "section 6; BF16 weights and KV cache"
)


@dataclass(frozen=True, slots=True)
class Tail:
    """Lengths of all answers: log-normal."""

    median: float
    sigma: float
    """Standard deviation of log lengths, within and between prompts together."""


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

BETWEEN_SHARE = 0.5
"""Part of the variance of log lengths that is between prompts: long prompts are long again. The paper does not say."""
OTHER_SHARES = (0.18, 0.75)
"""0.18 is what `benchmarks/traces/smollm2_math500.jsonl` has, cut at 1,024 tokens."""


def lengths(name: ModelName, between: float, num_prompts: int) -> LengthDistribution:
    tail = TAILS[name]
    return LengthDistribution(
        prompts=num_prompts,
        candidates=1,
        steps=1,
        median=tail.median,
        prompt_sigma=tail.sigma * between**0.5,
        sigma=tail.sigma * (1 - between) ** 0.5,
        max_tokens=MODELS[name].max_tokens,
        prompt_tokens=PROMPT_TOKENS,
    )


def speculating(prompts: float = 1.0, responses: float = 1.0, queue_order: str = "first_in") -> RoundSetting:
    return RoundSetting.of(RunTerms(GROUP_SIZE, PROMPTS_PER_ROUND, prompts, responses, queue_order))


SYNCHRONOUS = speculating()
FACTORS = (1.1, 1.25, 1.5)
BOTH, PROMPTS_ONLY, RESPONSES_ONLY = speculating(1.25, 1.25), speculating(1.25, 1.0), speculating(1.0, 1.25)


def sweep_settings() -> list[RoundSetting]:
    """Fig. 12 of the paper: the two factors alone, and together."""
    factors = [pair for f in FACTORS for pair in ((f, 1.0), (1.0, f), (f, f))]
    return [SYNCHRONOUS, *(speculating(*pair) for pair in factors)]


def workload(num_prompts: int, epochs: int, seeds: int) -> dict[str, Any]:
    """Everything that goes in, for the record."""
    return {
        "rounds": f"{epochs} epochs of {num_prompts} prompts, shuffled; {PROMPTS_PER_ROUND} prompts of {GROUP_SIZE} "
        f"answers a round; {seeds} seeds, which draw other prompts and lengths",
        "gpu": GPU_SOURCE,
        "models": {name: model.described() for name, model in MODELS.items()},
        "models_source": MODEL_SOURCE,
        "lengths": {name: asdict(tail) for name, tail in TAILS.items()},
        "lengths_source": TAIL_SOURCE,
        "between_prompts": f"{BETWEEN_SHARE} of the variance of log lengths; {OTHER_SHARES} beside it. The paper "
        "does not say",
        "prompt_tokens": PROMPT_TOKENS,
        "message_s": MESSAGE_S,
        "memory_share": MEMORY_SHARE,
        "left_out": "kernel launches, sampling, all-reduce, anything but reading weights and KV cache",
    }
