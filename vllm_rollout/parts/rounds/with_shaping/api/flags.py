"""`vllm-rollout serve --rollout-parallelism auto`: flags, what cannot go with them, and what they set.

Invariant: without --rollout-parallelism auto nothing here has an effect.
"""

from __future__ import annotations

import argparse
import os

from vllm import envs

from vllm_rollout.kernel.api.flags import Flags


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        title="Parallelism",
        description="Change of the tensor-parallel size between rounds of runs (docs/guides/rounds.md).",
    )
    group.add_argument(
        "--rollout-parallelism",
        choices=("fixed", "auto"),
        default="fixed",
        help="auto: restart the engine with another tensor-parallel size when rounds need more or less room for KV "
        "cache. If a round preempts more candidates than the rounds before it, the size is doubled. After four "
        "rounds without a preemption, the size is halved. The first size is --tensor-parallel-size. If "
        "--rollout-profile has several sizes, the first size is the best expected for the first run's rounds. During "
        "a restart requests wait, and what was learned is kept. Weights are read from MODEL again, so send yours "
        "before each round. Default: %(default)s.",
    )
    group.add_argument(
        "--rollout-parallelism-devices",
        metavar="N",
        type=int,
        help="With --rollout-parallelism auto: number of devices of this machine that the engine may use. It is the "
        "largest tensor-parallel size.",
    )


def refuse(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with status 2 and a remedy if the engine cannot be rebuilt with these flags."""
    if args.rollout_parallelism == "fixed":
        if args.rollout_parallelism_devices is not None:
            parser.error("--rollout-parallelism-devices bounds what --rollout-parallelism auto may do; add that flag.")
        return
    devices = args.rollout_parallelism_devices
    if devices is None or devices < 2:
        parser.error(
            f"--rollout-parallelism auto needs --rollout-parallelism-devices of at least 2, got {devices}: "
            "with one device there is nothing to choose."
        )
    balanced = args.data_parallel_hybrid_lb or args.data_parallel_external_lb or args.data_parallel_rank is not None
    one_server = "Run one server per engine."
    own_engines = "Only engines that this server starts by itself can be rebuilt. Leave it out."
    for flag, is_set, remedy in (
        ("--api-server-count", (args.api_server_count or 1) > 1, "Only one API process can wait for an engine: say 1."),
        ("--data-parallel-size", args.data_parallel_size > 1, f"The ranks would have to stop together. {one_server}"),
        ("an external or hybrid load balancer", balanced, f"It would send to an engine that is away. {one_server}"),
        ("--headless", args.headless, "It has no rounds."),
        ("--nnodes", args.nnodes > 1, "A tensor-parallel group stays within one server."),
        ("--pipeline-parallel-size", args.pipeline_parallel_size > 1, "Say 1."),
        ("--enable-lora", args.enable_lora, "Adapters loaded while it ran would be gone. Leave it out."),
        ("--kv-transfer-config", args.kv_transfer_config is not None, "Others hold addresses of the engine."),
        ("--data-parallel-backend", args.data_parallel_backend != "mp", own_engines),
        ("--distributed-executor-backend", args.distributed_executor_backend not in (None, "mp", "uni"), own_engines),
        (
            "--max-model-len",
            args.max_model_len is not None and args.max_model_len < 1,
            "An automatic length would change with the size; say how many tokens.",
        ),
    ):
        if is_set:
            parser.error(f"{flag} does not go with --rollout-parallelism auto. {remedy}")
    if envs.VLLM_USE_RUST_FRONTEND:
        parser.error(
            "--rollout-parallelism auto does not go with VLLM_USE_RUST_FRONTEND=1. Its requests would not wait while "
            "an engine is replaced."
        )
    if not 1 <= args.tensor_parallel_size <= devices:
        parser.error(
            f"--tensor-parallel-size {args.tensor_parallel_size} is where --rollout-parallelism auto begins: at most "
            f"--rollout-parallelism-devices ({devices})."
        )


def switch_on(args: argparse.Namespace) -> None:
    if args.rollout_parallelism == "auto":
        args.separate_processes = True
        # Forking would later copy a server that has threads, and the copy may wait for ever for one of them.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


FLAGS = Flags(add_flags, refuse, switch_on)
