"""Runs of the scripts beside this file, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]

Arguments = tuple[Any, ...]


def run_script(name: str, *arguments: Path | str, cache: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    script = [sys.executable, "-m", f"tests.kernels.{name}"]
    subprocess.run([*script, *arguments], check=True, env=environment, cwd=ROOT, timeout=120)


def interpreted_runs(cases: dict[str, tuple[str, Arguments]], folder: Path) -> dict[str, tuple[Any, Arguments]]:
    """Runs of Triton's interpreter for every case, an operator and its arguments: the kernel's results, and the
    arguments after the run."""
    torch.save(cases, folder / "cases.pt")
    run_script("triton_interpreter", folder / "cases.pt", folder / "results.pt", cache=folder)
    return torch.load(folder / "results.pt")
