"""Trace files: JSON lines <-> traces. Invariant: every complaint names file and line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from vllm_rollout.trace.rows import (
    End,
    LengthsRow,
    PromptRow,
    RewardRow,
    RolloutRow,
    Trace,
    TracedCandidate,
    TracedPrompt,
    TracedRollout,
)

FORMS = 'a rollout row has "prompts", a reward row "rollout_id" and "rewards", a prompt row "prompt_id" and "lengths"'
MAX_REASONS = 3
"""Reasons told of broken rows."""


class TraceError(ValueError):
    """A trace that cannot be read."""


def read_trace(path: Path, *, skip_broken: bool = False, prompts_per_step: int | None = None) -> Trace:
    """Read and check a trace file.

    Raises: TraceError with file, line, value and what is allowed; with `skip_broken` only when nothing is left.
    """
    builder = _TraceBuilder()
    broken: list[str] = []
    try:
        with path.open(encoding="utf-8", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    builder.add(_parse(line))
                except ValueError as error:
                    broken.append(f"{path}:{number}: {_reason(error)}")
                    if not skip_broken:
                        raise TraceError(
                            f"{broken[-1]}. Mend the row, or go on without broken rows with --skip-broken."
                        ) from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    try:
        trace = builder.build(prompts_per_step, broken)
    except ValueError as error:
        raise TraceError(f"{path}: {error}") from error
    if not trace.rollouts:
        said = f"; all {len(broken)} rows are broken, first {broken[0]}" if broken else ""
        raise TraceError(f"{path}: holds no row that can be replayed{said}. Every line is JSON: {FORMS}.")
    return trace


def told_reasons(broken: tuple[str, ...]) -> str:
    """How many rows were skipped, and why the first of them were."""
    rows = "1 broken row was skipped" if len(broken) == 1 else f"{len(broken)} broken rows were skipped"
    more = "; …" if len(broken) > MAX_REASONS else ""
    return f"{rows}: {'; '.join(broken[:MAX_REASONS])}{more}"


class TraceFile:
    """A trace that grows row by row. Opened at once, so that a path that cannot be written is known at start-up."""

    def __init__(self, path: Path) -> None:
        """Raises: OSError."""
        self._file = path.open("a", encoding="utf-8")

    def append(self, row: str) -> None:
        """Raises: OSError, for example when the disk is full."""
        self._file.write(row + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _parse(line: str) -> RolloutRow | RewardRow | PromptRow:
    try:
        fields = json.loads(line)
    except RecursionError as error:
        raise ValueError("not JSON that a trace holds: it is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"a row is a JSON object, got {fields!r:.60}")
    if "prompts" in fields:
        return RolloutRow.model_validate(fields)
    if "rollout_id" in fields:
        return RewardRow.model_validate(fields)
    if "prompt_id" in fields or "lengths" in fields:
        return PromptRow.model_validate(fields)
    raise ValueError(f"no row of a trace: {FORMS}; got {', '.join(map(repr, fields)) or 'no field'}")


def _reason(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first, *others = error.errors(include_url=False)
    where = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        said = f"{where}: {message}" if where else message
    elif first["type"] == "missing":
        said = f"{where}: is missing"
    elif first["type"] == "extra_forbidden":
        said = f"{where}: is not a field of a trace"
    else:
        said = f"{where}: {message[:1].lower()}{message[1:]}, got {first['input']!r:.40}"
    return said + (f" (and {len(others)} more)" if others else "")


@dataclass(slots=True)
class _OpenPrompt:
    """A prompt whose rewards may still come."""

    id: str
    row: LengthsRow
    max_tokens: int | None = None
    rewards: list[float | None] = field(init=False)

    def __post_init__(self) -> None:
        self.rewards = list(self.row.rewards or [None] * len(self.row.lengths))

    def close(self) -> TracedPrompt:
        row = self.row
        ends: list[End] = row.ends or ["stop"] * len(row.lengths)
        scores: list[float | None] = row.scores or [None] * len(row.lengths)
        values = zip(row.lengths, ends, scores, self.rewards, strict=True)
        candidates = tuple(TracedCandidate(*each) for each in values if each[1] != "failed")
        return TracedPrompt(self.id, candidates, row.prompt_tokens, self.max_tokens, row.key)


@dataclass(slots=True)
class _TraceBuilder:
    """Collects rows; rewards may come any time after their rollout. A row that raises changes nothing."""

    _rollouts: list[list[_OpenPrompt]] = field(default_factory=list)
    _by_id: dict[str, dict[str, _OpenPrompt]] = field(default_factory=dict)
    _models: dict[str, None] = field(default_factory=dict)
    _group_sizes: set[int | None] = field(default_factory=set)
    _detection_lengths: set[int | None] = field(default_factory=set)
    _steps: dict[int | None, list[_OpenPrompt]] = field(default_factory=dict)
    """The prompt rows that follow each other, by their "step"."""

    def add(self, row: RolloutRow | RewardRow | PromptRow) -> None:
        """Raises: ValueError for what contradicts earlier rows."""
        if isinstance(row, RolloutRow):
            self._add_rollout(row)
        elif isinstance(row, RewardRow):
            self._add_rewards(row)
        else:
            if row.step not in self._steps:
                self._rollouts.append([])
                self._steps[row.step] = self._rollouts[-1]
            self._steps[row.step].append(_OpenPrompt(row.prompt_id, row))

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
            num_failed=sum((prompt.row.ends or []).count("failed") for rollout in rollouts for prompt in rollout),
            num_empty=sum(map(len, closed)) - sum(map(len, usable)),
            skipped=tuple(skipped),
        )

    def _add_rollout(self, row: RolloutRow) -> None:
        if row.rollout_id in self._by_id:
            raise ValueError(f"rollout_id {row.rollout_id!r} was there before")
        if (twice := _first_repeated(prompt.id for prompt in row.prompts)) is not None:
            raise ValueError(f"prompt {twice!r} comes twice in one rollout")
        prompts = [_OpenPrompt(prompt.id, prompt, row.max_tokens) for prompt in row.prompts]
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
            if prompt is None or reward.index >= len(prompt.rewards):
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
