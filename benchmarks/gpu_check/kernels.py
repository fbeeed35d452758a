"""Pieces about kernels alone. On the CPU the same comparisons run through the C++ operators, in small."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.pieces import Result
from vllm_rollout.config import CONFIDENCE_WINDOW_TOKENS
from vllm_rollout.tracker.dispatch import REFERENCES, Operator
from vllm_rollout.tracker.ops import active_implementation
from vllm_rollout.tracker.tracker import NUM_KEPT

VOCABULARIES = (151_936, 32_001)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCE = {"rtol": 2e-4, "atol": 2e-4, "equal_nan": True}
"""Sums of 151,936 entries in float32, in another order."""
WANTED_SHARE = 0.6
ROWS = (1, 8, 16, 64, 128, 256, 512, 1024)
NUM_HIDDEN = 128
MAX_LEN = 512
"""Tokens of a trace."""


class Inputs:
    """Arguments of every operator, on one device, from one seed."""

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *size: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return (torch.randn(*size, generator=self.generator) * scale).to(self.device, dtype)

    def integers(self, end: int, size: int) -> Tensor:
        return torch.randint(end, (size,), generator=self.generator).to(self.device)

    def token_confidence(self, num_rows: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        logits = self.normal(num_rows, vocab_size, scale=4.0, dtype=dtype)
        return logits, torch.arange(num_rows, device=self.device)

    def quality_head(self, num_due: int, hidden_size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        weights = (self.normal(NUM_HIDDEN, hidden_size, scale=hidden_size**-0.5), self.normal(NUM_HIDDEN))
        rows = torch.randperm(num_due, generator=self.generator).to(self.device)
        return self.normal(num_due, hidden_size, dtype=dtype), rows, *weights, self.normal(NUM_HIDDEN), self.normal(1)

    def update_confidence(self, num_rows: int, capacity: int) -> tuple[Tensor, ...]:
        slots = torch.randperm(capacity, generator=self.generator)[:num_rows].to(self.device)
        state = (self.normal(capacity, NUM_KEPT) + 8, self.integers(MAX_LEN, capacity * NUM_KEPT).float())
        trace = torch.zeros(capacity, MAX_LEN, device=self.device)
        values = self.normal(num_rows) + 8
        return slots, self.integers(MAX_LEN, num_rows), values, state[0], state[1].view(capacity, NUM_KEPT), trace

    def windowed_confidence(self, num_due: int) -> tuple[Any, ...]:
        trace = self.normal(num_due, MAX_LEN) + 8
        return trace, torch.full((num_due,), MAX_LEN, device=self.device), CONFIDENCE_WINDOW_TOKENS


def operators(device: str) -> Result:
    result = Result()
    expected = "triton" if device == "cuda" else "c++"
    for operator in ("token_confidence", "update_confidence"):
        implementation = active_implementation(device, operator)
        result.check(f"{operator} is served by {expected}", implementation.name == expected, implementation.reason)
    for what, operator, arguments in cases(device):
        difference = disagreement(device, operator, arguments)
        result.check(f"{operator}: {what}", difference is None, difference, "as the reference")
    return result


def cases(device: str) -> Iterator[tuple[str, Operator, tuple[Any, ...]]]:
    inputs = Inputs(device, 0)
    num_rows = 300 if device == "cuda" else 3
    vocabularies = VOCABULARIES if device == "cuda" else (1519, 321)
    for vocab_size in vocabularies:
        for name, dtype in DTYPES.items():
            logits, rows = inputs.token_confidence(num_rows, vocab_size, dtype)
            padded = torch.zeros(num_rows, vocab_size + 63, dtype=dtype, device=device)
            padded[:, :vocab_size] = logits
            masked = logits.masked_fill(torch.rand(logits.shape, device=device) < 0.5, -torch.inf)
            masked[0] = -torch.inf
            yield f"{name}, {vocab_size}", "token_confidence", (logits, rows)
            yield (
                f"{name}, {vocab_size}, rows of a padded tensor",
                "token_confidence",
                (padded[:, :vocab_size], rows),
            )
            yield f"{name}, {vocab_size}, masked", "token_confidence", (masked, rows)
            some = rows.flip(0)[: num_rows // 2].contiguous()
            yield f"{name}, {vocab_size}, some rows", "token_confidence", (logits, some)
    yield "300 rows", "update_confidence", inputs.update_confidence(num_rows, 1024)
    for name, dtype in DTYPES.items():
        for num_due in (1, 16, 17, num_rows):
            yield f"{name}, {num_due} due", "quality_head", inputs.quality_head(num_due, 4096, dtype)
    yield "windows", "windowed_confidence", inputs.windowed_confidence(num_rows)


def disagreement(device: str, operator: Operator, arguments: tuple[Any, ...]) -> str | None:
    """How the active implementation differs from the reference, in the state it leaves, too."""
    own, reference = (
        [value.clone() if is_state(operator, position) else value for position, value in enumerate(arguments)]
        for _ in range(2)
    )
    results = [tensors_of(active_implementation(device, operator).compute(*own))]
    results.append(tensors_of(REFERENCES[operator](*reference)))
    for actual, expected in zip(
        (*results[0], *state(operator, own)), (*results[1], *state(operator, reference)), strict=True
    ):
        try:
            scale = head_scale(arguments) if operator == "quality_head" else 1.0
            torch.testing.assert_close(actual / scale, expected / scale, **TOLERANCE)
        except AssertionError as error:
            return str(error)[:500]
    return None


def head_scale(arguments: tuple[Tensor, ...]) -> float | Tensor:
    """What the head's sums would be without signs: its error is relative to that."""
    hidden, rows, w1, b1, w2, b2 = arguments
    return (hidden[rows].float().abs() @ w1.abs().T + b1.abs()) @ w2.abs() + b2.abs()


