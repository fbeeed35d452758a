"""The harness's side of a trainer's checks: starts them in their environment, gives them servers, collects their rows.

Invariant: when `run_checks` returns or raises, the checks' process and all servers are gone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import server_process
from conformance.checks import ServerKind
from vllm_rollout.models import resolve
from vllm_rollout.process import ServerError, ServerProcess, server_flags

ROOT = Path(__file__).parents[1]
MAX_CANDIDATES = 64
"""`--max-num-seqs` of the servers: enough for every check, and small enough for a small machine."""
Say = Callable[[str], None]


@dataclass
class Outcome:
    rows: list[dict[str, Any]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)


class Place(NamedTuple):
    kind: ServerKind
    number: int
    """Number among servers of the same kind."""


class Servers:
    """The servers of one session, by kind and number. All that live have the same settings."""

    def __init__(self, folder: Path, model: str | None, say: Say) -> None:
        self._folder = folder
        self._model = model
        """Replaces the model of every request if it is not None."""
        self._say = say
        self._running: dict[Place, tuple[str, ServerProcess]] = {}
        self._settings: dict[Place, str] = {}
        self._killed: set[str] = set()
        self._count = 0

    def get(
        self, kind: ServerKind, model: str, flags: Sequence[str], environment: Mapping[str, str], number: int = 0
    ) -> dict[str, str]:
        place = Place(kind, number)
        if kind not in ("rollout", "stock"):
            raise ValueError(f"kind of server must be rollout or stock, got {kind!r}")
        settings = json.dumps([self._model or model, list(flags), dict(environment)], sort_keys=True)
        for other, known in list(self._settings.items()):
            if known != settings or not self._lives(other):
                self._end(other)
        if place not in self._running:
            self._count += 1
            name = f"{kind}-{self._count}"
            served, path = self._model or model, resolve(self._model or model)
            names = ["--served-model-name", served, *([path] if path != served else [])]
            process = server_process(
                kind,
                path,
                [*server_flags(MAX_CANDIDATES), *names, *flags],
                self._folder / f"{name}.log",
                **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1", **environment},
            )
            self._running[place] = name, process
            self._settings[place] = settings
            self._start(place)
        return self._answer(place)

    def kill(self, name: str) -> None:
        process = self._running[self._place_of(name)][1]
        self._killed.add(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stop()

    def restart(self, name: str) -> dict[str, str]:
        place = self._place_of(name)
        self._running[place][1].stop()
        self._killed.discard(name)
        self._start(place)
        return self._answer(place)

    def close(self) -> None:
        for place in list(self._running):
            self._end(place)

    def _start(self, place: Place) -> None:
        name, process = self._running[place]
        try:
            process.__enter__()
            seconds = process.wait_until_healthy(lambda *_: None)
        except BaseException:
            self._end(place)
            raise
        self._say(f"{name} answers after {seconds:.0f} s: {process.url}")

    def _end(self, place: Place) -> None:
        self._settings.pop(place, None)
        _, process = self._running.pop(place)
        process.stop()

    def _lives(self, place: Place) -> bool:
        name, process = self._running[place]
        try:
            return name not in self._killed and process.check_alive() is None
        except ServerError:
            return False

    def _place_of(self, name: str) -> Place:
        places = [place for place, (known, _) in self._running.items() if known == name]
        if not places:
            known = ", ".join(known for known, _ in self._running.values())
            raise ValueError(
                f"no server is called {name!r}; there are: {known or 'none'}. Ask for one with Kit.server."
            )
        return places[0]

    def _answer(self, place: Place) -> dict[str, str]:
        name, process = self._running[place]
        return {"url": process.url, "name": name, "log": str(process.log)}


def run_checks(
    python: Path,
    trainer: str,
    folder: Path,
    *,
    model: str | None,
    default_model: str,
    only: Sequence[str],
    limit_s: float,
    say: Say,
) -> Outcome:
    """Run a trainer's checks. There is a row for each wanted check, also if the process ends amid one.

    Raises: ValueError if `only` names no check. A ServerError goes to the check, which fails.
    """
    command = [str(python), "-m", f"conformance.{trainer}.check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    servers = Servers(folder, model, say)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, bufsize=1, start_new_session=True, stderr=sys.stderr, **pipes
    )
    timer = threading.Timer(limit_s, _end_group, (child,))
    timer.start()
    try:
        settings = {"model": model or default_model, "folder": str(folder)}
        return _converse(child, servers, settings, only, say)
    finally:
        timer.cancel()
        _end_group(child)
        servers.close()


def _converse(
    child: subprocess.Popen[str], servers: Servers, settings: Mapping[str, Any], only: Sequence[str], say: Say
) -> Outcome:
    assert child.stdin is not None
    assert child.stdout is not None
    outcome, running, has_ended = Outcome(), None, False
    for line in child.stdout:
        message = json.loads(line)
        match message:
            case {"begins": name, "mode": mode}:
                running = {"name": name, "mode": mode}
                say(f"{name} ({mode}) …")
            case {"row": row}:
                running = None
                outcome.rows.append(row)
                say(f"{'passed' if row['passed'] else 'FAILED'}: {row['name']} ({row['mode']}): {row['detail']}")
            case {"ends": _}:
                has_ended = True
            case {"ask": "begin", "checks": known}:
                if unknown := set(only) - set(known):
                    raise ValueError(f"--only {', '.join(sorted(unknown))}: must be of {', '.join(known)}.")
                _reply(child, {"answer": {**settings, "checks": list(only) or known}})
            case {"ask": _}:
                _reply(child, _answer_to(message, servers, outcome))
    status = child.wait()
    if running is not None:
        outcome.rows.append({**running, "passed": False, "detail": f"its process ended with {status} amid it"})
    elif not has_ended:
        outcome.rows.append({"name": "start", "mode": "unmodified", "passed": False, "detail": f"ended with {status}"})
    return outcome


def _answer_to(message: Mapping[str, Any], servers: Servers, outcome: Outcome) -> dict[str, Any]:
    try:
        match message:
            case {"ask": "server", **its}:
                return {"answer": servers.get(**its)}
            case {"ask": "kill", "name": name}:
                return {"answer": servers.kill(name)}
            case {"ask": "restart", "name": name}:
                return {"answer": servers.restart(name)}
            case {"ask": "model", "model": model}:
                return {"answer": resolve(model)}
            case {"ask": "record", "requests": requests}:
                outcome.requests += requests
                return {"answer": None}
    except (ServerError, ValueError, RuntimeError) as error:
        return {"error": str(error)}
    return {"error": f"ask must be server, kill, restart, model or record, got {message.get('ask')!r}"}


def _reply(child: subprocess.Popen[str], answer: Mapping[str, Any]) -> None:
    assert child.stdin is not None
    with suppress(BrokenPipeError):  # it has ended: its stdout says so
        child.stdin.write(json.dumps(answer) + "\n")
        child.stdin.flush()


def _end_group(child: subprocess.Popen[str]) -> None:
    """End the checks' process and all processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        child.wait(10)
