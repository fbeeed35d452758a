"""Options of the demo: prompts, sizes and sampling, checked before a server starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_rollout.models import DEFAULT_MODEL
from vllm_rollout.process import MAX_MODEL_LEN_TOKENS

PROMPTS = (
    "Write a haiku about the sea.",
    "What is the capital of France, and what is it known for?",
    "What is 17 + 25? Show your reasoning.",
    "Suggest a name for a small coffee shop by the harbour.",
    "Tom has 3 boxes with 14 pencils each and gives away 9 pencils. How many are left?",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey?",
    "Describe the water cycle.",
    "What is the difference between weather and climate?",
)

SEED = 7
MAX_CANDIDATES = 256
"""Candidates that may run at once in the demo. More would not fit a small KV cache."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of both demos. Raises: ValueError that names the flag."""

    model: str = DEFAULT_MODEL
    prompts: int = 8
    group_size: int = 8
    max_tokens: int = 768
    output: Path = Path("group_race_demo.png")

    def __post_init__(self) -> None:
        for name in ("prompts", "group_size", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.max_tokens > MAX_MODEL_LEN_TOKENS // 2:
            raise ValueError(f"--max-tokens must be at most {MAX_MODEL_LEN_TOKENS // 2}, got {self.max_tokens}")


@dataclass(frozen=True, slots=True)
class Options(DemoOptions):
    candidates: int = 16

    def __post_init__(self) -> None:
        DemoOptions.__post_init__(self)
        if self.candidates < self.group_size:
            raise ValueError(
                f"--candidates must be at least --group-size ({self.group_size}), got {self.candidates}: the race is "
                "for the first group_size of them"
            )
        if self.prompts * self.candidates > MAX_CANDIDATES:
            raise ValueError(
                f"--prompts times --candidates must be at most {MAX_CANDIDATES}, got {self.prompts} x {self.candidates}"
            )

    @property
    def questions(self) -> list[str]:
        """One question per prompt. If there are more prompts than questions, questions repeat."""
        return [PROMPTS[i % len(PROMPTS)] for i in range(self.prompts)]

    @property
    def sampling(self) -> dict[str, float]:
        return {"temperature": 1.0, "max_tokens": self.max_tokens, "seed": SEED}


QUICK = {"prompts": 4, "group_size": 4, "candidates": 8, "max_tokens": 256}
