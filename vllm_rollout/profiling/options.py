"""Options of `vllm-rollout profile`, checked before an engine starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vllm_rollout.models import DEFAULT_MODEL
from vllm_rollout.process import runs_on_cpu
from vllm_rollout.profiling.grid import Wanted
from vllm_rollout.profiling.hardware import num_devices

QUICK_CPU_FLAGS = ("--enforce-eager",)
"""Flags of a quick profile's engine on a CPU, if no flags are given: compiling would take longer than measuring."""

OURS = {
    "--tensor-parallel-size": "--tensor-parallel in front of --",
    "-tp": "--tensor-parallel in front of --",
    "--data-parallel-size": "nothing: every data-parallel rank is an engine of its own, with the same step times",
    "-dp": "nothing: every data-parallel rank is an engine of its own, with the same step times",
}
"""Flags of `vllm-rollout serve` that a profile does not take, with what to use instead."""


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    model: str = DEFAULT_MODEL
    output: Path = Path("ptl.json")
    wanted: Wanted = field(default_factory=Wanted)
    tensor_parallel_sizes: tuple[int, ...] = (1,)
    serve_flags: tuple[str, ...] = ()
    logprobs: bool = True
    refresh: bool = False
    restart: bool = False
    command: str = "vllm-rollout profile"
    """Command line that made the profile, for the file."""

    def __post_init__(self) -> None:
        if self.refresh and self.restart:
            raise ValueError("--refresh measures points of a profile again, --restart forgets it: give one of them")
        if self.output.suffix == ".png":
            raise ValueError(f"--output must not end in .png, where the picture goes, got {self.output}")
        if self.wanted.num_steps is not None and self.wanted.num_steps < 1:
            raise ValueError(f"--steps must be at least 1, got {self.wanted.num_steps}")
        for flag in self.serve_flags:
            name = flag.partition("=")[0].replace("_", "-")  # vLLM takes both
            if name in OURS:
                raise ValueError(f"{name} behind -- is not for a profile; use {OURS[name]}.")
        available = num_devices()
        for size in self.tensor_parallel_sizes:
            if size < 1:
                raise ValueError(f"--tensor-parallel: sizes must be at least 1, got {size}")
            if available is not None and size > available:
                kind = "NUMA nodes" if runs_on_cpu() else "GPUs"
                raise ValueError(f"--tensor-parallel {size} needs {size} devices, there are {available} ({kind}).")


def parse_sizes(option: str, text: str | None) -> tuple[int, ...] | None:
    """`1,2,4` -> (1, 2, 4), ascending and without duplicates. Raises: ValueError for any other text."""
    if text is None:
        return None
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1:
        raise ValueError(f"{option} must be positive whole numbers with commas between them, got {text!r}")
    return tuple(sizes)
