"""What `benchmarks.rounds` keeps of each way. Invariant: a run that was logged is read back as it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.long_run import RunLog
from vllm_rollout.demo.rounds.rounds import Group, Period, Round

Key = tuple[str, int]
"""A way and its repeat."""


@dataclass(frozen=True, slots=True)
class Run:
    """A period of one way in one repeat."""

    key: Key
    started_s: float
    """Unix time."""
    load: float
    """Load average of the machine over the minute before."""
    period: Period
    """Its generated tokens are those of the engine's counter."""

    @property
    def way(self) -> str:
        return self.key[0]

    @property
    def repeat(self) -> int:
        return self.key[1]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Run:
        rounds = tuple(_round(each) for each in row["period"]["rounds"])
        return cls(tuple(row["key"]), row["started_s"], row["load"], Period(rounds))


def _round(row: Mapping[str, Any]) -> Round:
    groups = tuple(Group(prompt, seconds, tuple(lengths)) for prompt, seconds, lengths in row["groups"])
    return Round(row["name"], row["seconds"], groups, row["generated_tokens"])


class Log(RunLog[Run]):
    """The runs of all ways."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, Run.from_json)
