"""Grading of trajectories beside this API process: the flags --rollout-reward*."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping

from vllm.logger import init_logger

from vllm_rollout.parts.rewards.grading import Grader
from vllm_rollout.parts.rewards.grading.functions import RewardFunction
from vllm_rollout.parts.rewards.grading.grader import BUILT_IN
from vllm_rollout.parts.rewards.grading.sandbox import SandboxError
from vllm_rollout.parts.rewards.rules.time_limits import LimitTerms

logger = init_logger("vllm.vllm_rollout")

ALWAYS = {name: name for name in BUILT_IN if name != "code"}
"""Rewards that are served without a flag. `code` runs programs of the policy, so it needs a flag."""
DEFAULT_LIMITS = f"{LimitTerms().shortest_s:g},{LimitTerms().longest_s:g}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        title="Rewards",
        description="Rewards grade trajectories as they end. A request names its reward. Built in: "
        f"{', '.join(ALWAYS)}.",
    )
    group.add_argument(
        "--rollout-reward",
        metavar="NAME=WHAT",
        type=_reward,
        action="append",
        default=[],
        help="A reward that requests may name. WHAT is a function, package.module:function (TRL's, verl's or f(text, "
        "data)), or the URL of a reward server. WHAT may also be a judge's .toml file, or a built-in reward under "
        "another name. `code` alone, or NAME=code, runs programs of the policy in a sandbox. May be repeated.",
    )
    group.add_argument(
        "--rollout-reward-processes",
        metavar="N",
        type=_count,
        help="Number of trajectories that are graded at once, each in a process of its own. Default: the number of "
        "cores, at least four, shared out among the API processes.",
    )
    group.add_argument(
        "--rollout-reward-limits",
        metavar="SHORTEST,LONGEST",
        type=_limits,
        default=DEFAULT_LIMITS,
        help="Bounds, in seconds, of the time limit that the server learns for each test case. Default: %(default)s.",
    )


def refuse(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with status 2 and a remedy if a reward does not work here. The engine has not loaded its model yet."""
    has_judge = args.rollout_judge is not None  # a judge's file may need it, and it does not run yet
    rewards = {name: what for name, what in args.rollout_reward if not (has_judge and what.endswith(".toml"))}
    if not rewards or args.headless:
        return
    try:
        asyncio.run(_try_out(rewards))
    except (ValueError, SandboxError) as error:
        parser.error(f"--rollout-reward: {error}")


async def _try_out(rewards: Mapping[str, str]) -> None:
    async with Grader(rewards) as grader:
        await grader.check()


async def begin_grading(
    rewards: Mapping[str, RewardFunction | str],
    num_processes: int | None = None,
    limits: LimitTerms | None = None,
) -> Grader:
    """Start grading, which ends with this process. Raises: RuntimeError, which ends the start, for a reward that does
    not work here.
    """
    try:
        # The queue needs no bound: rollouts that would overload it are refused before they begin.
        grader = Grader({**ALWAYS, **rewards}, num_processes=num_processes, limits=limits, max_waiting=sys.maxsize)
        await grader.__aenter__()
        if rewards:
            await grader.check()
    except (ValueError, SandboxError) as error:
        raise RuntimeError(f"--rollout-reward: {error}") from error
    if rewards:
        logger.info("vllm_rollout: rewards %s", ", ".join(grader.names))
    return grader


def _reward(text: str) -> tuple[str, str]:
    name, equals, what = text.partition("=")
    if not name or (equals and not what):
        raise argparse.ArgumentTypeError(f"must be NAME=WHAT, or the name of a built-in reward, got {text!r}")
    return name, what or name


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _limits(text: str) -> LimitTerms:
    try:
        shortest, longest = map(float, text.split(","))
        return LimitTerms(shortest_s=shortest, longest_s=longest)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be two numbers of seconds such as {DEFAULT_LIMITS} ({error})"
        ) from error
