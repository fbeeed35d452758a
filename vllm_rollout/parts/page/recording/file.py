"""Trace files: JSON lines <-> traces. Invariant: every complaint names file and line.

A file that is recorded into is bounded: when it is full it becomes the older piece, `FILE.1`, in the place of the one
before. Who reads FILE reads both.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from pydantic import ValidationError

from vllm_rollout.checks import shown
from vllm_rollout.parts.page.recording.rows import LengthsRow, PromptRow, RewardRow, RolloutRow
from vllm_rollout.parts.page.recording.session_rows import SessionGroupRow, SessionRewardRow
from vllm_rollout.parts.shaping.rules.trace import End, Trace, TracedCandidate, TracedPrompt, TracedRollout
from vllm_rollout.private_file import open_private

FORMS = (
    'a rollout row has "prompts", a reward row "rollout_id" and "rewards", a prompt row "prompt_id" and "lengths", '
    'a row of sessions "sessions"'
)
TraceRow = RolloutRow | RewardRow | PromptRow | SessionGroupRow | SessionRewardRow
MEND_BYTES = 1 << 16
"""Bytes that are read at once to find the last row."""
SHOWN_BYTES = 40
"""Bytes of a file that is no recording, in the message about it."""
ROWS_FIELDS = (
    {"rollout_id", "prompts"}, {"rollout_id", "rewards"}, {"prompt_id", "lengths"}, {"name", "sessions"},
    {"name", "rewards"},
)  # fmt: skip
"""Fields that each row of one form has."""
TORN_FIRST_ROW = re.compile(rb'\{"(rollout_id": ?"|name": ?"sessions-)')
"""Matches the beginning of a recording whose only row is torn."""


class TraceError(ValueError):
    """A trace that cannot be read."""


def read_trace(path: Path, *, skip_broken: bool = False, prompts_per_step: int | None = None) -> Trace:
    """Read and check a trace file.

    Raises: TraceError with file, line, value and what is allowed. With `skip_broken` only if no row is left.
    """
    whole = pieces(path)
    builder = _TraceBuilder(is_cut=len(whole) > 1)
    broken: list[str] = []
    try:
        for piece in whole:
            with piece.open(encoding="utf-8", errors="surrogateescape") as lines:
                for number, line in enumerate(lines, start=1):
                    if not line.strip():
                        continue
                    try:
                        builder.add(parse_row(line), f"{piece}:{number}")
                    except ValueError as error:
                        broken.append(f"{piece}:{number}: {reason_of(error)}")
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
        said += f"; it has {trace.others}" if trace.others else ""
        raise TraceError(f"{path}: holds no row that can be replayed{said}. Every line is JSON: {FORMS}.")
    return trace


def pieces(path: Path) -> list[Path]:
    """The files that a trace is in, the older one first."""
    older = older_piece(path)
    return [older, path] if older.exists() else [path]


def older_piece(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def rows_of(path: Path, broken: list[str]) -> Iterator[TraceRow]:
    """The rows of a trace by themselves. `broken`: takes what is wrong with each that is none. Raises: OSError."""
    for piece in pieces(path):
        with piece.open(encoding="utf-8", errors="surrogateescape") as lines:
            yield from rows_in(lines, piece, broken)


def rows_in(lines: Iterable[str], piece: Path, broken: list[str]) -> Iterator[TraceRow]:
    """Rows of one piece of the trace, from lines that the caller has opened."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield parse_row(line)
            except ValueError as error:
                broken.append(f"{piece}:{number}: {reason_of(error)}")


class TraceFile:
    """A trace that grows row by row, from several processes too. Invariant: its rows are whole, whatever became of one
    that was being written."""

    def __init__(self, path: Path, max_bytes: int = 0) -> None:
        """`max_bytes`: of both pieces together, 0 for no bound.

        Raises: OSError for a path that cannot be written, and for a file that is no recording. That file stays as it
        is.
        """
        self._path = path
        self._max_bytes = max_bytes
        _refuse_other_files(path)
        self._locked().close()

    def append(self, row: str) -> None:
        """Raises: OSError, for example when the disk is full: then the row is not there."""
        data = f"{row}\n".encode(errors="surrogateescape")
        with self._locked() as file:
            size = file.seek(0, os.SEEK_END)
            if not self._max_bytes or not size or size + len(data) <= self._max_bytes // 2:
                _write(file, data, size)
                return
            os.replace(self._path, older_piece(self._path))
        with self._locked() as file:
            _write(file, data, file.seek(0, os.SEEK_END))

    def _locked(self) -> FileIO:
        """The file that has the name now, after its last whole row. Nobody else writes to it until it is closed."""
        while True:
            file = FileIO(self._path, "a+", opener=open_private)
            fcntl.flock(file, fcntl.LOCK_EX)
            if self._path.exists() and os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                _mend(file)
                return file
            file.close()  # another process has made it the older piece


