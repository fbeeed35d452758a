"""`vllm-rollout serve` on a CPU: settings for embedded models, advice for other ones.

Invariant: flags and variables set by the user are not changed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_rollout.adapter.names import CPU_EXECUTOR_CLS
from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.config import CPU_BLOCK_SIZE_TOKENS
from vllm_rollout.on_cpu import BINDING, GIB, NO_COMPILER, advice, compiler, embedded_settings, this_cpu

logger = init_logger("vllm.vllm_rollout")


def runs_in_core(args: argparse.Namespace) -> bool:
    """True if the engine core runs the worker itself: there is one worker, and the user has not chosen another way."""
    return (
        current_platform.is_cpu()
        and args.distributed_executor_backend is None
        and args.tensor_parallel_size * args.pipeline_parallel_size == 1
        and args.data_parallel_backend == "mp"
        and not args.separate_processes
        and os.environ.get(BINDING, "nobind") == "nobind"
    )


def switch_on(
    args: argparse.Namespace, arguments: Sequence[str], parser: argparse.ArgumentParser, is_embedded: bool
) -> None:
    """Set the flags for a CPU. `is_embedded`: the model is in the catalogue.

    Raises: SystemExit if an embedded model's server has too little memory.
    """
    if not current_platform.is_cpu():
        return
    if args.block_size is None:
        args.block_size = CPU_BLOCK_SIZE_TOKENS
    if not ServeOptions.of(args).has_model:
        return
    if runs_in_core(args):
        args.distributed_executor_backend = CPU_EXECUTOR_CLS
        ServeOptions.change(args, num_local_ranks=args.data_parallel_size_local or args.data_parallel_size)
    if compiler() is None and "--no-enforce-eager" not in arguments:
        args.enforce_eager = True
        logger.warning("vllm_rollout: %s", NO_COMPILER)
    cpu = this_cpu()
    if not is_embedded:
        if said := advice(cpu, args.dtype, args.enforce_eager):
            logger.warning("vllm_rollout: %s", said)
        return
    try:
        settings = embedded_settings(cpu, os.environ)
    except RuntimeError as error:
        sys.exit(f"vllm-rollout serve: {error}")
    if "--no-enforce-eager" in arguments:
        del settings["enforce_eager"]
    if args.gpu_memory_utilization != parser.get_default("gpu_memory_utilization"):
        settings.pop("kv_cache_memory_bytes", None)
    chosen = {name: value for name, value in settings.items() if getattr(args, name) == parser.get_default(name)}
    vars(args).update(chosen)
    logger.info(
        "vllm_rollout: %s, %s, KV cache %s",
        cpu.summary,
        "compiled" if not args.enforce_eager else "not compiled",
        f"{args.kv_cache_memory_bytes / GIB:g} GiB" if args.kv_cache_memory_bytes else "as the environment says",
    )
