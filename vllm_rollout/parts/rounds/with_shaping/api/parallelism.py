"""The planner and resizer of `vllm-rollout serve --rollout-parallelism auto`.

Invariant: without --rollout-parallelism auto nothing here has an effect.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from vllm.logger import init_logger

from vllm_rollout.kernel.api.client import RolloutAsyncLLM
from vllm_rollout.kernel.api.engine import VLLMEngine
from vllm_rollout.parts.rounds.rules.planner import ParallelismPlanner, sizes_of
from vllm_rollout.parts.rounds.with_shaping.api.rebuilding import Resizer
from vllm_rollout.parts.rounds.with_shaping.http.parallelism import Parallelism
from vllm_rollout.parts.rounds.with_shaping.rules.forecast import EngineSize
from vllm_rollout.parts.shaping.api.lengths import emulated_device
from vllm_rollout.parts.shaping.profile_file import Profile

logger = init_logger("vllm.vllm_rollout")


def parallelism_of(args: Namespace, client: RolloutAsyncLLM, engine: VLLMEngine) -> Parallelism | None:
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
    if (device := emulated_device(args)) is not None:
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
