"""Options of the demo of training, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STYLE = "careful"
TERMS = ("--algorithm", "dr_grpo", "--lr", "3e-4", "--evaluate-every", "4", "--held-out", "128", "--serve")
WAYS = {
    "wait for all, 8 of 8": ("plain", ()),
    "race, 8 of 16": ("race", ("--race",)),
    "race, stopped ones teach": ("stopped", ("--race", "--stopped-teach")),
}
"""Folder and flags of each training, by title."""


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options of the demo of training. Raises: ValueError that says what to do."""

    steps: int = 20
    output: Path = Path("training_demo.png")

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"--steps must be at least 1, got {self.steps}")
        if not Path("examples/grpo/train.py").is_file():
            raise ValueError(
                f"--train runs the trainer in examples/grpo, which is not in {Path.cwd()}. Run it in a checkout of "
                "vllm_rollout."
            )

    @property
    def runs(self) -> Path:
        """Folder beside the picture with the records of the trainings."""
        return self.output.with_suffix("")


QUICK = {"steps": 8}
