"""Machine and times of a simulation, from flags and a profile. Invariant: what is extrapolated is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_rollout.group.ranks.load import TransferCost
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.options import FlagError, Options


@dataclass(frozen=True, slots=True)
class Clock:
    """Where the machine's times come from."""

    machine: Machine
    source: dict[str, Any]
    warnings: list[str]


def clock_of(options: Options, models: Sequence[str], longest: int) -> Clock:
    """models: names of those that lengths come from; longest: the largest context that is run.

    Raises: FlagError; ValueError and OSError for a profile that cannot be read.
    """
    if options.profile is None:
        machine = Machine(
            None,
            options.data_parallel_size,
            options.max_num_seqs,
            options.kv_capacity_tokens,
            migration=options.migration,
            scale_down=options.scale_down,
        )
        return Clock(machine, {"profile": None}, [])
    from vllm_rollout.profiling.profile_file import Profile, describe_hardware

    profile = Profile.read(options.profile)
    size = _tensor_parallel_size(options, profile.tensor_parallel_sizes)
    cost = profile.cost(size)
    engine = profile.engine(size)
    machine = Machine(
        cost,
        options.data_parallel_size,
        options.max_num_seqs,
        options.kv_capacity_tokens or engine.kv_capacity_tokens,
        engine.block_size,
        options.migration,
        options.scale_down,
        TransferCost.assumed(engine.kv_bytes_per_token / size, engine.block_size) if options.moves_kv else None,
    )
    warnings = []
    others = [model for model in models if _last_part(model) != _last_part(profile.model_name)]
    if others:
        warnings.append(
            f"the trace was recorded with {', '.join(others)}, but {options.profile} is a profile of "
            f"{profile.model_name}: lengths and times belong to different models."
        )
    if longest > (known := cost.curves[-1][0]):
        warnings.append(
            f"contexts go up to {longest:,} tokens, the profile's to {known:,.0f}: times beyond are extrapolated."
        )
    if machine.num_slots > (known := profile.batch_sizes(size)[-1]):
        warnings.append(
            f"up to {machine.num_slots:,} candidates run at once, the profile was measured up to {known:,}: times "
            "beyond are extrapolated."
        )
    source = {
        "profile": str(options.profile),
        "model": profile.model_name,
        "hardware": describe_hardware(profile.hardware),
        "tensor_parallel_size": size,
    }
    return Clock(machine, source, warnings)


def _last_part(model: str) -> str:
    """The same model has a path, a hub name or a name of our catalogue."""
    return Path(model).name.casefold()


def _tensor_parallel_size(options: Options, known: list[int]) -> int:
    """The wanted one, or the only one there is."""
    if options.tensor_parallel_size is not None or not known:
        return options.tensor_parallel_size or 1
    if len(known) > 1:
        raise FlagError(f"--tensor-parallel-size must say which: {options.profile} has {', '.join(map(str, known))}")
    return known[0]


def described(machine: Machine, source: dict[str, Any]) -> str:
    """A sentence for people."""
    where = "An ideal machine without a profile" if machine.is_ideal else f"{source['model']} on {source['hardware']}"
    ranks = f", {machine.num_ranks} engines" if machine.num_ranks > 1 else ""
    slots = "all candidates at once" if machine.num_slots is None else f"{machine.num_slots:,} candidates at once"
    kv = "" if machine.transfer is None else ", KV along"
    moves = f", migration {machine.migration}, scale-down {machine.scale_down}{kv}" if machine.moves_groups else ""
    return f"{where}{ranks}, {slots}{moves}."
