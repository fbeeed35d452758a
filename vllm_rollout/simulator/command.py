"""The command `vllm-rollout simulate`.

Invariant: importing it is light. It imports its dependencies when it runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from vllm_rollout.kernel.parts import has
from vllm_rollout.simulator.receipt_command import receipt

USAGE = 2
"""Exit status for flags that make no sense."""


def simulate(
    trace: Annotated[
        Path | None,
        typer.Argument(help="File that `serve --rollout-record FILE` wrote, or JSON lines as shown above."),
    ] = None,
    generate: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD=VALUE,…",
            help="Log-normal lengths instead of a trace. Every step has the same prompts. Fields with their "
            "defaults: prompts=64, candidates=16, steps=4, median=700 (tokens), prompt_sigma=0.6 (spread between "
            "prompts), sigma=0.7 (spread within a prompt: the tail), max_tokens=8192, prompt_tokens=100.",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Profile that `vllm-rollout profile MODEL` wrote. Default: every step takes the same time."),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Tensor-parallel size of the profile to use. Default: the only one.")
    ] = None,
    data_parallel_size: Annotated[
        int,
        typer.Option(
            min=1, help="Number of engines that share the groups. A rollout takes as long as the slowest engine."
        ),
    ] = 1,
    migration: Annotated[
        Literal["off", "spread", "consolidate", "auto"],
        typer.Option(
            help="With several engines: move groups between engines while they run. spread: away from an engine that "
            "lags, so that the rollout ends sooner. consolidate: empty whole engines in the tail and free them. The "
            "rollout may then end some 5 % later. auto: both."
        ),
    ] = "off",
    scale_down: Annotated[
        Literal["off", "auto"],
        typer.Option(
            help="With several engines: free half of the engines between 20 and 50 % of the responses. It happens as "
            "soon as the other engines' KV cache has room for the rest (RollPacker)."
        ),
    ] = "off",
    move_kv: Annotated[
        Literal["auto", "off"],
        typer.Option(
            help="KV cache of a group that moves. auto: with a profile the KV cache moves along, at a gigabyte a "
            "second. off: it is computed again."
        ),
    ] = "auto",
    group_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Trajectories that a trainer wants per prompt. Default: the recorded number, otherwise 8."
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Candidates that run at once on one engine. Default: the profiled number, otherwise no limit."
        ),
    ] = None,
    kv_capacity_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens in one engine's KV cache. A full cache makes the engine preempt. Default: the profiled "
            "number, otherwise no limit.",
        ),
    ] = None,
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
    ] = None,
    rounds: Annotated[
        list[str] | None,
        typer.Option(
            metavar="P0|FIELD=VALUE,…",
            help="Simulate whole runs of short and long rounds (tail batching) instead of single rollouts. P0 is the "
            "number of prompts a round. Fields: prompts_per_round, prompt_speculation and response_speculation (1.25 "
            "each), queue_order (first_in, shortest, longest). For the groups of short rounds, the fields of "
            "--setting are possible, too. Repeat the flag, or write alternatives as prompt_speculation=1.1|1.25|1.5.",
        ),
    ] = None,
    message_delay: Annotated[
        float,
        typer.Option(
            min=0,
            help="With --rounds and several engines: time of a message between an engine and the process that counts "
            "complete groups. Unit: seconds, without a profile steps.",
        ),
    ] = 0.0,
    whole_epochs: Annotated[
        bool,
        typer.Option(
            "--whole-epochs",
            help="With --rounds: all prompts of an epoch come back before the next epoch begins, as with "
            "`run.rounds`. Otherwise long prompts may wait into the next epoch.",
        ),
    ] = False,
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
    ] = None,
    drafts: Annotated[
        bool,
        typer.Option(
            "--drafts",
            help="Try every setting also with drafts, as `serve --enable-rollout-drafts` has them. Siblings' tokens "
            "and earlier answers to the prompt are verified several at a time where that is faster. In a single "
            "--setting, write the field drafts=true.",
        ),
    ] = False,
    draft_acceptance: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Acceptance of drafts: the drafts in a file of `serve --rollout-emulate`. Default: as measured with "
            "16 answers of a small model to a prompt.",
        ),
    ] = None,
    detection_length: Annotated[
        int | None,
        typer.Option(min=1, help="Output tokens at which the trace's scores were taken. Default: the recorded number."),
    ] = None,
    prompts_per_step: Annotated[
        int | None, typer.Option(min=1, help="Cut the trace's prompts into rollouts of this many, in their order.")
    ] = None,
    epochs: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of passes over the trace, so that redundancy auto knows its prompts. From the second pass "
            "on, a prompt's lengths are drawn from its recorded lengths.",
        ),
    ] = 1,
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Skip broken rows instead of failing.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of all random draws.")] = 0,
    output: Annotated[Path, typer.Option(help="File for the picture (PNG).")] = Path("simulation.png"),
    output_json: Annotated[Path | None, typer.Option(help="File for all numbers (JSON), for a program.")] = None,
    output_trace: Annotated[
        Path | None,
        typer.Option(
            help="File for every simulated rollout, in the form of `serve --rollout-record`. `vllm-rollout watch "
            "trace.jsonl whatif.jsonl` then shows the simulation beside the record."
        ),
    ] = None,
) -> None:
    """Predict the savings of group settings before GPU hours are spent.

    A trace has the length of every candidate. The simulator races these candidates through the engine's own decision
    code, on a clock that a profile drives. The same trace and seed give the same numbers.

    **Try it** without trace, profile or GPU:

        vllm-rollout simulate --generate prompts=64,sigma=0.9

    **For numbers to plan with**, record rollouts (with early_stop false), profile the engine, replay:

        vllm-rollout serve MODEL --rollout-record trace.jsonl
        vllm-rollout profile MODEL --output ptl.json
        vllm-rollout simulate trace.jsonl --profile ptl.json

    **Your own question** takes the place of the default sweep:

        vllm-rollout simulate trace.jsonl --setting "redundancy=2|4|8,selection=dual_end,patience=1.5"

    **Rounds** (tail batching): the savings of a run that returns 32 prompts a round, over three epochs of 256 prompts:

        vllm-rollout simulate --generate prompts=256,prompt_sigma=0.8,sigma=0.8 --rounds 32 --epochs 3
        vllm-rollout simulate trace.jsonl --profile ptl.json --rounds "prompts_per_round=8,prompt_speculation=1.25|1.5"

    **Agents**: the savings of racing conversations whose tools take 20 s on average, with a tail, and fail at times:

        vllm-rollout simulate trace.jsonl --profile ptl.json --sessions turns=4,tool_seconds=20,tool_failures=0.05

    **Drafts**: the speed-up by drafts from siblings' tokens, by the size of the batch:

        vllm-rollout simulate trace.jsonl --profile ptl.json --drafts

    **A trace** has one JSON row per rollout (a training step), or one row per prompt. The fields "ends", "scores" and
    "rewards" are optional:

        {"rollout_id": "r1", "model": "m", "group_size": 2, "max_tokens": 1024, "prompts": [
          {"id": "q1", "prompt_tokens": 31, "lengths": [412, 77, 1024], "ends": ["stop", "stop", "length"]}, …]}
        {"prompt_id": "q1", "lengths": [412, 77, 1024]}

    **Columns:** *speed-up* is against the first row, which asks for exactly group_size candidates. *Bubble*
    is the share of the peak batch that stands empty, averaged over time: places for spare candidates.
    *Mean* and *P99* are lengths of the answers that the trainer gets: "first" returns the quickest answers, dual-end
    also the longest. *Freed* is the share of all engines' time in which engines stood empty for good.

    Columns of rounds: *over resp.* is the speed-up over the same groups in rounds that wait for all their prompts.
    *waited* is a number of rounds. *length by place* is the rank correlation of a prompt's length and its round.
    """
    from vllm_rollout.simulator.options import FlagError, SimulateOptions
    from vllm_rollout.simulator.simulation import run

    try:
        options = SimulateOptions(
            trace=trace, generate=generate, profile=profile, tensor_parallel_size=tensor_parallel_size,
            data_parallel_size=data_parallel_size, migration=migration, scale_down=scale_down,
            moves_kv=move_kv == "auto", group_size=group_size, max_num_seqs=max_num_seqs,
            kv_capacity_tokens=kv_capacity_tokens, settings=tuple(setting or ()), detection_length=detection_length,
            rounds=tuple(rounds or ()), sessions=sessions, message_delay_s=message_delay, whole_epochs=whole_epochs,
            drafts=drafts, draft_acceptance=draft_acceptance,
            prompts_per_step=prompts_per_step,
            epochs=epochs, skip_broken=skip_broken, seed=seed, output=output, output_json=output_json,
            output_trace=output_trace,
        )  # fmt: skip
        run(options)
    except FlagError as error:
        _fail(str(error), USAGE)
    except (ValueError, OSError) as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        sys.exit(130)


def register(app: typer.Typer) -> None:
    """Add the commands to the `vllm-rollout` command."""
    app.command()(simulate)
    if has("page"):
        app.command()(receipt)


def _fail(message: str, status: int) -> NoReturn:
    print(f"vllm-rollout simulate: {message}", file=sys.stderr)
    sys.exit(status)
