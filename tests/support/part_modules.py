"""Modules of parts' tests, which add to helpers of the kernel's tests."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

from vllm_rollout.kernel.parts import parts

PARTS = Path(__file__).parents[1] / "parts"


def modules(name: str) -> dict[str, ModuleType]:
    """The modules `tests/parts/PART/NAME.py` of parts that are there, by part."""
    there = [part.name for part in parts() if (PARTS / part.name / f"{name}.py").exists()]
    return {part: import_module(f"tests.parts.{part}.{name}") for part in there}
