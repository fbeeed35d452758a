"""Pieces about operators alone. A rehearsal runs the same comparisons through the C++ operators, in small."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.bench import Bench
from vllm_rollout.parts.observing.tracker import dispatch
from vllm_rollout.parts.observing.tracker.dispatch import OPERATORS, active_implementation
from vllm_rollout.parts.observing.tracker.tracker import NUM_KEPT

VOCABULARIES = (151_936, 32_001)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MOST_ERROR = {
    "token_confidence": 2e-7,
    "update_confidence": 1e-6,
    "quality_head": 1e-6,
}
"""Largest error against float64, relative, and absolute for numbers below 1. Float32 in torch errs by 5e-7 in the head.
Three products of tf32 err as much, one product of tf32 by 3e-4. A GPU's own division and root, in `update_confidence`,
err by 2e-7.
"""
WANTED_SHARE = 0.6
ROWS = (1, 8, 16, 64, 128, 256, 512, 1024)
NUM_HIDDEN = 128
MAX_LEN = 512
"""Length of a trace, in tokens."""
HEAD_START_CYCLES = 1_000_000
"""Cycles of the device in which the host launches a call: 0.5 ms."""
PEAK = 30.0
"""Logit of a token that has nearly all of the probability."""


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
        logits[::2, 7] = PEAK
        return logits, torch.arange(num_rows, device=self.device)

    def quality_head(self, num_due: int, hidden_size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Arguments whose weights have a size with which scores are about 1."""
        w1 = self.normal(NUM_HIDDEN, hidden_size, scale=hidden_size**-0.5)
        w2 = self.normal(NUM_HIDDEN, scale=NUM_HIDDEN**-0.5)
        rows = torch.randperm(num_due, generator=self.generator).to(self.device)
        hidden = self.normal(num_due, hidden_size, dtype=dtype)
        return hidden, rows, w1, self.normal(NUM_HIDDEN), w2, self.normal(1)

    def update_confidence(self, num_rows: int, capacity: int) -> tuple[Tensor, ...]:
        slots = torch.randperm(capacity, generator=self.generator)[:num_rows].to(self.device)
        state = (self.normal(capacity, NUM_KEPT) + 8, self.integers(MAX_LEN, capacity * NUM_KEPT).float())
        trace = torch.zeros(capacity, MAX_LEN, device=self.device)
        values = self.normal(num_rows) + 8
        return slots, self.integers(MAX_LEN, num_rows), values, state[0], state[1].view(capacity, NUM_KEPT), trace


def operators(bench: Bench) -> None:
    on_gpu = bench.device == "cuda"
    wanted = "triton" if on_gpu else "c++"
    for name, its in dispatch.operators().items():
        if its.triton is not None if on_gpu else its.fake is not None:
            implementation = active_implementation(bench.device, name)
            bench.check(f"{name} is served by {wanted}", implementation.name == wanted, implementation.reason)
    furthest: dict[str, float] = {}
    for what, operator, arguments in cases(bench):
        found = error_of(active_implementation(bench.device, operator).compute, operator, arguments)
        furthest[operator] = max(found, furthest.get(operator, 0.0))
        bench.check(f"{operator}: {what}", found <= MOST_ERROR[operator], found, MOST_ERROR[operator])
        bench.result("largest error", furthest)


