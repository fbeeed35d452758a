"""What the trainers' checks share: how a check is marked, what it may ask the harness for, how it says what came out.

A trainer's `check.py` is a module of plain functions marked with `@check(...)`, and ends with

    if __name__ == "__main__":
        main()

It runs in the trainer's environment, so this file imports the standard library and httpx only. The harness is the
parent process: one JSON object per line goes to it on what was standard output, one answer per line comes on standard
input. Invariant: whatever a trainer prints goes to standard error, and never into that conversation.
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
"""unmodified: the trainer as it is, nothing of ours named. on: with the one line that turns us on. replayed: requests
that were recorded, sent again. stopped: something that a CPU stops; the detail says what."""
MODES: tuple[Mode, ...] = ("unmodified", "on", "replayed", "stopped")
ServerKind = Literal["rollout", "stock"]
CAP = 1200
"""Tokens after which answers of the tiny model are cut: it ends a text with one token of 512, so a tenth of them is,
and no check may hope for none."""
REAL_MODEL = "smollm2-135m-instruct"
"""A real model, for checks that the tiny one ends too fast for: requests last many seconds on any CPU, and answers
differ in length as answers do."""
F = TypeVar("F", bound=Callable[..., Any])


class Stopped(Exception):
    """A check cannot go on here; the message says what stops it, and was found by trying."""


def check(mode: Mode) -> Callable[[F], F]:
    """Mark a function as a check. It takes a `Kit`, and asserts.

    What it returns is its detail: a sentence, or a dictionary with `detail` and numbers beside it. It passes unless it
    raises; `Stopped` turns its mode to "stopped". A check of mode "stopped" passes by raising `Stopped`.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")

    def mark(function: F) -> F:
        function.conformance_mode = mode  # type: ignore[attr-defined]
        return function

    return mark


def checks_of(namespace: Mapping[str, Any]) -> list[Callable[..., Any]]:
    """The marked functions of a module, in the order in which they stand there."""
    found = [value for value in namespace.values() if inspect.isfunction(value) and hasattr(value, "conformance_mode")]
    return sorted(found, key=lambda function: function.__code__.co_firstlineno)


@dataclass(frozen=True)
class Server:
    """A server that the harness has started, and ends."""

    url: str
    name: str
    """By which the harness knows it."""
    log: str


class Kit:
    """What a check may ask for. Everything it gets is ended by the harness."""

    def __init__(self, ask: Callable[[Mapping[str, Any]], Any], model: str, folder: Path) -> None:
        self._ask = ask
        self.default_model = model
        """Name of the model that is served unless a check asks for another."""
        self.folder = folder
        """Scratch, gone afterwards."""

    def server(
        self,
        kind: ServerKind = "rollout",
        *,
        model: str | None = None,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        number: int = 0,
    ) -> Server:
        """A healthy server in vLLM's developer mode: ours, or stock vLLM. The same question gets the same server as
        long as it lives.

        Servers that were asked for with another model, flags or environment are ended first. Those of the same settings
        stand beside each other: ours and stock vLLM, and of each kind one for each `number`.
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
        """SIGKILL for a server and its processes, as a machine that fails; returns when they are gone."""
        self._ask({"ask": "kill", "name": server.name})

    def restart(self, server: Server) -> Server:
        """The same server anew, on the same port; returns when it is healthy."""
        return Server(**self._ask({"ask": "restart", "name": server.name}))

    def model_path(self, model: str | None = None) -> str:
        """The folder of a model of the catalogue, fetched when it is not there."""
        return self._ask({"ask": "model", "model": model or self.default_model})

    @contextmanager
    def recording(self, server: Server) -> Iterator[Recorder]:
        """A proxy before a server; samples of what comes through the one before ours are kept for the tests."""
        with recording(server.url) as recorder:
            yield recorder
        if server.name.startswith("rollout"):
            self.record(recorder.samples())

    def record(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Requests that the trainer has really sent (`conformance.recording`), for the tests to replay."""
        self._ask({"ask": "record", "requests": list(requests)})


def refusal(call: Callable[[], object]) -> str:
    """The words with which something is refused. Raises: AssertionError when it is not."""
    try:
        answer = call()
    except Exception as error:
        return str(error)
    raise AssertionError(f"it was to be refused, and gave {str(answer)[:200]}")


def assert_raced(reasons: Sequence[str | None], group_size: int, *, stopped: str | None = "abort") -> None:
    """No more siblings ended by themselves than the group has places, and places that these left were filled by
    what was cut; finish reasons tell. `stopped`: the reason of the others."""
    num_valid = sum(reason in ("stop", "completed") for reason in reasons)
    num_cut = reasons.count("length")
    assert num_valid <= group_size <= num_valid + num_cut, reasons
    assert reasons.count(stopped) == len(reasons) - num_valid - num_cut, reasons


def metric(url: str, name: str) -> float:
    """The value of a counter or gauge, of all its rows that begin so."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


class Conversation:
    """One line to the harness, one line back."""

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
    """One check: its row of the result."""
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
    """Run the checks of the module that was started; the harness names them, and reads what they say."""
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
