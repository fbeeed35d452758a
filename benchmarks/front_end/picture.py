"""The results as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.tables import picture

LABELS = {
    "rollouts": "vllm-rollout",
    "join": "joined requests",
    "close": "plain requests, closed",
    "stream": "streams, closed",
    "wait": "wait for all",
    "rust-join": "Rust: joined requests",
    "rust-close": "Rust: plain requests, closed",
    "rust-stream": "Rust: streams, closed",
}
COLORS = {"rollouts": "#0f766e", "join": "#2563eb", "close": "#d97706", "stream": "#dc2626", "wait": "#64748b"}
RUST = "rust-"
"""Dashed, in the color of the same client over Python."""
PANELS = (
    ("of_ideal", "ideal time / measured time", 100.0, "% of ideal"),
    ("api_cpu_s", "front ends", 1.0, "CPU seconds"),
    ("engine_cpu_s", "engine core", 1.0, "CPU seconds"),
)


def draw(result: dict[str, Any], path: Path) -> None:
    sizes = [size["candidates"] for size in result["sizes"]]
    with picture(path, (12.0, 3.6), (1.2, 1.0, 1.0), 2.0) as panels:
        for axes, (name, title, factor, unit) in zip(panels, PANELS, strict=True):
            for way, label in LABELS.items():
                if way in result["sizes"][0]["medians"]:
                    values = [factor * size["medians"][way][name] for size in result["sizes"]]
                    style = "--" if way.startswith(RUST) else "-"
                    axes.plot(sizes, values, style, marker="o", color=COLORS[way.removeprefix(RUST)], label=label)
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
            axes.set_title(title, loc="left", fontsize=10)
            axes.set_xlabel("candidates at once")
            axes.set_ylabel(unit)
            axes.set_ylim(bottom=0)
        panels[1].legend(loc="upper left", frameon=False, fontsize=8)
