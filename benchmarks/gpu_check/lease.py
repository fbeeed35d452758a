"""Runs pieces one after the other within a time, and keeps all their results.

Invariant: this process imports torch and vLLM, but never touches CUDA or computes, because a copy of it could then use
neither. A piece that raises, hangs or is skipped stops no other piece.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

from benchmarks.gpu_check.bench import Bench, Device
from benchmarks.gpu_check.engine import Engine, EngineError, become_child, kill_all
from benchmarks.gpu_check.log import LogFile
from benchmarks.gpu_check.models import Models
from benchmarks.gpu_check.pieces import ENGINES, PIECES, START, Estimates, rehearsed, sources_of
from benchmarks.gpu_check.record import Record

PASSED, FAILED, BROKEN = 0, 1, 3
"""Exit status of a piece's process."""


class CudaTouched(RuntimeError):
    """Importing vLLM has touched CUDA, so this process must not be copied any more."""


class Lease:
    """A device for a limited time. Use it in a `with` block, at whose end none of its processes is left."""

    def __init__(
        self, device: Device, folder: Path, seconds: float, estimates: Estimates, imports_vllm: bool = True
    ) -> None:
        """`imports_vllm`: import vLLM here, once. Otherwise every process that needs vLLM imports it."""
        self.device = device
        self.folder = folder
        self.record = Record(folder / "lease.jsonl")
        self._ends_at = time.monotonic() + seconds
        self._estimates = estimates
        self._slack = 1 if device == "cuda" else 10  # estimates are of one CPU, and others are slower
        self._models = Models(folder / "models", small=device == "cpu")
        self._engines: dict[str, Engine] = {}
        self._imported: set[str] = set() if imports_vllm else {"vllm"}
        self._stack = ExitStack()

    def __enter__(self) -> Lease:
        self._log = self._stack.enter_context(LogFile(self.folder / "engines.log"))
        self._stack.callback(lambda: self._keep([]))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, names: Iterable[str], again: bool = False) -> dict[str, str]:
        """Run pieces. Returns how each piece ended."""
        names = list(names)
        return {name: self._run(name, names[position + 1 :], again) for position, name in enumerate(names)}

    @property
    def seconds_left(self) -> float:
        return self._ends_at - time.monotonic()

    def _run(self, name: str, later: list[str], again: bool) -> str:
        piece, sources = PIECES[name], sources_of(name, self.device)
        if not again and (before := self.record.ended(name, sources)) is not None:
            say(f"{name}: {before} before, with the same sources; --again repeats it")
            return before
        missing = [engine for engine in piece.engines if engine not in self._engines]
        needed = self._estimates.piece(name) + self._estimates.starts(missing)
        if self.seconds_left < needed:
            reason = f"{self.seconds_left:.0f} s are left, it takes about {needed:.0f} s"
            self.record.write("end", piece=name, sources=sources, status="skipped", seconds=0.0, reason=reason)
            say(f"{name}: skipped, {reason}")
            return "skipped"
        say(f"{name}: {piece.shows} (about {needed:.0f} s of {self.seconds_left:.0f} s) …")
        started = time.monotonic()
        try:
            self._import("torch", "vllm" if piece.needs_vllm else None)
            self._keep(piece.engines)
            self._start(missing)
            started = time.monotonic()  # a piece's seconds are its own
            status, reason = self._fork(name, min(self._slack * self._estimates.limit(name), self.seconds_left))
        except CudaTouched:
            raise
        except (ImportError, EngineError, RuntimeError) as error:
            status, reason = "error", f"{type(error).__name__}: {error}"
        seconds = round(time.monotonic() - started, 2)
        if status in ("error", "timeout"):
            self._keep([])  # their state is unknown
        self.record.write("end", piece=name, sources=sources, status=status, seconds=seconds, reason=reason)
        say(f"{name}: {status} in {seconds:.1f} s" + (f": {reason.strip().splitlines()[-1]}" if reason else ""))
        return status

    def _import(self, *modules: str | None) -> None:
        """Import modules once for all copies, because imports take seconds in every process."""
        for module in modules:
            if module is None or module in self._imported:
                continue
            started = time.monotonic()
            importlib.import_module(module)
            if sys.modules["torch"].cuda.is_initialized():
                raise CudaTouched(f"importing {module} has touched CUDA, which a copy of this process could not use")
            if module == "vllm":
                importlib.import_module("benchmarks.gpu_check.engine_child")
            self._imported.add(module)
            self.record.write("import", module=module, seconds=round(time.monotonic() - started, 2))

    def _start(self, names: list[str]) -> None:
        """Start engines side by side. Raises: EngineError."""
        begun = time.monotonic()
        for name in names:
            settings = ENGINES[name] if self.device == "cuda" else rehearsed(ENGINES[name])
            self._engines[name] = Engine(settings, self._models.path(settings.model), self._log.descriptor)
        limit_s = self._slack * max(60.0, 3 * self._estimates.starts(names))
        for name in names:
            self._engines[name].wait_until_ready(max(0.0, min(limit_s, self.seconds_left)))
            self.record.write("start", engine=name, seconds=round(time.monotonic() - begun, 2))

    def _keep(self, names: Iterable[str]) -> None:
        """Stop all other engines, because engines hold memory."""
        for name in [name for name in self._engines if name not in set(names)]:
            self._engines.pop(name).stop()

    def _fork(self, name: str, limit_s: float) -> tuple[str, str | None]:
        """Run a piece in a copy of this process. Returns how it ended, and the reason."""
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        ends_at = time.monotonic() + limit_s
        arguments = (name, theirs, ends_at, os.getpid())
        process = context.Process(target=self._piece, args=arguments)
        process.start()
        theirs.close()
        try:
            process.join(limit_s)
            if process.is_alive():
                return "timeout", f"not over within {limit_s:.0f} s"
            if process.exitcode in (PASSED, FAILED):
                return ("passed" if process.exitcode == PASSED else "failed"), None
            with suppress(EOFError):
                if ours.poll(0):
                    return "error", ours.recv()
            return "error", f"its process ended with exit status {process.exitcode}"
        finally:
            kill_all(process.pid)
            process.join()

    def _piece(self, name: str, answer: object, ends_at: float, parent: int) -> None:
        become_child(parent, self._log.descriptor)
        engines = {engine: self._engines[engine] for engine in PIECES[name].engines}
        bench = Bench(name, self.device, self.folder, self._models, self.record, self._log.descriptor, engines, ends_at)
        try:
            PIECES[name].function(name)(bench)
        except BaseException:
            answer.send(traceback.format_exc()[-3000:])
            status = BROKEN
        else:
            status = PASSED if bench.all_passed and bench.num_checks else FAILED
        sys.stdout.flush()
        os._exit(status)


def say(text: str) -> None:
    print(text, flush=True)


def measured_estimates(record: Record) -> dict[str, float]:
    """Measured seconds of pieces and starts, for `estimates.json`."""
    seconds: dict[str, float] = {}
    for line in record.lines():
        if line["kind"] == "end" and line["status"] in ("passed", "failed"):
            seconds[line["piece"]] = line["seconds"]
        elif line["kind"] == "start":
            seconds[START + line["engine"]] = line["seconds"]
    return seconds
