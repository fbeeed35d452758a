"""The command `vllm-rollout export`.

Invariant: importing it is light.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vllm_rollout.config import REWARD_THRESHOLD


class Target(StrEnum):
    tensorboard = "tensorboard"
    trackio = "trackio"


def export(
    file: Annotated[Path, typer.Argument(help="File that `serve --rollout-record FILE` wrote, or is writing.")],
    to: Annotated[Target, typer.Option(help="Program that shows the curves.")],
    output: Annotated[
        Path | None, typer.Option(help="TensorBoard's log directory of this recording. Default: runs/NAME.")
    ] = None,
    project: Annotated[str | None, typer.Option(help="Project of trackio. Default: rollouts.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run. Default: the file's name without its suffix.")
    ] = None,
    threshold: Annotated[float, typer.Option(help="A reward above this value is a success.")] = REWARD_THRESHOLD,
) -> None:
    """Draw recorded rollouts in TensorBoard or trackio, with one step per rollout or per round.

    ```
    vllm-rollout export trace.jsonl --to tensorboard && tensorboard --logdir runs
    vllm-rollout export trace.jsonl --to trackio && trackio show
    ```

    Curves: seconds, tokens, savings, lengths, rewards, ends, moves (docs/guides/watching.md). When the file has grown,
    run the command again: it replaces its earlier output.
    """
    from vllm_rollout.parts.page.watching.export import (
        SESSIONS,
        check_installed,
        read_curves,
        to_tensorboard,
        to_trackio,
    )
    from vllm_rollout.parts.shaping.rules.trace import told_reasons

    is_trackio = to is Target.trackio
    if (
        unused := "--output" if is_trackio and output else "--project" if project and not is_trackio else None
    ) is not None:
        print(f"vllm-rollout export: {unused} is not for --to {to}.", file=sys.stderr)
        sys.exit(2)
    name = name or file.stem
    try:
        check_installed(to)
        curves = read_curves(file, threshold)
        if is_trackio:
            look = to_trackio(curves, project or "rollouts", name)
        else:
            look = to_tensorboard(curves, output or Path("runs") / name)
    except (ValueError, OSError) as error:
        sys.exit(f"vllm-rollout export: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if curves.broken:
        print(f"vllm-rollout export: {told_reasons(tuple(curves.broken))}.", file=sys.stderr)
    num_groups = len(curves.by_run.get(SESSIONS, ()))
    num = sum(map(len, curves.by_run.values())) - num_groups
    told = [f"{num} rollout{'s' * (num != 1)}"] if num or not num_groups else []
    told += [f"{num_groups} group{'s' * (num_groups != 1)} of sessions"] if num_groups else []
    print(f"{' and '.join(told)} written. Look at them with: {look}")
