"""Records that `benchmarks.shaping` keeps of each way."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_rollout.kernel.http.answers import GroupAnswer
from vllm_rollout.kernel.rules.types import Ending
from vllm_rollout.parts.page.recording.rows import RolloutPrompt, RolloutRow
from vllm_rollout.parts.shaping.rules.trace import End


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One group, with its values from the answer and from the server's trace."""

    prompt_id: str
    prompt_tokens: int
    lengths: tuple[int, ...]
    """Every candidate's length in tokens, by index."""
    ends: tuple[End, ...]
    selected: tuple[int, ...]
    complete: bool
    num_candidates: int
    selection: str
    """The applied selection. It is "shortest" if the tail is extreme."""
    at_upper_bound: bool
    weight: float | None
    std_tokens: float | None

    @classmethod
    def of(cls, answer: GroupAnswer, traced: RolloutPrompt) -> GroupRecord:
        allocation = answer.allocation
        return cls(
            answer.prompt_id,
            traced.prompt_tokens,
            tuple(traced.lengths),
            tuple(traced.ends or ["stop"] * len(traced.lengths)),
            tuple(sorted(trajectory.index for trajectory in answer.trajectories)),
            answer.status == "complete",
            allocation.num_candidates,
            allocation.selection,
            allocation.at_upper_bound,
            allocation.weight,
            allocation.std_tokens,
        )

    @property
    def returned(self) -> list[int]:
        """Lengths of the returned trajectories, in tokens."""
        return [self.lengths[index] for index in self.selected]

    def endings(self, num_candidates: int | None = None) -> list[Ending]:
        """Ends of the first `num_candidates`, to select by length. Raises: ValueError if a candidate was stopped."""
        stopped = [end for end in self.ends if end not in ("stop", "length")]
        if stopped:
            raise ValueError(
                f"prompt {self.prompt_id!r}: a candidate of the pool is {stopped[0]}, so its full length is not known. "
                "Measure this repeat again."
            )
        pairs = list(zip(self.lengths, self.ends, strict=True))[:num_candidates]
        return [Ending(i, "finished", length, end == "length", length) for i, (length, end) in enumerate(pairs)]


@dataclass(frozen=True, slots=True)
class Run:
    """One way in one repeat, with its time and its groups."""

    key: tuple[str, int]
    """A way and its repeat, or ("history", epoch)."""
    started_s: float
    """Start in seconds of Unix time."""
    server: int
    """Number of the server's start: an interrupted run has several."""
    load: float
    """Load average of the machine over the minute before."""
    wall_s: float
    num_preemptions: int
    warnings: tuple[str, ...]
    groups: tuple[GroupRecord, ...]
    budget: Mapping[str, Any] | None = None
    """The budget of redundancy "auto" in the answer."""

    @property
    def way(self) -> str:
        return self.key[0]

    @property
    def repeat(self) -> int:
        return self.key[1]

    @property
    def returned(self) -> list[int]:
        return [length for group in self.groups for length in group.returned]

    @property
    def generated_tokens(self) -> int:
        return sum(sum(group.lengths) for group in self.groups)


def traced_prompts(path: Path, rollout_ids: Sequence[str]) -> dict[str, RolloutPrompt]:
    """Prompts of these rollouts by id, from the server's record.

    Raises: ValueError if a rollout is not in the record.
    """
    found: dict[str, list[RolloutPrompt]] = {}
    for line in path.read_text().splitlines():
        if json.loads(line).get("rollout_id") in rollout_ids:
            row = RolloutRow.model_validate_json(line)
            found[row.rollout_id] = row.prompts
    if missing := [rollout_id for rollout_id in rollout_ids if rollout_id not in found]:
        raise ValueError(f"{path} has no row of {missing[0]}: see the server's log for why it could not be written.")
    return {prompt.id: prompt for prompts in found.values() for prompt in prompts}
