"""The `vllm-rollout emulation-report` command. Invariant: importing it is light."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_rollout.parts.emulation.step_log import LoggedSteps, Summary, read_steps

if TYPE_CHECKING:
    from rich.console import Console

EXPLANATION = (
    "Busy: steps were computed. Idle: there was work, but the host was late with the step. Time without work is "
    "neither. Host per step: CPU time of the engine core's thread (scheduling, outputs, worker). Times are wall "
    "times of this host. At a speed other than 1 the device's times are stretched or shortened, the host's are not."
)


def report(logs: Sequence[LoggedSteps], console: Console | None = None) -> None:
    """Print a table of steps, the device's time beside the host's."""
    from rich.console import Console
    from rich.table import Table

    console = console or Console()
    table = Table("rank", title="Steps of an emulated device")
    for log in logs:
        table.add_column(str(log.rank), justify="right")
    columns = [_cells(log.speed, Summary.of(log.steps)) for log in logs]
    for name in columns[0]:
        table.add_row(name, *(cells[name] for cells in columns))
    console.print(table)
    console.print(EXPLANATION, highlight=False)


def _cells(speed: float, summary: Summary) -> dict[str, str]:
    return {
        "speed": f"{speed:g}",
        "steps": f"{summary.num_steps:,}",
        "sampled tokens": f"{summary.num_sampled:,}",
        "prefilled tokens": f"{summary.prefilled_tokens:,}",
        "drafts": f"{summary.num_drafts:,}",
        "tokens of a request in a step, mean": f"{summary.num_sampled / max(1, summary.num_rows):.2f}",
        "requests in a step, mean": f"{summary.num_rows / max(1, summary.num_steps):,.1f}",
        "requests in a step, most": f"{summary.peak_requests:,}",
        "device busy, s": f"{summary.busy_s:,.2f}",
        "device idle, s": f"{summary.idle_s:,.2f}",
        "busy": f"{summary.busy:.1%}",
        "device per step, ms": f"{summary.device_ms:.2f}",
        "host per step, ms": f"{summary.host_ms:.2f}",
    }


def register(app: typer.Typer) -> None:
    """Add the command to the `vllm-rollout` command."""
    app.command("emulation-report")(emulation_report)


def emulation_report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder that `serve --rollout-emulate-log DIR` wrote into.")
    ],
) -> None:
    """Print the steps of an emulated server: the emulated device's time beside this host's time."""
    try:
        report(read_steps(folder))
    except (ValueError, OSError) as error:
        sys.exit(f"vllm-rollout emulation-report: {error}")


def needs_no_device(arguments: Sequence[str]) -> bool:
    """Face `platform`: True for a server whose device is emulated."""
    return any(argument.partition("=")[0].replace("_", "-") == "--rollout-emulate" for argument in arguments)
