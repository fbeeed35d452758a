"""`vllm-rollout serve --rollout-parallelism auto`: flags, what cannot go with them, and what they set.

Invariant: without --rollout-parallelism auto nothing here has an effect.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from vllm.logger import init_logger

from vllm_rollout.kernel.api.client import RolloutAsyncLLM
from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.kernel.parts import faces
from vllm_rollout.parts.moving.api.rebuilding import Resizer
from vllm_rollout.parts.moving.rules.forecast import EngineSize
from vllm_rollout.parts.moving.rules.planner import ParallelismPlanner, sizes_of
from vllm_rollout.parts.rounds.http.parallelism import Parallelism
from vllm_rollout.parts.shaping.profile_file import Profile

logger = init_logger("vllm.vllm_rollout")


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
    if not 1 <= args.tensor_parallel_size <= devices:
        parser.error(
            f"--tensor-parallel-size {args.tensor_parallel_size} is where --rollout-parallelism auto begins: at most "
            f"--rollout-parallelism-devices ({devices})."
        )


def switch_on(args: argparse.Namespace) -> None:
    if args.rollout_parallelism == "auto":
        # A copy of a server that has threads, which forking would make later on, may wait for ever for one of them.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


def parallelism_of(args: argparse.Namespace, client: RolloutAsyncLLM, engine: VLLMEngine) -> Parallelism | None:
    """The planner and resizer of the engine's size. None without --rollout-parallelism auto.

    Raises: RuntimeError, which ends the start, if the model or the profile leaves nothing to choose.
    """
    if args.rollout_parallelism == "fixed":
        return None
    parallel = client.vllm_config.parallel_config
    size = parallel.tensor_parallel_size
    num_heads = client.model_config.get_num_attention_heads(parallel) * size
    sizes = sizes_of(args.rollout_parallelism_devices, num_heads)
    said = f"{args.rollout_parallelism_devices} devices, {num_heads} attention heads"
    profiled: dict[int, EngineSize] = {}
    if args.rollout_profile is not None:
        profile = Profile.read(args.rollout_profile)
        measured = profile.tensor_parallel_sizes
        sizes = tuple(allowed for allowed in sizes if allowed in measured)
        profiled = {allowed: engine_size(profile, allowed, client.max_candidates) for allowed in sizes}
        said += f", sizes in {args.rollout_profile}: {', '.join(map(str, measured))}"
    for _, device_of in faces("device"):
        if (device := device_of(args)) is not None:
            known = device.settings.engine_sizes
            sizes = tuple(allowed for allowed in sizes if allowed in known)
            said += f", sizes in {device.file}: {', '.join(map(str, known))}"
    if len(sizes) < 2 or size not in sizes:
        raise RuntimeError(
            f"--rollout-parallelism auto: tensor-parallel sizes {list(sizes)} are possible here ({said}), and it "
            f"begins at {size}. Say --tensor-parallel-size and --rollout-parallelism-devices such that there are two, "
            "or leave it out."
        )
    logger.info(
        "vllm_rollout: --rollout-parallelism auto among tensor-parallel sizes %s. It begins at %d, %s",
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
