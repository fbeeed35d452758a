"""The `vllm-rollout emulation-report` command. Invariant: importing it is light."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def emulation_report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `serve --emulate-log DIR` wrote into.")],
) -> None:
    """Say of an emulated server's steps what was the device's time and what was this host's."""
    from vllm_rollout.emulation.report import report
    from vllm_rollout.emulation.step_log import read_steps

    try:
        report(read_steps(folder))
    except (ValueError, OSError) as error:
        sys.exit(f"vllm-rollout emulation-report: {error}")
