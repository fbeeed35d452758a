"""The results as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import median
from benchmarks.tables import columns, lines, number, percent, picture

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
COLORS = {"rollouts": "#0f766e", "join": "#2563eb", "close": "#d97706", "stream": "#dc2626", "wait": "#64748b"}
COLORS |= {f"rust-{way}": color for way, color in COLORS.items()}


def table(result: dict[str, Any]) -> str:
    workload = result["workload"]
    rows = []
    for size in result["sizes"]:
        best = median(row["seconds"] for row in size["ideal"])
        found = {way: size["medians"][way] for way in NAMES if way in size["medians"]}
        rows += [{**row, "way": way, "at_once": size["candidates"], "best": best} for way, row in found.items()]
    return columns(
        f"First 8 of 16 on an emulated device, speed {workload['speed']:g}, ranks {workload['ranks']}",
        rows,
        {
            "candidates": lambda row: number(row["at_once"]),
            "way": lambda row: NAMES[row["way"]],
            "seconds": lambda row: number(row["wall_s"], 2),
            "ideal": lambda row: number(row["best"], 2),
            "ideal / seconds": lambda row: percent(row["of_ideal"], 1),
            "CPU s of the front ends": lambda row: number(row["api_cpu_s"], 2),
            "of the engine core": lambda row: number(row["engine_cpu_s"], 2),
            "host ms per step": lambda row: number(row["host_ms_per_step"], 2),
            "device ms per step": lambda row: number(1e3 * row["device_busy_s"] / row["num_steps"], 2),
        },
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Three panels by number of candidates. Clients over the Rust front end are dashed, in their Python color."""
    sizes = [size["candidates"] for size in result["sizes"]]
    panels = (("of_ideal", "ideal time / measured time", 100.0, "% of ideal"),)
    panels += (("api_cpu_s", "front ends", 1.0, "CPU seconds"), ("engine_cpu_s", "engine core", 1.0, "CPU seconds"))
    with picture(path, (12.0, 3.6), (1.2, 1.0, 1.0), 2.0) as places:
        for axes, (field, title, factor, unit) in zip(places, panels, strict=True):
            ways = [way for way in NAMES if way in result["sizes"][0]["medians"]]
            found = {way: [factor * size["medians"][way][field] for size in result["sizes"]] for way in ways}
            lines(axes, sizes, found, colors=COLORS, title=title, xlabel="candidates at once", ylabel=unit)
            for line in axes.lines:
                line.set_linestyle("--" if line.get_label().startswith("rust-") else "-")
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
            axes.set_ylim(bottom=0)
        places[1].legend(loc="upper left", frameon=False, fontsize=8)
