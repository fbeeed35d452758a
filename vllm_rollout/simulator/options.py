"""The flags of `vllm-rollout simulate`, and the machine that they and a profile describe.

Invariant: options are consistent, and every extrapolation has a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_rollout.kernel.rules.fields import Migration
from vllm_rollout.parts.emulation.settings import Settings
from vllm_rollout.parts.moving.rules.load import TransferCost
from vllm_rollout.parts.page.recording.file import pieces
from vllm_rollout.simulator.machine import Machine, ScaleDown


class FlagError(ValueError):
    """Flags that make no sense, alone or together."""


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    trace: Path | None = None
    generate: str | None = None
    profile: Path | None = None
    tensor_parallel_size: int | None = None
    data_parallel_size: int = 1
    migration: Migration = "off"
    scale_down: ScaleDown = "off"
    moves_kv: bool = True
    group_size: int | None = None
    max_num_seqs: int | None = None
    kv_capacity_tokens: int | None = None
    settings: tuple[str, ...] = ()
    detection_length: int | None = None
    prompts_per_step: int | None = None
    rounds: tuple[str, ...] = ()
    sessions: str | None = None
    drafts: bool = False
    draft_acceptance: Path | None = None
    message_delay_s: float = 0.0
    whole_epochs: bool = False
    epochs: int = 1
    skip_broken: bool = False
    seed: int = 0
    output: Path = Path("simulation.png")
    output_json: Path | None = None
    output_trace: Path | None = None

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.generate is None):
            got = "neither" if self.trace is None else "both"
            raise FlagError(f"give either a trace file or --generate, got {got}. See vllm-rollout simulate --help.")
        if self.tensor_parallel_size is not None and self.profile is None:
            raise FlagError("--tensor-parallel-size chooses among the curves of a --profile, and none is given")
        for flag, given in (("--setting", self.settings), ("--prompts-per-step", self.prompts_per_step)):
            if self.rounds and given:
                raise FlagError(f"{flag} says how rollouts run, and --rounds runs none: say it there. See --help.")
        if self.message_delay_s and not self.rounds:
            raise FlagError("--message-delay is for --rounds: a rollout's ranks need not hear of each other")
        if self.whole_epochs and not self.rounds:
            raise FlagError("--whole-epochs is for --rounds: rollouts leave no prompt waiting")
        for flag, given in (("--migration", self.migration), ("--scale-down", self.scale_down)):
            if given != "off" and self.data_parallel_size == 1:
                raise FlagError(f"{flag} {given} moves groups between engines: say how many with --data-parallel-size")
        for flag, given in (
            ("--rounds", self.rounds),
            (f"--migration {self.migration}", self.migration != "off"),
            (f"--scale-down {self.scale_down}", self.scale_down != "off"),
        ):
            if self.sessions is not None and given:
                raise FlagError(f"{flag} is for answers: sessions stay on their engines, in single rollouts")
        if self.drafts and self.sessions is not None:
            raise FlagError("--drafts is for answers: what drafts do for turns of conversations is not simulated")
        if self.output.suffix != ".png":
            raise FlagError(f"--output must end in .png, got {self.output}")
        if self.output_trace is not None and self.rounds:
            raise FlagError("--output-trace is of single rollouts, not of --rounds")
        read = [] if self.trace is None else [piece.resolve() for piece in pieces(self.trace)]
        if self.output_trace is not None and self.output_trace.resolve() in read:
            raise FlagError(f"--output-trace {self.output_trace} is the trace that is read: name another file")
        outputs = {"--output": self.output, "--output-json": self.output_json, "--output-trace": self.output_trace}
        for flag, path in outputs.items():
            if path is not None and not path.parent.is_dir():
                raise FlagError(f"{flag} {path}: there is no folder {path.parent}")


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
        machine = replace(machine, drafts=Settings.read(options.draft_acceptance).drafts)
    if options.profile is None:
        return Clock(machine, {"profile": None}, [])
    from vllm_rollout.parts.shaping.profile_file import Profile, describe_hardware

    profile = Profile.read(options.profile)
    size = _tensor_parallel_size(options, profile.tensor_parallel_sizes)
    cost = profile.cost(size)
    engine = profile.engine(size)
    transfer = TransferCost.assumed(engine.kv_bytes_per_token / size, engine.block_size)
    machine = replace(
        machine,
        cost=cost,
        kv_capacity_tokens=options.kv_capacity_tokens or engine.kv_capacity_tokens,
        block_size=engine.block_size,
        transfer=transfer if options.moves_kv else None,
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
