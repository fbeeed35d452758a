"""Flags of `vllm-rollout serve` for drafts."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_rollout.kernel.api.flags import Flags, mebibytes
from vllm_rollout.parts.drafts.options import SPECULATIVE_CONFIG, DraftsOptions


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        title="Drafts", description="Earlier tokens as drafts, which vLLM verifies (docs/guides/drafts.md)."
    )
    group.add_argument(
        "--enable-rollout-drafts",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Use tokens of a candidate's siblings, and of earlier answers to its prompt, as drafts. vLLM verifies "
        "several drafts at a time where that is faster. Drafts change no probability. They need model runner V1, and "
        "make vLLM schedule synchronously. Default: off.",
    )
    group.add_argument(
        "--rollout-draft-memory-mib",
        metavar="MIB",
        type=mebibytes,
        default=DraftsOptions().memory_bytes / 2**20,
        help="Host memory for answers that serve as drafts. If the memory is full, answers that were not used for "
        "longest are removed first. Default: %(default)s.",
    )


def refuse(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with status 2 and a remedy for settings of vLLM that leave no place for drafts."""
    if not args.enable_rollout_drafts:
        return
    if args.speculative_config is not None:
        parser.error(
            f"--enable-rollout-drafts sets --speculative-config, which is {args.speculative_config!r} here: vLLM has "
            "one source of drafts. Leave out one of them."
        )
    if args.async_scheduling is True:
        parser.error(
            "--async-scheduling does not go with --enable-rollout-drafts. With drafts vLLM schedules synchronously. "
            "Leave out one of them."
        )


def switch_on(args: argparse.Namespace) -> None:
    if args.enable_rollout_drafts:
        args.speculative_config = dict(SPECULATIVE_CONFIG)
    file = None if args.rollout_state is None else str(Path(args.rollout_state).resolve() / "drafts")
    DraftsOptions.change(args, memory_bytes=int(args.rollout_draft_memory_mib * 2**20), file=file)


FLAGS = Flags(add_flags, refuse, switch_on)
