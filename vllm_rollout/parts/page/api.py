"""Flags of `vllm-rollout serve` for the page and for recordings."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_rollout.config import RECORD_MAX_MIB
from vllm_rollout.kernel.api.flags import Flags
from vllm_rollout.parts.page.recording.file import TraceFile


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        title="Page", description="The page that shows rollouts, and recordings of them (docs/guides/watching.md)."
    )
    group.add_argument(
        "--rollout-record",
        metavar="FILE",
        help="Append one JSON line per rollout, and one per group of sessions, to this file, for "
        "`vllm-rollout simulate`. A line has lengths, ends and scores of candidates, but no token and no text. "
        "Default: off.",
    )
    group.add_argument(
        "--rollout-record-max-mib",
        type=_mib,
        default=RECORD_MAX_MIB,
        metavar="MIB",
        help="Upper bound for the file of --rollout-record together with its older piece, FILE.1. At half of this "
        "size the file becomes FILE.1. 0: no bound. Default: %(default)s.",
    )
    group.add_argument(
        "--enable-rollout-page",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Serve the page /rollouts, which shows running rollouts, and its feed. If --api-key is set, the feed "
        "needs that key. Default: on.",
    )


def _mib(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be a whole number of MiB, 0 for no bound, got {text!r}")
    return int(text)


def refuse(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with status 2 and a remedy if the recording cannot be written."""
    if args.rollout_record is None:
        return
    try:
        TraceFile(Path(args.rollout_record))
    except OSError as error:
        parser.error(
            f"--rollout-record {args.rollout_record}: {error.strerror}. Name a recording, or a new file that can be "
            "written."
        )


FLAGS = Flags(add_flags, refuse)
