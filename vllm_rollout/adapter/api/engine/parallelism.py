"""`vllm-rollout serve --parallelism auto`: flags, what cannot go with them, and what they set.

Invariant: without --parallelism auto nothing here has an effect.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from vllm.logger import init_logger

from vllm_rollout.adapter.api.client.client import RolloutAsyncLLM
from vllm_rollout.adapter.api.engine.engine import VLLMEngine
from vllm_rollout.adapter.api.engine.rebuilding import Resizer
from vllm_rollout.emulation.settings import Settings
from vllm_rollout.group.ranks.forecast import EngineSize
from vllm_rollout.group.ranks.planner import ParallelismPlanner, sizes_of
from vllm_rollout.profiling.profile_file import Profile
from vllm_rollout.server.runs.parallelism import Parallelism

logger = init_logger("vllm.vllm_rollout")


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        title="Parallelism",
        description="How many devices a model is spread over, between rounds of runs (docs/rounds.md).",
    )
    group.add_argument(
        "--parallelism",
        choices=("fixed", "auto"),
        default="fixed",
        help="auto: a round that preempts more candidates than the rounds before it makes the engine start anew with "
        "twice the tensor-parallel size, so that there is more room for KV cache; four rounds without a preemption "
        "halve it. It begins at --tensor-parallel-size, and with --rollout-profile of several sizes at the one that is "
        "expected to be the best for the first run's rounds. Requests wait meanwhile, what was learned is kept; "
        "weights are read from MODEL again, so send yours before each round. Default: %(default)s.",
    )
    group.add_argument(
        "--parallelism-devices",
        metavar="N",
        type=int,
        help="With --parallelism auto: how many devices of this machine the engine may use, the largest "
        "tensor-parallel size.",
    )


def refuse(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with status 2 and a remedy if the engine cannot be rebuilt with these flags."""
    if args.parallelism == "fixed":
        if args.parallelism_devices is not None:
            parser.error("--parallelism-devices bounds what --parallelism auto may do; add that flag.")
        return
    devices = args.parallelism_devices
    if devices is None or devices < 2:
        parser.error(
            f"--parallelism auto needs --parallelism-devices of at least 2, got {devices}: with one device there is "
            "nothing to choose."
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
            parser.error(f"{flag} does not go with --parallelism auto. {remedy}")
    if not 1 <= args.tensor_parallel_size <= devices:
        parser.error(
            f"--tensor-parallel-size {args.tensor_parallel_size} is where --parallelism auto begins: at most "
            f"--parallelism-devices ({devices})."
        )


def switch_on(args: argparse.Namespace) -> None:
    if args.parallelism == "auto":
        # A forked copy of a server with threads may wait for ever for one of them.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


def parallelism_of(args: argparse.Namespace, client: RolloutAsyncLLM, engine: VLLMEngine) -> Parallelism | None:
    """The planner and resizer of the engine's size. None without --parallelism auto.

    Raises: RuntimeError, which ends the start, if the model or the profile leaves nothing to choose.
    """
    if args.parallelism == "fixed":
        return None
    parallel = client.vllm_config.parallel_config
    size = parallel.tensor_parallel_size
    num_heads = client.model_config.get_num_attention_heads(parallel) * size
    sizes = sizes_of(args.parallelism_devices, num_heads)
    said = f"{args.parallelism_devices} devices, {num_heads} attention heads"
    profiled: dict[int, EngineSize] = {}
    if args.rollout_profile is not None:
        profile = Profile.read(args.rollout_profile)
        measured = profile.tensor_parallel_sizes
        sizes = tuple(allowed for allowed in sizes if allowed in measured)
        profiled = {allowed: engine_size(profile, allowed, client.max_candidates) for allowed in sizes}
        said += f", sizes in {args.rollout_profile}: {', '.join(map(str, measured))}"
    if args.emulate is not None:
        emulated = Settings.read(args.emulate).engine_sizes
        sizes = tuple(allowed for allowed in sizes if allowed in emulated)
        said += f", sizes in {args.emulate}: {', '.join(map(str, emulated))}"
    if len(sizes) < 2 or size not in sizes:
        raise RuntimeError(
            f"--parallelism auto: tensor-parallel sizes {list(sizes)} are possible here ({said}), and it begins at "
            f"{size}. Say --tensor-parallel-size and --parallelism-devices such that there are two, or leave it out."
        )
    logger.info(
        "vllm_rollout: --parallelism auto among tensor-parallel sizes %s. It begins at %d, %s",
        ", ".join(map(str, sizes)),
        size,
        "until the first run: then the profile says which size is the best for its rounds"
        if profiled
        else "as --tensor-parallel-size says; a --rollout-profile of several sizes would say which is the best",
    )
    parallelism = Parallelism(
        Resizer(client, engine, args),
        ParallelismPlanner(sizes, size),
        client.rollout_metrics,
        profiled,
        lambda line: logger.info("vllm_rollout: %s", line),
    )
    client.before_weights = parallelism.before_weights
    return parallelism


def engine_size(profile: Profile, size: int, max_num_seqs: int) -> EngineSize:
    """Costs and KV capacity of a tensor-parallel size that the profile has."""
    engine = profile.engine(size)
    assert engine is not None, "a profile has an engine for every cost"
    return EngineSize(replace(profile.cost(size), max_num_seqs=max_num_seqs), engine.kv_capacity_tokens)
