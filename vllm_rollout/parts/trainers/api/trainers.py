"""`vllm-rollout serve --rollout-compat TRAINER`: endpoints that a trainer needs beside vLLM's own.

Invariant: without --rollout-compat nothing here has an effect. With it vLLM's own endpoints answer as before. Routes
that change something need the server's keys.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from fastapi import FastAPI
from vllm import envs

from vllm_rollout import old_names
from vllm_rollout.kernel.api.flags import Flags
from vllm_rollout.parts.trainers.api import areal, prime_rl, skyrl

COMPAT: Mapping[str, Callable[[FastAPI], None]] = {
    "areal": areal.attach,
    "prime-rl": prime_rl.attach,
    "skyrl": skyrl.attach,
    "trl": prime_rl.attach_token_names,
}
"""Function that adds a trainer's routes to vLLM's app, by trainer."""
NEEDS_DEV_MODE = {
    "prime-rl": "/pause and /resume",
    "skyrl": "/pause, /resume and /collective_rpc",
}
"""Endpoints that a trainer needs and that vLLM has only in its development mode."""


LOADS_ADAPTERS = ("prime-rl", "skyrl")
"""Trainers that load adapters while the server runs. An API process knows only those that it has loaded itself."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        title="Trainers", description="Endpoints that trainers call beside vLLM's own (docs/recipes)."
    )
    group.add_argument(
        "--rollout-compat",
        type=old_names.trainer,
        choices=sorted(COMPAT),
        action="append",
        default=[],
        help="Add the endpoints that this trainer calls beside vLLM's own. May be repeated. Default: none.",
    )


def refuse(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with status 2 and a remedy if half of a trainer's endpoints would be missing, or answer by chance."""
    for trainer in args.rollout_compat:
        if (needed := NEEDS_DEV_MODE.get(trainer)) is not None and not envs.VLLM_SERVER_DEV_MODE:
            parser.error(
                f"--rollout-compat {trainer} needs {needed} too, which vLLM has with VLLM_SERVER_DEV_MODE=1. Set it."
            )
        if trainer in LOADS_ADAPTERS and args.enable_lora and (args.api_server_count or 1) > 1:
            parser.error(
                f"--api-server-count {args.api_server_count} does not go with --rollout-compat {trainer} and "
                "--enable-lora: an adapter that one process loads is unknown to the others. Say 1, or leave it out."
            )


def switch_on(args: argparse.Namespace) -> None:
    """Let one API process serve adapters that trainers load. Unset, vLLM would start one per data-parallel rank."""
    loads = args.enable_lora and not {*LOADS_ADAPTERS}.isdisjoint(args.rollout_compat)
    if loads and args.api_server_count is None and not args.headless:
        args.api_server_count = 1


def attach_compat(app: FastAPI) -> None:
    """Add the routes of the trainers in `--rollout-compat` to the app. Plain `vllm serve` has no such flag."""
    for trainer in vars(app.state.args).get("rollout_compat", ()):
        COMPAT[trainer](app)


FLAGS = Flags(add_flags, refuse, switch_on)
