"""Lower bounds of each operator on an H100, computed and not measured: bytes, instructions, microseconds.

An operator takes at least as long as its bytes need at the memory's speed, and as its instructions need on all
multiprocessors. `make gpu-check` measures the real time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.common import arguments_of, publish, record_of_run
from benchmarks.tables import columns, number, percent

BYTES_PER_S = 3.0e12
"""Bytes per second of an H100 SXM's HBM3, of 3.35e12 in the data sheet."""
MULTIPROCESSORS, SCHEDULERS, LANES = 132, 4, 32
CLOCK_HZ = 1.7e9
TF32_PER_S = 4.0e14
"""Operations per second of tensor cores without sparsity, of 4.95e14 in the data sheet."""
LAUNCH_US = 3.0
"""Least microseconds of any launch on the device."""
STEP_US = 5_500.0
"""Microseconds of a decode step of an 8B model in bfloat16, which reads 16 GB of weights."""
VOCABULARY, HIDDEN, NUM_HIDDEN = 151_936, 4_096, 128
INSTRUCTIONS_PER_ENTRY = {"float32": 12.9, "bfloat16": 16.3}
"""Per entry of token_confidence's loop as compiled for sm_90a. tests/kernels/test_triton_compilation.py checks them."""
NUM_KEPT_BYTES = 64
"""Bytes of a slot that update_confidence touches. Three sectors of 32 bytes would be the most."""
ROWS = (1, 16, 64, 256, 1024)
HEAD_BLOCK = 64
TF32_PRODUCTS = 3
"""Products of TF32 for one product of float32."""


class Work(NamedTuple):
    """Work of one launch: bytes moved, and microseconds of computing."""

    num_bytes: int
    compute_us: float


def token_confidence(rows: int, dtype: str) -> Work:
    entries = rows * VOCABULARY
    instructions = entries * INSTRUCTIONS_PER_ENTRY[dtype] / LANES
    busy = min(1.0, rows / MULTIPROCESSORS)  # a row is one program
    per_us = MULTIPROCESSORS * SCHEDULERS * CLOCK_HZ * busy / 1e6
    return Work(entries * (4 if dtype == "float32" else 2), instructions / per_us)


def quality_head(rows: int, dtype: str) -> Work:
    """w1 comes from memory once. Blocks of rows read it again from the cache."""
    weights = 4 * NUM_HIDDEN * HIDDEN
    hidden = rows * HIDDEN * (4 if dtype == "float32" else 2)
    return Work(weights + hidden, 2 * TF32_PRODUCTS * max(rows, 16) * HIDDEN * NUM_HIDDEN / TF32_PER_S * 1e6)


def update_confidence(rows: int, dtype: str) -> Work:
    return Work(rows * (3 * NUM_KEPT_BYTES + 28), 0.0)


OPERATORS = {"token_confidence": token_confidence, "quality_head": quality_head, "update_confidence": update_confidence}


def row_of(operator: str, rows: int, dtype: str) -> dict[str, Any]:
    work = OPERATORS[operator](rows, dtype)
    memory_us = work.num_bytes / BYTES_PER_S * 1e6
    least_us = max(memory_us, work.compute_us, LAUNCH_US)
    return {
        "operator": operator,
        "dtype": dtype,
        "rows": rows,
        "mib": round(work.num_bytes / 2**20, 3),
        "memory_us": round(memory_us, 2),
        "compute_us": round(work.compute_us, 2),
        "least_us": round(least_us, 2),
        "share_of_step": round(least_us / STEP_US, 5),
    }


def main() -> None:
    arguments = arguments_of(__doc__, "roofline").parse_args()
    assumed = {
        "bytes_per_s": BYTES_PER_S, "multiprocessors": MULTIPROCESSORS, "clock_hz": CLOCK_HZ, "step_us": STEP_US,
        "tf32_per_s": TF32_PER_S, "launch_us": LAUNCH_US, "vocabulary": VOCABULARY, "hidden": HIDDEN,
    }  # fmt: skip
    rows = [row_of(operator, rows, dtype) for operator in OPERATORS for dtype in INSTRUCTIONS_PER_ENTRY for rows in ROWS
            if operator != "update_confidence" or dtype == "float32"]  # fmt: skip
    publish(arguments, {**record_of_run(seed=arguments.seed, workload=assumed), "rows": rows}, table)


def table(result: dict[str, Any]) -> str:
    return columns(
        "The least that operators can take on an H100 (computed)",
        result["rows"],
        {
            "operator": lambda row: f"`{row['operator']}`, {row['dtype']}",
            "rows": lambda row: number(row["rows"]),
            "MiB": lambda row: number(row["mib"], 2),
            "memory, µs": lambda row: number(row["memory_us"], 1),
            "instructions, µs": lambda row: number(row["compute_us"], 1),
            "at least, µs": lambda row: number(row["least_us"], 1),
            "of a step of 5.5 ms": lambda row: percent(row["share_of_step"], 2),
        },
    )


if __name__ == "__main__":
    main()
