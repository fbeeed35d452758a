"""Flags of `vllm-rollout serve` for rewards, and for a judge."""

from __future__ import annotations

import argparse

from vllm_rollout.kernel.api.flags import Flags
from vllm_rollout.parts.rewards.api import judge, rewards


def add_flags(parser: argparse.ArgumentParser) -> None:
    rewards.add_flags(parser)
    judge.add_flags(parser)


FLAGS = Flags(add_flags, judge.refuse, judge.switch_on, judge.beside)
