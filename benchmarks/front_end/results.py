"""The results as a table."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import grid, number, percent

NAMES = {
    "wait": "16 asked for, wait for all",
    "stream": "16 streams per prompt, the client closes the rest",
    "close": "16 plain requests per prompt, the client closes the rest",
    "rust-stream": "Rust: 16 streams per prompt, the client closes the rest",
    "rust-close": "Rust: 16 plain requests per prompt, the client closes the rest",
    "rust-join": "**Rust, our scheduler**: 16 requests that join a group of 8",
    "join": "**our scheduler**: 16 requests that join a group of 8",
    "rollouts": "**vllm-rollout**, `group_size: 8, redundancy: 8`",
}
HEADER = (
    "candidates", "way", "seconds", "ideal", "ideal / seconds", "CPU s of the front ends", "of the engine core",
    "host ms per step", "device ms per step",
)  # fmt: skip


def table(result: dict[str, Any]) -> str:
    rows = []
    for size in result["sizes"]:
        best = sorted(row["seconds"] for row in size["ideal"])[len(size["ideal"]) // 2]
        for way, name in NAMES.items():
            if (row := size["medians"].get(way)) is None:
                continue
            rows.append(
                [
                    number(size["candidates"]), name, number(row["wall_s"], 2), number(best, 2),
                    percent(row["of_ideal"], 1), number(row["api_cpu_s"], 2), number(row["engine_cpu_s"], 2),
                    number(row["host_ms_per_step"], 2), number(1e3 * row["device_busy_s"] / row["num_steps"], 2),
                ]
            )  # fmt: skip
    workload = result["workload"]
    title = f"First 8 of 16 on an emulated device, speed {workload['speed']:g}, ranks {workload['ranks']}"
    return grid(title, HEADER, rows)