def cases(bench: Bench) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    inputs = Inputs(bench.device, 0)
    num_rows, hidden_size = (3, 96) if bench.small else (300, 4096)
    for vocab_size in (1519, 321) if bench.small else VOCABULARIES:
        for name, dtype in DTYPES.items():
            logits, rows = inputs.token_confidence(num_rows, vocab_size, dtype)
            padded = torch.zeros(num_rows, vocab_size + 63, dtype=dtype, device=bench.device)
            padded[:, :vocab_size] = logits
            masked = logits.masked_fill(torch.rand(logits.shape, device=bench.device) < 0.5, -torch.inf)
            masked[0] = -torch.inf
            some = rows.flip(0)[: num_rows // 2].contiguous()
            label = f"{name}, {vocab_size}"
            yield label, "token_confidence", (logits, rows)
            yield f"{label}, rows of a padded tensor", "token_confidence", (padded[:, :vocab_size], rows)
            yield f"{label}, masked", "token_confidence", (masked, rows)
            yield f"{label}, some rows", "token_confidence", (logits, some)
    yield "300 rows", "update_confidence", inputs.update_confidence(num_rows, 1024)
    for name, dtype in DTYPES.items():
        for num_due in (1, 16, 17, num_rows):
            yield f"{name}, {num_due} due", "quality_head", inputs.quality_head(num_due, hidden_size, dtype)


def error_of(compute: Callable[..., Any], operator: str, arguments: tuple[Any, ...]) -> float:
    """Largest difference to float64, in results and in the changed state, relative, and absolute for numbers below 1.

    NaN if only one of the two has a number in some place.
    """
    own = copies(arguments)
    results = [compute(*own), *state_of(operator, own)]
    exact = copies(arguments)
    references = [in_float64(operator, exact), *state_of(operator, exact)]
    furthest = 0.0
    for actual, expected in zip(results, references, strict=True):
        actual, expected = actual.double(), expected.double()
        if not actual.isnan().equal(expected.isnan()):
            return float("nan")
        scale = expected.abs().clamp(min=1.0)
        furthest = max(furthest, ((actual - expected) / scale).nan_to_num().abs().max().item())
    return furthest


def in_float64(operator: str, arguments: list[Any]) -> Tensor:
    """The operator's own definition, in float64."""
    if operator == "token_confidence":
        logits, rows = arguments
        found = []
        for some in rows.split(32):  # a float64 copy of all would fill a card
            z = logits.index_select(0, some).double()
            unmasked = z != -torch.inf
            log_probabilities = torch.where(unmasked, z.log_softmax(dim=1), 0.0)
            found.append(-log_probabilities.sum(dim=1) / unmasked.sum(dim=1))
        return torch.cat(found)
    if operator == "quality_head":
        hidden, rows, w1, b1, w2, b2 = (each if each.dtype == torch.int64 else each.double() for each in arguments)
        return torch.addmv(b2, torch.addmm(b1, hidden.index_select(0, rows), w1.T).relu(), w2)
    return OPERATORS[operator].reference(*arguments)  # three products per value


def copies(arguments: tuple[Any, ...]) -> list[Any]:
    return [each.clone() if isinstance(each, Tensor) and each.ndim == 2 and each.shape[1] <= MAX_LEN else each
            for each in arguments]  # fmt: skip


def state_of(operator: str, arguments: list[Any]) -> list[Tensor]:
    return arguments[3:] if operator == "update_confidence" else []


def bandwidth(bench: Bench) -> None:
    peak = peak_bytes_per_s(bench)
    bench.result("peak_gb_per_s", round(peak / 1e9, 1))
    vocab_size = 1519 if bench.small else VOCABULARIES[0]
    at_256: dict[str, float] = {}
    for name in ("bfloat16", "float32"):
        sizes = (1, 256) if bench.small else ROWS
        logits, rows = Inputs(bench.device, 0).token_confidence(sizes[-1], vocab_size, DTYPES[name])
        for num_rows in sizes:
            arguments = logits[:num_rows], rows[:num_rows]
            compute = active_implementation(bench.device, "token_confidence").compute
            seconds = seconds_of(lambda c=compute, a=arguments: c(*a), bench.device)
            share = round(arguments[0].nbytes / seconds / peak, 3)
            bench.value(operator="token_confidence", dtype=name, rows=num_rows, us=round(1e6 * seconds, 2), share=share)
            if num_rows == 256:
                at_256[name] = share
                bench.result("token_confidence, share at 256 rows", at_256)
    for num_due in (1, 16, 64, 256, 1024):
        arguments = Inputs(bench.device, 0).quality_head(num_due, 96 if bench.small else 4096, torch.bfloat16)
        compute = active_implementation(bench.device, "quality_head").compute
        seconds = seconds_of(lambda c=compute, a=arguments: c(*a), bench.device)
        bench.value(operator="quality_head", rows=num_due, us=round(1e6 * seconds, 2))
    if bench.device == "cuda":
        bench.result("variants_at_256_rows", variants(vocab_size, peak))
    for name, share in at_256.items():
        bench.speed(f"{name}: share of the peak at 256 rows", share >= WANTED_SHARE, share, WANTED_SHARE)


def variants(vocab_size: int, peak: float) -> dict[str, float]:
    """Share of the peak bandwidth for other shapes of the kernel. On sm_90 only their occupancy was computed."""
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


def peak_bytes_per_s(bench: Bench) -> float:
    """Bytes per second by the memory's clock and width if torch knows them, else by a large copy."""
    if bench.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
        if clock and width:
            return 2.0 * clock * 1e3 * width / 8
    source = torch.zeros(2**22 if bench.small else 2**28, dtype=torch.float32, device=bench.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), bench.device)


def seconds_of(call: Callable[[], Any], device: str, repeats: int = 50) -> float:
    """Median seconds of single calls. On a GPU between events, with the cache cleared by another tensor before each.

    The device sleeps before each, while the host launches: otherwise the time of the launch would be measured.
    """
    if device == "cpu":
        times = []
        for _ in range(5):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return statistics.median(times)
    for _ in range(3):
        call()
    flush = torch.zeros(2**26, dtype=torch.float32, device=device)
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
    for before, after in events:
        flush.sum()  # a write would leave lines that the call has to write back
        torch.cuda._sleep(HEAD_START_CYCLES)
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in events) / 1e3


def repeatable_scores(bench: Bench) -> None:
    repeats = 20 if bench.small else 1000
    for num_due in (1, 16, 17, 256):
        arguments = Inputs(bench.device, num_due).quality_head(num_due, 96 if bench.small else 4096, torch.bfloat16)
        compute = active_implementation(bench.device, "quality_head").compute
        first = compute(*arguments)
        num_other = sum(not compute(*arguments).equal(first) for _ in range(repeats))
        bench.check(f"{num_due} due: repeats that differ, of {repeats}", num_other == 0, num_other, 0)
