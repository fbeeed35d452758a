"""Shared by the trainers' checks: marking a check, asking the harness for a server or a model, reporting the result.

A trainer's `check.py` is a module of plain functions marked with `@check(...)`, and ends with

    if __name__ == "__main__":
        main()

It runs in the trainer's environment, so this file imports the standard library and httpx only. The harness is the
parent process. It reads one JSON object per line from the original standard output, and answers with one line on
standard input. Invariant: output of a trainer goes to standard error, never into that exchange.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

import httpx

from conformance.recording import Recorder, recording

Mode = Literal["unmodified", "on", "replayed", "stopped"]
"""unmodified: the trainer as it is, with no setting of ours. on: with the one line that turns us on. replayed: recorded
requests, sent again. stopped: a check that a CPU stops. The detail says how far it got.
"""
MODES: tuple[Mode, ...] = ("unmodified", "on", "replayed", "stopped")
ServerKind = Literal["rollout", "stock"]
CAP = 1200
"""Length cap for answers of the tiny model, in tokens. One token of 512 ends its text, so a tenth of its answers is
cut, and no check may rely on none.
"""
REAL_MODEL = "smollm2-135m-instruct"
"""A real model, for checks in which the tiny model would end too fast. Requests last many seconds on any CPU, and
answers differ in length as real answers do.
"""
F = TypeVar("F", bound=Callable[..., Any])


class Stopped(Exception):
    """Raised by a check that cannot go on here. The message says what stops it, which the check has tried."""


def check(mode: Mode) -> Callable[[F], F]:
    """Mark a function as a check. It takes a `Kit`, and asserts.

    It returns its detail: a sentence, or a dictionary with `detail` and numbers. It passes unless it raises. `Stopped`
    turns its mode to "stopped". A check of mode "stopped" passes by raising `Stopped`.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")

    def mark(function: F) -> F:
        function.conformance_mode = mode  # type: ignore[attr-defined]
        return function

    return mark


def checks_of(namespace: Mapping[str, Any]) -> list[Callable[..., Any]]:
    """The marked functions of a module, in the order of the file."""
    found = [value for value in namespace.values() if inspect.isfunction(value) and hasattr(value, "conformance_mode")]
    return sorted(found, key=lambda function: function.__code__.co_firstlineno)


@dataclass(frozen=True)
class Server:
    """A server that the harness starts and ends."""

    url: str
    name: str
    """The harness's name for it."""
    log: str


class Kit:
    """Servers, models and recorders for a check. The harness ends all of them."""

    def __init__(self, ask: Callable[[Mapping[str, Any]], Any], model: str, folder: Path) -> None:
        self._ask = ask
        self.default_model = model
        """Name of the model that is served if a check names none."""
        self.folder = folder
        """Folder for scratch files, removed afterwards."""

    def server(
        self,
        kind: ServerKind = "rollout",
        *,
        model: str | None = None,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        number: int = 0,
    ) -> Server:
        """A healthy server in vLLM's developer mode: ours, or stock vLLM. The same call returns the same server while
        it lives.

        Servers with another model, other flags or another environment are ended first. Servers with the same settings
        run side by side: ours and stock vLLM, and one of each kind for each `number`.
        """
        answer = self._ask(
            {
                "ask": "server",
                "kind": kind,
                "model": model or self.default_model,
                "flags": list(flags),
                "environment": dict(environment or {}),
                "number": number,
            }
        )
        return Server(**answer)

    def kill(self, server: Server) -> None:
        """Kill a server and its processes by SIGKILL, as a failing machine would. Returns when they are gone."""
        self._ask({"ask": "kill", "name": server.name})

    def restart(self, server: Server) -> Server:
        """Start a server again on the same port. Returns when it is healthy."""
        return Server(**self._ask({"ask": "restart", "name": server.name}))

    def model_path(self, model: str | None = None) -> str:
        """The folder of a model of the catalogue. A missing model is fetched."""
        return self._ask({"ask": "model", "model": model or self.default_model})

    @contextmanager
    def recording(self, server: Server) -> Iterator[Recorder]:
        """A proxy before a server. For our server, samples of the requests are kept for the tests."""
        with recording(server.url) as recorder:
            yield recorder
        if server.name.startswith("rollout"):
            self.record(recorder.samples())

    def record(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Keep requests that the trainer really sent (`conformance.recording`), for the tests to replay."""
        self._ask({"ask": "record", "requests": list(requests)})


def refusal(call: Callable[[], object]) -> str:
    """The message of a refused call. Raises: AssertionError if the call is not refused."""
    try:
        answer = call()
    except Exception as error:
        return str(error)
    raise AssertionError(f"it was to be refused, and gave {str(answer)[:200]}")


def assert_raced(reasons: Sequence[str | None], group_size: int, *, stopped: str | None = "abort") -> None:
    """Assert that no more siblings ended by themselves than the group has places, and that cut ones filled the free
    places.

    `reasons`: finish reasons. `stopped`: the finish reason of all other siblings.
    """
    num_valid = sum(reason in ("stop", "completed") for reason in reasons)
    num_cut = reasons.count("length")
    assert num_valid <= group_size <= num_valid + num_cut, reasons
    assert reasons.count(stopped) == len(reasons) - num_valid - num_cut, reasons


def metric(url: str, name: str) -> float:
    """Value of a counter or gauge, summed over all rows that begin with the name."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


class Conversation:
    """Sends one line to the harness and reads one line back."""

    def __init__(self, reader: TextIO, writer: TextIO) -> None:
        self._reader = reader
        self._writer = writer

    def tell(self, message: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(message) + "\n")
        self._writer.flush()

    def ask(self, message: Mapping[str, Any]) -> Any:
        self.tell(message)
        line = self._reader.readline()
        if not line:
            raise RuntimeError("the harness has ended. Start it anew: python -m conformance TRAINER.")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["answer"]


def run(function: Callable[..., Any], kit: Kit) -> dict[str, Any]:
    """Run one check. Returns its row of the result."""
    started = time.monotonic()
    row: dict[str, Any] = {"name": function.__name__, "mode": function.conformance_mode}  # type: ignore[attr-defined]
    try:
        said = function(kit)
    except Stopped as stopped:
        row |= {"mode": "stopped", "passed": True, "detail": str(stopped)}
    except Exception as error:
        traceback.print_exc()
        row |= {"passed": False, "detail": f"{type(error).__name__}: {error}"[:2000]}
    else:
        said = said if isinstance(said, Mapping) else {"detail": said or ""}
        row |= {"passed": row["mode"] != "stopped", **said}
        if row["mode"] == "stopped":
            row["detail"] = f"nothing has stopped it: let its mode be another. {row['detail']}"
    return {**row, "seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    """Run the checks of the started module. The harness names them, and reads their rows."""
    reader = os.fdopen(os.dup(0), "r")
    writer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a trainer prints
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    found = checks_of(vars(sys.modules["__main__"]))
    conversation = Conversation(reader, writer)
    names = [function.__name__ for function in found]
    settings = conversation.ask({"ask": "begin", "checks": names})
    kit = Kit(conversation.ask, settings["model"], Path(settings["folder"]))
    for function in found:
        if function.__name__ in settings["checks"]:
            conversation.tell({"begins": function.__name__, "mode": function.conformance_mode})  # type: ignore[attr-defined]
            conversation.tell({"row": run(function, kit)})
    conversation.tell({"ends": True})
