"""The flags of `vllm-rollout simulate`.

Invariant: options are consistent. Importing this is light.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

import typer

from vllm_rollout.kernel.parts import face, has
from vllm_rollout.simulator.parts import FlagError

MAX_MESSAGE_DELAY = 1_000_000
"""Longest time of a message, in seconds or steps."""


@dataclass(frozen=True)
class SimulateOptions:
    """The flags, each with its help."""

    trace: Annotated[
        Path | None,
        typer.Argument(help="File that `serve --rollout-record FILE` wrote, or JSON lines as shown above."),
    ] = None
    generate: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD=VALUE,…",
            help="Log-normal lengths instead of a trace. Every step has the same prompts. Fields with their "
            "defaults: prompts=64, candidates=16, steps=4, median=700 (tokens), prompt_sigma=0.6 (spread between "
            "prompts), sigma=0.7 (spread within a prompt: the tail), max_tokens=8192, prompt_tokens=100.",
        ),
    ] = None
    profile: Annotated[
        Path | None,
        typer.Option(help="Profile that `vllm-rollout profile MODEL` wrote. Default: every step takes the same time."),
    ] = None
    tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Tensor-parallel size of the profile to use. Default: the only one.")
    ] = None
    data_parallel_size: Annotated[
        int,
        typer.Option(
            min=1, help="Number of engines that share the groups. A rollout takes as long as the slowest engine."
        ),
    ] = 1
    migration: Annotated[
        Literal["off", "spread", "consolidate", "auto"],
        typer.Option(
            help="With several engines: move groups between engines while they run. spread: away from an engine that "
            "lags, so that the rollout ends sooner. consolidate: empty whole engines in the tail and free them. The "
            "rollout may then end some 5 % later. auto: both."
        ),
    ] = "off"
    scale_down: Annotated[
        Literal["off", "auto"],
        typer.Option(
            help="With several engines: free half of the engines between 20 and 50 % of the responses. It happens as "
            "soon as the other engines' KV cache has room for the rest (RollPacker)."
        ),
    ] = "off"
    move_kv: Annotated[
        Literal["auto", "off"],
        typer.Option(
            help="KV cache of a group that moves. auto: with a profile the KV cache moves along, at a gigabyte a "
            "second. off: it is computed again."
        ),
    ] = "auto"
    group_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Trajectories that a trainer wants per prompt. Default: the recorded number, otherwise 8."
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Candidates that run at once on one engine. Default: the profiled number, otherwise no limit."
        ),
    ] = None
    kv_capacity_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens in one engine's KV cache. A full cache makes the engine preempt. Default: the profiled "
            "number, otherwise no limit.",
        ),
    ] = None
    setting: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE,…",
            help="Try this setting beside the baseline, instead of the default sweep. Repeat the flag, or write "
            "alternatives as redundancy=2|4|8. Fields of a rollout request: redundancy (a number or auto), "
            "selection, num_longest, patience, early_stop, tradeoff, group_size, order (auto, prompts). Fields of "
            "pruning: detection_length, keep_ratio, … Other fields: drafts (true, false), and name, which labels the "
            "setting.",
        ),
    ] = None
    rounds: Annotated[
        list[str] | None,
        typer.Option(
            metavar="P0|FIELD=VALUE,…",
            help="Simulate whole runs of short and long rounds (tail batching) instead of single rollouts. P0 is the "
            "number of prompts a round. Fields: prompts_per_round, prompt_speculation and response_speculation (1.25 "
            "each), queue_order (first_in, shortest, longest). For the groups of short rounds, the fields of "
            "--setting are possible, too. Repeat the flag, or write alternatives as prompt_speculation=1.1|1.25|1.5.",
        ),
    ] = None
    message_delay: Annotated[
        float,
        typer.Option(
            min=0,
            help="With --rounds and several engines: time of a message between an engine and the process that counts "
            "complete groups. Unit: seconds, without a profile steps.",
        ),
    ] = 0.0
    whole_epochs: Annotated[
        bool,
        typer.Option(
            "--whole-epochs",
            help="With --rounds: all prompts of an epoch come back before the next epoch begins, as with "
            "`run.rounds`. Otherwise long prompts may wait into the next epoch.",
        ),
    ] = False
    sessions: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD=VALUE,…|recorded",
            help="Candidates are conversations with tools. A candidate's tokens are spread over turns, and between "
            "two turns a tool runs. Fields with their defaults: turns=3 (on average, geometric), tool_seconds=0 (on "
            "average, without a profile in steps), tool_sigma=1 (spread: the tail of tools), tool_tokens=100 (of a "
            "tool's answer), tool_failures=0. tool_failures is the chance that a tool fails and its session is void. "
            "A spare session or a new one takes its place. If the trace has groups of sessions, these groups are "
            "replayed, and missing fields are learned from them. recorded: all fields are learned. Settings of "
            "sessions have redundancy, early_stop, group_size, and selection first or shortest.",
        ),
    ] = None
    drafts: Annotated[
        bool,
        typer.Option(
            "--drafts",
            help="Try every setting also with drafts, as `serve --enable-rollout-drafts` has them. Siblings' tokens "
            "and earlier answers to the prompt are verified several at a time where that is faster. In a single "
            "--setting, write the field drafts=true.",
        ),
    ] = False
    draft_acceptance: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Acceptance of drafts: the drafts in a file of `serve --rollout-emulate`. Default: as measured with "
            "16 answers of a small model to a prompt.",
        ),
    ] = None
    detection_length: Annotated[
        int | None,
        typer.Option(min=1, help="Output tokens at which the trace's scores were taken. Default: the recorded number."),
    ] = None
    prompts_per_step: Annotated[
        int | None, typer.Option(min=1, help="Cut the trace's prompts into rollouts of this many, in their order.")
    ] = None
    epochs: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of passes over the trace, so that redundancy auto knows its prompts. From the second pass "
            "on, a prompt's lengths are drawn from its recorded lengths.",
        ),
    ] = 1
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Skip broken rows instead of failing.")] = False
    seed: Annotated[int, typer.Option(help="Seed of all random draws.")] = 0
    output: Annotated[Path, typer.Option(help="File for the picture (PNG).")] = Path("simulation.png")
    output_json: Annotated[Path | None, typer.Option(help="File for all numbers (JSON), for a program.")] = None
    output_trace: Annotated[
        Path | None,
        typer.Option(
            help="File for every simulated rollout, in the form of `serve --rollout-record`. `vllm-rollout watch "
            "trace.jsonl whatif.jsonl` then shows the simulation beside the record."
        ),
    ] = None

    def __post_init__(self) -> None:
        for flag, part, given in (
            ("a trace", "page", self.trace is not None),
            ("--output-trace", "page", self.output_trace is not None),
            ("--rounds", "rounds", self.rounds),
            ("--sessions", "sessions", self.sessions is not None),
            ("--drafts", "drafts", self.drafts),
            ("--draft-acceptance", "drafts", self.draft_acceptance is not None),
            ("--draft-acceptance", "emulation", self.draft_acceptance is not None),
            ("--detection-length", "pruning", self.detection_length is not None),
            ("--data-parallel-size", "moving", self.data_parallel_size > 1),
        ):
            if given and not has(part):
                raise FlagError(f"{flag} is of the part {part!r}, which is left out")
        if (self.trace is None) == (self.generate is None):
            got = "neither" if self.trace is None else "both"
            raise FlagError(f"give either a trace file or --generate, got {got}. See vllm-rollout simulate --help.")
        if self.tensor_parallel_size is not None and self.profile is None:
            raise FlagError("--tensor-parallel-size chooses among the curves of a --profile, and none is given")
        for flag, given in (("--setting", self.setting), ("--prompts-per-step", self.prompts_per_step)):
            if self.rounds and given:
                raise FlagError(f"{flag} says how rollouts run, and --rounds runs none: say it there. See --help.")
        if not self.message_delay <= MAX_MESSAGE_DELAY:
            raise FlagError(f"--message-delay must be at most {MAX_MESSAGE_DELAY:,}, got {self.message_delay}")
        if self.message_delay and not self.rounds:
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
        if self.output_trace is not None and self.trace is not None:
            read = [piece.resolve() for piece in face("page", "traces").pieces(self.trace)]
            if self.output_trace.resolve() in read:
                raise FlagError(f"--output-trace {self.output_trace} is the trace that is read: name another file")
        outputs = {"--output": self.output, "--output-json": self.output_json, "--output-trace": self.output_trace}
        for flag, path in outputs.items():
            if path is not None and not path.parent.is_dir():
                raise FlagError(f"{flag} {path}: there is no folder {path.parent}")


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose keyword arguments are the flags."""
    hints = get_type_hints(SimulateOptions, include_extras=True)
    command.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in fields(SimulateOptions)
        ]
    )
    return command
