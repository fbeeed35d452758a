"""Flags of `vllm-rollout serve` for groups that move between ranks."""

from __future__ import annotations

import argparse

from vllm.distributed.nixl_utils import is_nixl_available

from vllm_rollout.extras import install_command
from vllm_rollout.kernel.api.flags import Flags
from vllm_rollout.parts.moving.options import MovingOptions


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        title="Moving", description="Groups that move between data-parallel ranks (docs/guides/deploy.md)."
    )
    group.add_argument(
        "--enable-rollout-move-kv",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="If possible, a group that moves to another rank of this host takes its KV cache along. Otherwise the "
        "other rank computes the KV cache again. Default: on.",
    )
    group.add_argument(
        "--enable-rollout-nixl",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Groups that move to ranks on other hosts take their KV cache along, too, by the package nixl. Default: "
        "off.",
    )


def refuse(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with status 2 and a remedy if KV cache cannot move as these flags say."""
    if args.enable_rollout_nixl and not args.enable_rollout_move_kv:
        parser.error("--enable-rollout-nixl moves KV cache between hosts. Leave out --no-enable-rollout-move-kv.")
    if args.enable_rollout_nixl and not is_nixl_available():
        parser.error(f"--enable-rollout-nixl needs NIXL on every host: {install_command('nixl')}.")


def switch_on(args: argparse.Namespace) -> None:
    MovingOptions.change(args, moves_kv=args.enable_rollout_move_kv, moves_kv_by_nixl=args.enable_rollout_nixl)


FLAGS = Flags(add_flags, refuse, switch_on)
