"""The pieces: name, what each holds, and the function that runs it.

Invariant: a piece's function answers a `Result`; it raises only when something is broken.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LIMIT_S = 600
"""The time limit of one piece."""


class Check(NamedTuple):
    """One thing that must hold."""

    what: str
    passed: bool
    value: Any = None
    wanted: Any = None


@dataclass(slots=True)
class Result:
    """What a piece found."""

    checks: list[Check] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    """Measured, not judged."""

    def check(self, what: str, passed: bool, value: Any = None, wanted: Any = None) -> None:
        self.checks.append(Check(what, bool(passed), value, wanted))

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)


class Piece(NamedTuple):
    module: str
    """A module of this folder; the function in it has the piece's name."""
    holds: str
    starts_an_engine: bool = False

    def function(self, name: str) -> Callable[..., Result]:
        return getattr(importlib.import_module(f"benchmarks.gpu_check.{self.module}"), name)


PIECES: dict[str, Piece] = {
    "operators": Piece("kernels", "every operator agrees with its torch reference, at both vocabularies"),
    "bandwidth": Piece("kernels", "token_confidence reads logits at 60 % of the memory's bandwidth at 256 rows"),
    "repeatable_scores": Piece("kernels", "quality_head is bit-equal over 1,000 repeats"),
    "launch_blocking": Piece("equal", "seeded runs are equal with and without CUDA_LAUNCH_BLOCKING", True),
    "graphs": Piece("equal", "scores are equal under full graphs and eager", True),
    "runner_loops": Piece("equal", "V1 sync, V1 async and V2 observe what log probabilities say", True),
    "sleep": Piece("equal", "an engine that slept observes and scores as before", True),
    "move_tokens": Piece(
        "moves", "a group that moves by CUDA IPC to another engine says what it would have said", True
    ),
    "move_8b": Piece("moves", "seconds of a move by CUDA IPC and by recompute, by context length", True),
    "sync_check": Piece("equal", "vLLM's check for host synchronisation, as error, finds none", True),
    "jit_monitor": Piece("equal", "vLLM's monitor of compilation, as error, sees none in a step", True),
    "overhead_256": Piece("cost", "throughput against stock vLLM at 256 sequences", True),
    "overhead_1024": Piece("cost", "throughput against stock vLLM at 1,024 sequences", True),
    "race_8b": Piece("cost", "a group race on a model of 8B's shape, with lengths replayed", True),
    "profile_8b": Piece("cost", "vllm-rollout profile of a model of 8B's shape", True),
}
