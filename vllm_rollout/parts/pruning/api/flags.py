"""Flags of `vllm-rollout serve` for pruning."""

from __future__ import annotations

import argparse

from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.config import DEFAULT_AUDIT_RATIO
from vllm_rollout.kernel.api.flags import Flags, mebibytes, number_in, positive
from vllm_rollout.parts.pruning.options import PruningOptions

DEFAULTS = PruningOptions()


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        title="Pruning",
        description="Stops candidates by scores that a quality head learns from rewards (docs/guides/pruning.md).",
    )
    group.add_argument(
        "--rollout-audit-ratio",
        metavar="SHARE",
        type=number_in(0, 1),
        default=DEFAULT_AUDIT_RATIO,
        help="Share of groups in which no candidate is stopped, so that learned estimates stay true. It applies to "
        "pruning and to redundancy auto. A request may set its own audit_ratio. Default: %(default)s.",
    )
    group.add_argument(
        "--rollout-train-budget-ms",
        metavar="MS",
        type=positive,
        default=DEFAULTS.train_budget_s * 1e3,
        help="Train a quality head for at most this many milliseconds between two engine steps, plus the rest of one "
        "optimizer step. Default: %(default)s.",
    )
    group.add_argument(
        "--rollout-feature-ring-mib",
        metavar="MIB",
        type=mebibytes,
        default=DEFAULTS.feature_ring_bytes / 2**20,
        help="Host memory for hidden states of scored candidates that wait for their rewards. Default: %(default)s.",
    )


def switch_on(args: argparse.Namespace) -> None:
    ServeOptions.change(args, audit_ratio=args.rollout_audit_ratio)
    PruningOptions.change(
        args,
        train_budget_s=args.rollout_train_budget_ms / 1e3,
        feature_ring_bytes=int(args.rollout_feature_ring_mib * 2**20),
    )


FLAGS = Flags(add_flags, switch_on=switch_on)
