"""The steps of an emulated device, one JSON row each, and every ten seconds a line about them.

Invariant: a row is in the file when the step's output has been read, whatever happens to the process afterwards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vllm_rollout.private_file import open_private, private_folder

LINE_INTERVAL_S = 10.0
PATTERN = "steps-*.jsonl"


class LoggedStep(NamedTuple):
    """One step. Times are seconds of one clock."""

    launched: float
    """Time at which the engine core launched the step."""
    start: float
    end: float
    """The device computes from `start` to `end`."""
    read: float
    """Time at which the engine core read the step's output."""
    thread_cpu: float
    """CPU seconds of the engine core's thread so far, as of `read`."""
    goes_on: bool
    """True if some of its requests were in an earlier step. Then the device was idle before only because the host was
    late."""
    num_sampled: int
    num_requests: int
    context_tokens: int
    prefilled_tokens: int
    num_drafts: int = 0


@dataclass(slots=True)
class Summary:
    """Totals over the steps of one engine core."""

    num_steps: int = 0
    busy_s: float = 0.0
    """Seconds in which the device computes."""
    idle_s: float = 0.0
    """Seconds in which the device waits for the host although there is work."""
    host_s: float = 0.0
    """CPU of the engine core's thread between steps that follow each other."""
    num_following: int = 0
    """Number of steps that follow another step."""
    num_sampled: int = 0
    num_rows: int = 0
    prefilled_tokens: int = 0
    num_drafts: int = 0
    peak_requests: int = 0

    @classmethod
    def of(cls, steps: Iterable[LoggedStep]) -> Summary:
        summary, before = cls(), None
        for step in steps:
            summary.add(step, before)
            before = step
        return summary

    def add(self, step: LoggedStep, before: LoggedStep | None) -> None:
        self.num_steps += 1
        self.busy_s += step.end - step.start
        self.num_sampled += step.num_sampled
        self.num_rows += step.num_requests
        self.prefilled_tokens += step.prefilled_tokens
        self.num_drafts += step.num_drafts
        self.peak_requests = max(self.peak_requests, step.num_requests)
        if before is not None and step.goes_on:
            self.idle_s += max(0.0, step.start - before.end)
            self.host_s += step.thread_cpu - before.thread_cpu
            self.num_following += 1

    @property
    def host_ms(self) -> float:
        """The milliseconds that the host takes for a step."""
        return 1e3 * self.host_s / max(1, self.num_following)

    @property
    def device_ms(self) -> float:
        """The milliseconds that the device takes for a step."""
        return 1e3 * self.busy_s / max(1, self.num_steps)

    @property
    def wall_s(self) -> float:
        """busy_s and idle_s together: without the time in which there was nothing to do."""
        return self.busy_s + self.idle_s

    @property
    def busy(self) -> float:
        """Part of the time in which there was work."""
        return self.busy_s / self.wall_s if self.wall_s else 1.0

    def __str__(self) -> str:
        return (
            f"{self.num_steps} steps of {self.device_ms:.1f} ms, busy for {self.busy:.1%} of the time in which there "
            f"was work; the engine core's thread needed {self.host_ms:.1f} ms of CPU for each"
        )


class StepLog:
    """Writes steps into `folder`, if there is one, and says every ten seconds how they went."""

    def __init__(
        self,
        folder: Path | None,
        *,
        rank: int,
        speed: float,
        say: Callable[[str], None],
        num_ranks: int | None = None,
        goes_on: bool = False,
    ) -> None:
        """`num_ranks`: ranks of this server. A log of a rank beyond them is an earlier server's, and is removed.
        `goes_on`: write after the steps of an engine whose place this one takes. Raises: OSError."""
        self._rank = rank
        self._say = say
        self._file: int | None = None
        self._summary = Summary()
        self._before: LoggedStep | None = None
        self._since: float | None = None
        if folder is not None:
            private_folder(folder)
            if num_ranks is not None and not goes_on:
                _remove_others(folder, num_ranks)
            path = folder / f"steps-{rank}.jsonl"
            self._file = open_private(path, os.O_RDWR | (os.O_APPEND if goes_on else os.O_TRUNC))
            if goes_on:  # after a last row that was cut off
                os.ftruncate(self._file, path.read_bytes().rfind(b"\n") + 1)
            self._write({"rank": rank, "speed": speed, "pid": os.getpid(), "fields": LoggedStep._fields})

    def add(self, step: LoggedStep) -> None:
        if self._file is not None:
            self._write(step)
        self._summary.add(step, self._before)
        self._before = step
        if self._since is None:
            self._since = step.read
        elif step.read - self._since >= LINE_INTERVAL_S:
            self._say(f"emulated device {self._rank}: {self._summary}")
            self._summary, self._since = Summary(), None

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, row: object) -> None:
        """A row that cannot be written ends the log, and not the engine."""
        assert self._file is not None
        line = (json.dumps(row) + "\n").encode()
        try:
            if os.write(self._file, line) == len(line):  # without a buffer: a killed server has left what it did
                return
            reason = "the disk is full"
        except OSError as error:
            reason = str(error.strerror)
        self._say(f"emulated device {self._rank}: its log ends here, {reason}")
        self.close()


def _remove_others(folder: Path, num_ranks: int) -> None:
    for path in folder.glob(PATTERN):
        rank = path.stem.removeprefix("steps-")
        if rank.isdecimal() and int(rank) >= num_ranks:
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class LoggedSteps:
    """The log of one engine core."""

    rank: int
    speed: float
    steps: list[LoggedStep]


def read_steps(folder: Path) -> list[LoggedSteps]:
    """Every log of a folder, by rank. A last row that was cut off is left out.

    Raises: ValueError that names the file and line, or the folder when it has no log.
    """
    logs = sorted((_read(path) for path in folder.glob(PATTERN)), key=lambda log: log.rank)
    if not logs:
        raise ValueError(
            f"{folder} has no {PATTERN}. `vllm-rollout serve --rollout-emulate FILE "
            f"--rollout-emulate-log {folder}` writes them."
        )
    return logs


def _read(path: Path) -> LoggedSteps:
    lines = path.read_text().split("\n")[:-1]  # what follows the last line end was cut off
    number = 1
    try:
        head, *rows = lines
        described = json.loads(head)
        rank, speed = int(described["rank"]), float(described["speed"])
        steps = []
        for row in rows:
            number += 1
            read = json.loads(row)
            if isinstance(read, dict):  # another engine took the place
                continue
            if not all(isinstance(value, int | float) for value in read):
                raise ValueError(f"a step has numbers, got {row:.60}")
            steps.append(LoggedStep(*read))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}:{number}: not a step log ({type(error).__name__}: {error})") from error
    return LoggedSteps(rank, speed, steps)