def _write(file: FileIO, data: bytes, size: int) -> None:
    """Write all of `data` or nothing. `size`: the file's size before. Raises: OSError."""
    try:
        while data:
            data = data[write_some(file, data) :]
    except OSError:
        file.truncate(size)
        raise


def write_some(file: FileIO, data: bytes) -> int:
    """Write a part of `data`, at least one byte, and return its length. Raises: OSError."""
    return file.write(data) or 0


def _refuse_other_files(path: Path) -> None:
    """Raises: OSError for a file with content whose first line is no row."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # another process may write the first row
        first = file.readline() if file.peek(2)[:2] == b'{"' else file.read(SHOWN_BYTES)
    is_torn = not first.endswith(b"\n") and TORN_FIRST_ROW.match(first) is not None
    if first and not _is_row(first) and not is_torn:
        raise _no_recording("begins", first)


def _no_recording(where: str, found: bytes) -> OSError:
    return OSError(errno.EINVAL, f"it is no recording, since it {where} with {found[:SHOWN_BYTES]!r}")


def _is_row(line: bytes) -> bool:
    """True if the line has the fields of a row. Their values may be those of another version."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and any(needed <= fields.keys() for needed in ROWS_FIELDS)


def _mend(file: FileIO) -> None:
    """Remove the rest of a row whose writer was killed. A whole row without an end of line gets one.

    Raises: OSError for a rest that is no part of a row. It stays.
    """
    size = file.seek(0, os.SEEK_END)
    begin, part = size, b""
    while begin and b"\n" not in part:
        begin = file.seek(max(0, begin - MEND_BYTES))
        part = file.read(size - begin)
    part = part[part.rfind(b"\n") + 1 :]
    if not part:
        return
    if _is_row(part):
        _write(file, b"\n", size)
    elif b'{"'.startswith(part[:2]) and not _is_json(part):
        file.truncate(size - len(part))
    else:
        raise _no_recording("ends", part)


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def parse_row(line: str) -> TraceRow:
    """Raises: ValueError with what is wrong with it."""
    try:
        fields = json.loads(line)
    except RecursionError as error:
        raise ValueError("not JSON that a trace holds: it is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"a row is a JSON object, got {fields!r:.60}")
    if "sessions" in fields:
        return SessionGroupRow.model_validate(fields)
    if "name" in fields and "rewards" in fields:
        return SessionRewardRow.model_validate(fields)
    if "prompts" in fields:
        return RolloutRow.model_validate(fields)
    if "rollout_id" in fields:
        return RewardRow.model_validate(fields)
    if "prompt_id" in fields or "lengths" in fields:
        return PromptRow.model_validate(fields)
    raise ValueError(f"no row of a trace: {FORMS}; got {', '.join(map(repr, fields)) or 'no field'}")


def reason_of(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first, *others = error.errors(include_url=False)
    where = shown(".".join(map(str, first["loc"])))[1:-1]  # a stranger's keys may be anything
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
class _OpenRollout:
    id: str = ""
    prompts: list[_OpenPrompt] = field(default_factory=list)


@dataclass(slots=True)
class _TraceBuilder:
    """Collects rows. Rewards may come before their rollout, from another API process. A row that raises changes
    nothing."""

    is_cut: bool = False
    """Older rows than the first one may have been thrown away."""
    _rollouts: list[_OpenRollout] = field(default_factory=list)
    _by_id: dict[str, dict[str, _OpenPrompt]] = field(default_factory=dict)
    _models: dict[str, None] = field(default_factory=dict)
    _group_sizes: set[int | None] = field(default_factory=set)
    _detection_lengths: set[int | None] = field(default_factory=set)
    _num_session_groups: int = 0
    _steps: dict[int | None, list[_OpenPrompt]] = field(default_factory=dict)
    """The prompt rows that follow each other, by their "step"."""
    _early: dict[str, list[tuple[str, RewardRow]]] = field(default_factory=dict)
    """Places and rows of rewards whose rollout has not come, by its id."""
    _left_out: list[str] = field(default_factory=list)
    """Reason of each early row of rewards that its rollout cannot have."""

    def add(self, row: TraceRow, where: str) -> None:
        """`where`: file and line. Raises: ValueError for what contradicts earlier rows."""
        if isinstance(row, SessionGroupRow):
            self._num_session_groups += 1
        elif isinstance(row, SessionRewardRow):
            pass  # of a group that is only counted
        elif isinstance(row, RolloutRow):
            self._add_rollout(row)
        elif isinstance(row, RewardRow):
            if row.rollout_id in self._by_id:
                self._add_rewards(row)
            else:
                self._early.setdefault(row.rollout_id, []).append((where, row))
        else:
            if row.step not in self._steps:
                self._rollouts.append(_OpenRollout())
                self._steps[row.step] = self._rollouts[-1].prompts
            self._steps[row.step].append(_OpenPrompt(row.prompt_id, row))

    def build(self, prompts_per_step: int | None = None, skipped: Sequence[str] = ()) -> Trace:
        """`prompts_per_step` cuts the prompts, in their order, into rollouts anew.

        Raises: ValueError when a prompt comes twice in one rollout.
        """
        rollouts = self._rollouts
        if prompts_per_step is not None:
            prompts = [prompt for rollout in rollouts for prompt in rollout.prompts]
            starts = range(0, len(prompts), prompts_per_step)
            rollouts = [_OpenRollout(prompts=prompts[start : start + prompts_per_step]) for start in starts]
        for number, rollout in enumerate(rollouts):
            if (twice := _first_repeated(prompt.id for prompt in rollout.prompts)) is not None:
                raise ValueError(
                    f'prompt {twice!r} comes twice in step {number}. Give prompt rows a "step", or cut them with '
                    "--prompts-per-step."
                )
        early = [] if self.is_cut else [each for rows in self._early.values() for each in rows]
        lost = [f"{where}: rewards for rollout_id {row.rollout_id!r}, which no row has" for where, row in early]
        num = self._num_session_groups
        closed = [TracedRollout(tuple(prompt.close() for prompt in each.prompts), each.id) for each in rollouts]
        usable = [
            TracedRollout(tuple(prompt for prompt in each.prompts if prompt.has_tokens), each.id) for each in closed
        ]
        return Trace(
            rollouts=tuple(rollout for rollout in usable if rollout.prompts),
            models=tuple(self._models),
            group_size=_only(self._group_sizes),
            detection_length=_only(self._detection_lengths - {None}),
            num_failed=sum((prompt.row.ends or []).count("failed") for each in rollouts for prompt in each.prompts),
            num_empty=sum(len(each.prompts) for each in closed) - sum(len(each.prompts) for each in usable),
            others=f"{num:,} group{'s' * (num != 1)} of sessions, which --sessions recorded replays" if num else "",
            skipped=(*skipped, *self._left_out, *lost),
        )

    def _add_rollout(self, row: RolloutRow) -> None:
        if row.rollout_id in self._by_id:
            raise ValueError(f"rollout_id {row.rollout_id!r} was there before")
        if (twice := _first_repeated(prompt.id for prompt in row.prompts)) is not None:
            raise ValueError(f"prompt {twice!r} comes twice in one rollout")
        prompts = [_OpenPrompt(prompt.id, prompt, row.max_tokens) for prompt in row.prompts]
        self._steps = {}
        self._rollouts.append(_OpenRollout(row.rollout_id, prompts))
        self._by_id[row.rollout_id] = {prompt.id: prompt for prompt in prompts}
        if row.model is not None:
            self._models[row.model] = None
        self._group_sizes.add(row.group_size)
        self._detection_lengths.add(row.detection_length)
        for where, early in self._early.pop(row.rollout_id, ()):
            try:
                self._add_rewards(early)
            except ValueError as error:
                self._left_out.append(f"{where}: {error}")

    def _add_rewards(self, row: RewardRow) -> None:
        prompts = self._by_id[row.rollout_id]
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
