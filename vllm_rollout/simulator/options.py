"""The flags of `vllm-rollout simulate`, together. Invariant: what exists is consistent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_rollout.group.plans.fields import Migration
from vllm_rollout.simulator.machine import ScaleDown


class FlagError(ValueError):
    """Flags that make no sense, alone or together."""


@dataclass(frozen=True, slots=True)
class Options:
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
    message_delay_s: float = 0.0
    whole_epochs: bool = False
    epochs: int = 1
    skip_broken: bool = False
    seed: int = 0
    output: Path = Path("simulation.png")
    output_json: Path | None = None

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
        if self.output.suffix != ".png":
            raise FlagError(f"--output must end in .png, got {self.output}")
        for flag, path in (("--output", self.output), ("--output-json", self.output_json)):
            if path is not None and not path.parent.is_dir():
                raise FlagError(f"{flag} {path}: there is no folder {path.parent}")
