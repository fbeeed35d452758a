"""Runs the pieces that have not passed yet and keeps each one's result: `python -m benchmarks.gpu_check`.

Exit status: 0 when all chosen pieces passed, 1 when one did not, 2 without a GPU. `--device cpu` rehearses every
piece's path in small on a machine without one; what it says is no measurement and goes to another file.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.common import git_commit, record_of_run, write_json
from benchmarks.gpu_check.pieces import LIMIT_S, PIECES

OUTPUT = Path("benchmarks/results/gpu_check.json")
REHEARSAL_OUTPUT = Path("gpu_check_rehearsal.json")
RESULT = "RESULT "
"""Before a piece's result, on a line of its output."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description="Check on a GPU what only a GPU can show, and write JSON."
    )
    parser.add_argument("--pieces", help=f"only these, by comma: {', '.join(PIECES)}")
    parser.add_argument("--again", action="store_true", help="also those that have passed already")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses, in small")
    parser.add_argument("--output", type=Path, help=f"default: {OUTPUT}; for a rehearsal {REHEARSAL_OUTPUT}")
    parser.add_argument("--list", action="store_true", help="say what the pieces hold, and end")
    chosen = parser.parse_args(arguments)
    chosen.names = list(PIECES) if chosen.pieces is None else chosen.pieces.split(",")
    if unknown := [name for name in chosen.names if name not in PIECES]:
        parser.error(f"--pieces must be of {', '.join(PIECES)}, got {', '.join(unknown)}")
    chosen.output = chosen.output or (OUTPUT if chosen.device == "cuda" else REHEARSAL_OUTPUT)
    return chosen


def gpu_is_missing() -> str | None:
    """Why there is no GPU to check on."""
    import torch

    if torch.cuda.is_available():
        return None
    return f"torch {torch.__version__} sees no CUDA device"


def run_piece(name: str, device: str, log: Path) -> dict[str, Any]:
    """A piece in a process group of its own; its result, or how it ended."""
    started = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu_check.piece", name, device]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True, env=os.environ
        )
        try:
            printed, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            printed = ""
        finally:
            stop(process)
    seconds = round(time.monotonic() - started, 1)
    lines = [line for line in printed.splitlines() if line.startswith(RESULT)]
    if lines:
        return {**json.loads(lines[-1].removeprefix(RESULT)), "seconds": seconds}
    reason = f"no result within {LIMIT_S} s" if seconds >= LIMIT_S else f"exit status {process.returncode}"
    return {"status": "error", "error": reason, "log": log.read_text()[-4000:], "seconds": seconds}


def stop(process: subprocess.Popen[str]) -> None:
    """End what is left of a piece: its engines are of its process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(arguments: list[str] | None = None) -> int:
    chosen = parse_arguments(arguments)
    if chosen.list:
        for name, piece in PIECES.items():
            print(f"{name:18} {piece.holds}")
        return 0
    if chosen.device == "cuda" and (reason := gpu_is_missing()) is not None:
        print(f"gpu-check needs a GPU: {reason}. `--device cpu` rehearses it without one.", file=sys.stderr)
        return 2
    results: dict[str, Any] = json.loads(chosen.output.read_text())["pieces"] if chosen.output.exists() else {}
    record = record_of_run(seed=0, workload={name: piece.holds for name, piece in PIECES.items()})
    for name in chosen.names:
        before = results.get(name)
        if before is not None and before["status"] == "passed" and not chosen.again:
            print(f"{name}: passed before ({before['git_commit']}); --again repeats it", flush=True)
            continue
        print(f"{name}: {PIECES[name].holds} …", flush=True)
        log = chosen.output.with_name(f"{chosen.output.stem}_{name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        results[name] = {**run_piece(name, chosen.device, log), "git_commit": git_commit()}
        write_json(chosen.output, {**record, "device": chosen.device, "pieces": results})
        show(name, results[name])
        if results[name]["status"] == "passed":
            log.unlink()
    return 0 if all(results[name]["status"] == "passed" for name in chosen.names) else 1


def show(name: str, result: dict[str, Any]) -> None:
    print(f"{name}: {result['status']} in {result['seconds']} s", flush=True)
    for what, passed, value, wanted in result.get("checks", ()):
        if not passed:
            print(f"  not so: {what}: {value}, wanted {wanted}", flush=True)
    if "error" in result:
        print(f"  {result['error']}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