def is_state(operator: Operator, position: int) -> bool:
    return operator == "update_confidence" and position >= 3


def state(operator: Operator, arguments: list[Any]) -> list[Tensor]:
    return [value for position, value in enumerate(arguments) if is_state(operator, position)]


def tensors_of(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def bandwidth(device: str) -> Result:
    result = Result()
    rows = ROWS if device == "cuda" else (1, 2)
    vocab_size = VOCABULARIES[0] if device == "cuda" else 1519
    peak = peak_bytes_per_s(device)
    result.values["peak_gb_per_s"] = round(peak / 1e9, 1)
    share: dict[str, dict[int, float]] = {}
    for name in ("bfloat16", "float32"):
        share[name] = {}
        for num_rows in rows:
            arguments = Inputs(device, 0).token_confidence(num_rows, vocab_size, DTYPES[name])
            compute = active_implementation(device, "token_confidence").compute
            seconds = seconds_of(lambda c=compute, a=arguments: c(*a), device)
            share[name][num_rows] = round(arguments[0].nbytes / seconds / peak, 3)
    result.values["share_of_peak"] = share
    if device == "cuda":
        result.values["variants_at_256_rows"] = variants(vocab_size, peak)
    wanted_rows = 256 if device == "cuda" else rows[-1]
    for name, shares in share.items():
        enough = shares[wanted_rows] >= WANTED_SHARE or device == "cpu"
        result.check(f"{name}: share of the peak at {wanted_rows} rows", enough, shares[wanted_rows], WANTED_SHARE)
    return result


def variants(vocab_size: int, peak: float) -> dict[str, float]:
    """Share of the peak of other shapes of the kernel: on sm_90 only their occupancy was computed."""
    from vllm_rollout.kernels import token_confidence as module

    arguments = Inputs("cuda", 0).token_confidence(256, vocab_size, torch.bfloat16)
    confidence = torch.empty(256, device="cuda")
    shares = {}
    for num_warps in (4, 8, 16):
        for num_blocks in (2, 4):
            for num_stages in (1, 3):
                seconds = seconds_of(
                    lambda w=num_warps, b=num_blocks, s=num_stages: module.token_confidence_kernel[(256,)](
                        *arguments,
                        confidence,
                        arguments[0].stride(0),
                        256,
                        vocab_size,
                        NUM_STAGES=s,
                        NUM_BLOCKS=b,
                        BLOCK_SIZE=32 * w * 8,
                        num_warps=w,
                    ),
                    "cuda",
                )
                key = f"{num_warps} warps, {num_blocks} blocks, {num_stages} stages"
                shares[key] = round(arguments[0].nbytes / seconds / peak, 3)
    return shares


def peak_bytes_per_s(device: str) -> float:
    """From the memory's clock and width where torch says them, else what a large copy reaches."""
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
        if clock and width:
            return 2.0 * clock * 1e3 * width / 8
    source = torch.zeros(2**28 if device == "cuda" else 2**22, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device)


def seconds_of(call: Callable[[], Any], device: str, repeats: int = 50) -> float:
    """Median of single calls; on a GPU between events, with the cache cleared by another tensor before each."""
    if device == "cpu":
        times = []
        for _ in range(5):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return statistics.median(times)
    for _ in range(3):
        call()
    flush = torch.empty(2**26, dtype=torch.float32, device=device)
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
    for before, after in events:
        flush.zero_()
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in events) / 1e3


def repeatable_scores(device: str) -> Result:
    result = Result()
    repeats = 1000 if device == "cuda" else 20
    for num_due in (1, 16, 17, 256):
        arguments = Inputs(device, num_due).quality_head(num_due, 4096 if device == "cuda" else 96, torch.bfloat16)
        compute = active_implementation(device, "quality_head").compute
        first = compute(*arguments)
        num_other = sum(not compute(*arguments).equal(first) for _ in range(repeats))
        result.check(f"{num_due} due: repeats that differ, of {repeats}", num_other == 0, num_other, 0)
    return result
