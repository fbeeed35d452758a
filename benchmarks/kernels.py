"""Kernel benchmark: the active token_stats against the torch reference, on this machine.

Invariant: both sides are timed in turns on the same tensors in the same process, so that what else the machine does
hits both; a row reports the median and the quartiles of each and the median of the pairwise ratios.

One CPU thread by default: a parallel section ends with its slowest thread, so that on a machine with other work the
medians of two threads are those of the scheduler (8 ms for a call of 0.05 ms was seen), on either side.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.common import record_of_run, write_json
from vllm_rollout.tracker.ops import TokenStats, active_implementation, token_stats, token_stats_reference

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Compute = Callable[[torch.Tensor, torch.Tensor], TokenStats]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time token_stats (C++ on the CPU, Triton on CUDA) against its torch reference and write JSON.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256], help="numbers of rows of logits")
    parser.add_argument("--vocab", type=int, nargs="+", default=[512, 49152, 151936], help="vocabulary sizes")
    parser.add_argument(
        "--dtype", choices=DTYPES, nargs="+", default=["bfloat16", "float32"], help="dtypes of the logits"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        nargs="+",
        default=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"],
        help="devices; CUDA is a default where there is one",
    )
    parser.add_argument("--pairs", type=int, default=31, help="paired runs of a row at most")
    parser.add_argument("--min-pairs", type=int, default=5, help="paired runs of a row at least")
    parser.add_argument("--seconds", type=float, default=2.0, help="stop a row after this long, with --min-pairs done")
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads for both sides; more only on a machine without other work"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the logits and the sampled tokens")
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/kernels.json"), help="where the JSON goes"
    )
    return parser.parse_args()


def timed(compute: Compute, logits: torch.Tensor, sampled: torch.Tensor) -> float:
    """Seconds from the call until the results are there."""
    start = time.perf_counter()
    compute(logits, sampled)
    if logits.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def largest_difference(actual: TokenStats, expected: TokenStats) -> float:
    return max((a - b).abs().max().item() for a, b in zip(actual, expected, strict=True))


def measure(logits: torch.Tensor, sampled: torch.Tensor, arguments: argparse.Namespace) -> dict[str, object]:
    """Medians in microseconds of both sides, after one untimed call of each that also compares the results."""
    difference = largest_difference(token_stats(logits, sampled), token_stats_reference(logits, sampled))
    timed(token_stats, logits, sampled)
    kernel_s, reference_s = [], []
    deadline = time.perf_counter() + arguments.seconds
    while len(kernel_s) < arguments.min_pairs or (len(kernel_s) < arguments.pairs and time.perf_counter() < deadline):
        kernel_s.append(timed(token_stats, logits, sampled))
        reference_s.append(timed(token_stats_reference, logits, sampled))
    ratios = [reference / kernel for kernel, reference in zip(kernel_s, reference_s, strict=True)]
    return {
        "num_pairs": len(kernel_s),
        "kernel_us": round(statistics.median(kernel_s) * 1e6, 2),
        "kernel_quartiles_us": quartiles_us(kernel_s),
        "reference_us": round(statistics.median(reference_s) * 1e6, 2),
        "reference_quartiles_us": quartiles_us(reference_s),
        "speedup": round(statistics.median(ratios), 2),
        "logits_gb_per_s": round(logits.nbytes / statistics.median(kernel_s) / 1e9, 2),
        "largest_difference": difference,
    }


def quartiles_us(seconds: list[float]) -> list[float]:
    """First and third quartile in microseconds."""
    first, _, third = statistics.quantiles(seconds, n=4)
    return [round(first * 1e6, 2), round(third * 1e6, 2)]


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    for device in arguments.device:
        implementation = active_implementation(device)
        reason = f" ({implementation.reason})" if implementation.reason else ""
        print(f"token_stats on {device}: {implementation.name}{reason}", flush=True)

    rows = []
    for device in arguments.device:
        for vocab_size in arguments.vocab:
            for num_rows in arguments.rows:
                generator = torch.Generator().manual_seed(arguments.seed)
                normal = torch.randn(num_rows, vocab_size, generator=generator) * 4
                sampled = torch.randint(vocab_size, (num_rows,), generator=generator).to(device)
                for dtype in arguments.dtype:
                    result = measure(normal.to(device, DTYPES[dtype]), sampled, arguments)
                    row = {
                        "operator": "token_stats",
                        "device": device,
                        "implementation": active_implementation(device).name,
                        "num_rows": num_rows,
                        "vocab_size": vocab_size,
                        "dtype": dtype,
                        **result,
                    }
                    rows.append(row)
                    print(
                        f"{device} {num_rows:>4} x {vocab_size:<6} {dtype:<8} {row['kernel_us']:>10} us, reference "
                        f"{row['reference_us']:>10} us, {row['speedup']:>6} times faster",
                        flush=True,
                    )

    record = record_of_run(
        seed=arguments.seed,
        workload="logits from a normal distribution with standard deviation 4, one sampled token per row, "
        "both sides in turns on the same tensors; medians in microseconds",
    )
    record["hardware"] |= {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": arguments.threads,
    }
    write_json(arguments.output, {**record, "rows": rows})


if __name__ == "__main__":
    main()
