"""Flags of `vllm-rollout serve` for rewards, and for a judge."""

from __future__ import annotations

import argparse

from vllm_rollout.kernel.api.flags import Flags
from vllm_rollout.parts.rewards.api import judge, rewards


def add_flags(parser: argparse.ArgumentParser) -> None:
    rewards.add_flags(parser)
    judge.add_flags(parser)


def refuse(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    judge.refuse(args, parser)
    rewards.refuse(args, parser)


FLAGS = Flags(add_flags, refuse, judge.switch_on, judge.beside)
