"""The command `vllm-rollout doctor`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from vllm_rollout.doctor.checks import DEFAULT_PORT, Finding, Level, examine

MARKS: dict[Level, str] = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "problem": "[bold red]problem[/]"}


def doctor(
    port: Annotated[int, typer.Option(help="The port that a server is to have.")] = DEFAULT_PORT,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array instead of a table.")] = False,
) -> None:
    """Say what stands in the way of a server on this machine, and the command that mends it.

    A *problem* keeps the server from starting; the command then ends with status 1. A *warning* makes it slower, or
    leaves a part of it off. Nothing is changed.
    """
    findings = examine(port)
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        show(findings)
    sys.exit(any(finding.level == "problem" for finding in findings))


def show(findings: list[Finding]) -> None:
    """A line for each finding."""
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
