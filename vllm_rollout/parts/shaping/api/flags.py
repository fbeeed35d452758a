"""The flag of `vllm-rollout serve` that says what steps cost."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_rollout.kernel.api.flags import Flags
from vllm_rollout.parts.shaping.profile_file import Profile


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        title="Shaping", description="Number and order of candidates by what steps cost (docs/guides/shaping.md)."
    )
    group.add_argument(
        "--rollout-profile",
        metavar="FILE",
        help="Step times of this machine, in a file made by `vllm-rollout profile`. Redundancy auto weighs them, and "
        "live step times are compared with them. Default: redundancy auto runs 1.5 times as many candidates as "
        "wanted.",
    )


def refuse(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with status 2 and a remedy if the file is no profile."""
    if args.rollout_profile is None:
        return
    try:
        Profile.read(Path(args.rollout_profile))
    except ValueError as error:
        parser.error(f"--rollout-profile: {error}")


FLAGS = Flags(add_flags, refuse)
