"""Trace files: JSON lines <-> traces. Invariant: every complaint names file and line."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from vllm_rollout.trace.builder import TraceBuilder
from vllm_rollout.trace.rows import PromptRow, RewardRow, RolloutRow, Trace

FORMS = 'a rollout row has "prompts", a reward row "rollout_id" and "rewards", a prompt row "prompt_id" and "lengths"'
MAX_REASONS = 3
"""Reasons told of broken rows."""


class TraceError(ValueError):
    """A trace that cannot be read."""


def read_trace(path: Path, *, skip_broken: bool = False, prompts_per_step: int | None = None) -> Trace:
    """Read and check a trace file.

    Raises: TraceError with file, line, value and what is allowed; with `skip_broken` only when nothing is left.
    """
    builder = TraceBuilder()
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
