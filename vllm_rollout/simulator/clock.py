"""The machine that flags and a profile describe.

Invariant: every extrapolation has a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_rollout.kernel.parts import face
from vllm_rollout.parts.shaping.profile_file import Profile, describe_hardware
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.options import SimulateOptions
from vllm_rollout.simulator.parts import FlagError, simulated


@dataclass(frozen=True, slots=True)
class Clock:
    """The machine, the source of its times, and warnings."""

    machine: Machine
    source: dict[str, Any]
    warnings: list[str]


def clock_of(options: SimulateOptions, models: Sequence[str], longest: int) -> Clock:
    """Machine from flags and profile.

    `models`: names of the models of the trace. `longest`: the largest context that is run, in tokens.

    Raises: FlagError. ValueError and OSError for a profile that cannot be read.
    """
    machine = Machine(
        None,
        options.data_parallel_size,
        options.max_num_seqs,
        options.kv_capacity_tokens,
        migration=options.migration,
        scale_down=options.scale_down,
    )
    if options.draft_acceptance is not None:
        device = face("emulation", "settings").read(options.draft_acceptance)
        machine = replace(machine, drafts=device.drafts)
    if options.profile is None:
        return Clock(machine, {"profile": None}, [])
    profile = Profile.read(options.profile)
    size = _tensor_parallel_size(options, profile.tensor_parallel_sizes)
    cost = profile.cost(size)
    engine = profile.engine(size)
    transfer = None
    if machine.moves_groups and options.move_kv == "auto":
        moving = simulated("moving", "--move-kv")
        transfer = moving.transfer_cost(engine.kv_bytes_per_token / size, engine.block_size)
    machine = replace(
        machine,
        cost=cost,
        kv_capacity_tokens=options.kv_capacity_tokens or engine.kv_capacity_tokens,
        block_size=engine.block_size,
        transfer=transfer,
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
    smallest, at_context = max((curve.batch_sizes[0], context) for context, curve in cost.curves)
    largest = max(curve.batch_sizes[-1] for _, curve in cost.curves)
    if smallest > 1:
        warnings.append(
            f"at a context of {at_context:,.0f} tokens the profile was measured from {smallest:,.0f} candidates on: "
            "times of fewer, as at the end of every rollout, are extrapolated. Measure them with --batch-sizes 1,…."
        )
    if machine.num_slots > largest:
        warnings.append(
            f"up to {machine.num_slots:,} candidates run at once, the profile was measured up to {largest:,.0f}: times "
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
    """Part of a name that a model's path, hub name and name in our catalogue share."""
    return Path(model).name.casefold()


def _tensor_parallel_size(options: SimulateOptions, known: list[int]) -> int:
    """The requested size, or the only profiled one. Raises: FlagError."""
    if options.tensor_parallel_size is not None or not known:
        return options.tensor_parallel_size or 1
    if len(known) > 1:
        raise FlagError(f"--tensor-parallel-size must say which: {options.profile} has {', '.join(map(str, known))}")
    return known[0]


def described(machine: Machine, source: dict[str, Any]) -> str:
    """Sentence on the machine, for people."""
    where = "An ideal machine without a profile" if machine.is_ideal else f"{source['model']} on {source['hardware']}"
    ranks = f", {machine.num_ranks} engines" if machine.num_ranks > 1 else ""
    slots = "all candidates at once" if machine.num_slots is None else f"{machine.num_slots:,} candidates at once"
    kv = "" if machine.transfer is None else ", KV along"
    moves = f", migration {machine.migration}, scale-down {machine.scale_down}{kv}" if machine.moves_groups else ""
    return f"{where}{ranks}, {slots}{moves}."
