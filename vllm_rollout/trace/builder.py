"""Rows in, a trace out. Invariant: a row that raises changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm_rollout.trace.rows import (
    End,
    Lengths,
    PromptRow,
    RewardRow,
    RolloutRow,
    Trace,
    TracedCandidate,
    TracedPrompt,
    TracedRollout,
)


@dataclass(slots=True)
class _OpenPrompt:
    """A prompt whose rewards may still come."""

    id: str
    lengths: Sequence[int]
    ends: list[End]
    scores: list[float | None]
    rewards: list[float | None]
    prompt_tokens: int
    max_tokens: int | None
    key: str

    @classmethod
    def of(cls, prompt_id: str, row: Lengths, max_tokens: int | None) -> _OpenPrompt:
        num = len(row.lengths)
        return cls(
            prompt_id,
            row.lengths,
            list(row.ends or ["stop"] * num),
            list(row.scores or [None] * num),
            list(row.rewards or [None] * num),
            row.prompt_tokens,
            max_tokens,
            row.key,
        )

    def close(self) -> TracedPrompt:
        values = zip(self.lengths, self.ends, self.scores, self.rewards, strict=True)
        candidates = tuple(TracedCandidate(*each) for each in values if each[1] != "failed")
        return TracedPrompt(self.id, candidates, self.prompt_tokens, self.max_tokens, self.key)


@dataclass(slots=True)
class TraceBuilder:
    """Collects rows; rewards may come any time after their rollout."""

    _rollouts: list[list[_OpenPrompt]] = field(default_factory=list)
    _by_id: dict[str, dict[str, _OpenPrompt]] = field(default_factory=dict)
    _models: dict[str, None] = field(default_factory=dict)
    _group_sizes: set[int | None] = field(default_factory=set)
    _detection_lengths: set[int | None] = field(default_factory=set)
    _steps: dict[int | None, list[_OpenPrompt]] = field(default_factory=dict)
    """Of the prompt rows that follow each other, by their "step"."""

    def add(self, row: RolloutRow | RewardRow | PromptRow) -> None:
        """Raises: ValueError for what contradicts earlier rows."""
        if isinstance(row, RolloutRow):
            self._add_rollout(row)
        elif isinstance(row, RewardRow):
            self._add_rewards(row)
        else:
            prompt = _OpenPrompt.of(row.prompt_id, row, None)
            if row.step not in self._steps:
                self._rollouts.append([])
                self._steps[row.step] = self._rollouts[-1]
            self._steps[row.step].append(prompt)

    def build(self, prompts_per_step: int | None = None, skipped: Sequence[str] = ()) -> Trace:
        """`prompts_per_step` cuts the prompts, in their order, into rollouts anew.

        Raises: ValueError when a prompt comes twice in one rollout.
        """
        rollouts = self._rollouts
        if prompts_per_step is not None:
            prompts = [prompt for rollout in rollouts for prompt in rollout]
            rollouts = [prompts[i : i + prompts_per_step] for i in range(0, len(prompts), prompts_per_step)]
        for number, rollout in enumerate(rollouts):
            if (twice := _first_repeated(prompt.id for prompt in rollout)) is not None:
                raise ValueError(
                    f'prompt {twice!r} comes twice in step {number}. Give prompt rows a "step", or cut them with '
                    "--prompts-per-step."
                )
        closed = [[prompt.close() for prompt in rollout] for rollout in rollouts]
        usable = [tuple(prompt for prompt in rollout if prompt.has_tokens) for rollout in closed]
        return Trace(
            rollouts=tuple(TracedRollout(prompts) for prompts in usable if prompts),
            models=tuple(self._models),
            group_size=_only(self._group_sizes),
            detection_length=_only(self._detection_lengths - {None}),
            num_failed=sum(prompt.ends.count("failed") for rollout in rollouts for prompt in rollout),
            num_empty=sum(map(len, closed)) - sum(map(len, usable)),
            skipped=tuple(skipped),
        )

    def _add_rollout(self, row: RolloutRow) -> None:
        if row.rollout_id in self._by_id:
            raise ValueError(f"rollout_id {row.rollout_id!r} was there before")
        if (twice := _first_repeated(prompt.id for prompt in row.prompts)) is not None:
            raise ValueError(f"prompt {twice!r} comes twice in one rollout")
        prompts = [_OpenPrompt.of(prompt.id, prompt, row.max_tokens) for prompt in row.prompts]
        self._steps = {}
        self._rollouts.append(prompts)
        self._by_id[row.rollout_id] = {prompt.id: prompt for prompt in prompts}
        if row.model is not None:
            self._models[row.model] = None
        self._group_sizes.add(row.group_size)
        self._detection_lengths.add(row.detection_length)

    def _add_rewards(self, row: RewardRow) -> None:
        prompts = self._by_id.get(row.rollout_id)
        if prompts is None:
            raise ValueError(f"rewards for rollout_id {row.rollout_id!r}, which no earlier row has")
        for reward in row.rewards:
            prompt = prompts.get(reward.prompt_id)
            if prompt is None or reward.index >= len(prompt.lengths):
                raise ValueError(f"rewards name candidate {reward.index} of prompt {reward.prompt_id!r}: there is none")
        for reward in row.rewards:
            prompts[reward.prompt_id].rewards[reward.index] = reward.reward


def _only(values: set[int | None]) -> int | None:
    return next(iter(values)) if len(values) == 1 else None


def _first_repeated(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
