"""The `vllm-rollout simulate` command.

Invariant: importing it is light. It imports its dependencies when it runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

USAGE = 2
"""Exit status for flags that make no sense."""


def simulate(
    trace: Annotated[
        Path | None,
        typer.Argument(help="What `serve --rollout-record FILE` wrote, or JSON lines as shown above."),
    ] = None,
    generate: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD=VALUE,…",
            help="Instead of a trace: log-normal lengths. Fields with their defaults: prompts=64, candidates=16, "
            "steps=4, median=700 (tokens), prompt_sigma=0.6 (how much prompts differ), sigma=0.7 (how heavy the tail "
            "of one prompt is), max_tokens=8192, prompt_tokens=100. Every step has the same prompts.",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="What `vllm-rollout profile MODEL` wrote. Without it every step takes the same time."),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Which of the profile's. Default: the only one.")
    ] = None,
    data_parallel_size: Annotated[
        int, typer.Option(min=1, help="Engines that share the groups; a rollout takes as long as the slowest.")
    ] = 1,
    migration: Annotated[
        Literal["off", "spread", "consolidate", "auto"],
        typer.Option(
            help="With several engines: move groups between them while they run. spread: away from an engine that "
            "lags, so that the rollout ends sooner. consolidate: empty whole engines in the tail and free them, for an "
            "end that may come some 5 % later. auto: both."
        ),
    ] = "off",
    scale_down: Annotated[
        Literal["off", "auto"],
        typer.Option(
            help="With several engines: free half of them between 20 and 50 % of the responses, as soon as the others' "
            "KV cache has room for the rest (RollPacker)."
        ),
    ] = "off",
    move_kv: Annotated[
        Literal["auto", "off"],
        typer.Option(
            help="KV of a group that moves. auto: with a profile it goes along, at a gigabyte a second. off: it "
            "is computed again."
        ),
    ] = "auto",
    group_size: Annotated[
        int | None,
        typer.Option(min=1, help="Trajectories a trainer wants per prompt. Default: the recorded one, else 8."),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Candidates that run at once on one engine. Default: the profiled number, else no limit."
        ),
    ] = None,
    kv_capacity_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens in one engine's KV cache; when it is full it preempts. Default: the profiled number, else no "
            "limit.",
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE,…",
            help="Try this beside the baseline instead of the default sweep; repeat it, or write alternatives as "
            "redundancy=2|4|8. Fields are those of a rollout request: redundancy (a number or auto), selection, "
            "num_longest, patience, early_stop, tradeoff, group_size, order (auto, prompts), and those of pruning: "
            "detection_length, keep_ratio, …; drafts (true, false); name labels it.",
        ),
    ] = None,
    rounds: Annotated[
        list[str] | None,
        typer.Option(
            metavar="P0|FIELD=VALUE,…",
            help="Whole runs of short and long rounds (tail batching) instead of single rollouts: P0 prompts a round, "
            "or fields prompts_per_round, prompt_speculation, response_speculation (1.25 each), queue_order (first_in, "
            "shortest, longest), and for the groups of short rounds those of --setting. Repeat it, or write "
            "alternatives as prompt_speculation=1.1|1.25|1.5.",
        ),
    ] = None,
    message_delay: Annotated[
        float,
        typer.Option(
            min=0,
            help="With --rounds and several engines: seconds (without a profile, steps) that a message takes between "
            "an engine and the process that counts complete groups over all of them.",
        ),
    ] = 0.0,
    whole_epochs: Annotated[
        bool,
        typer.Option(
            "--whole-epochs",
            help="With --rounds: all prompts of an epoch come back before the next one begins, as with `run.rounds`. "
            "Otherwise what is long may wait over the border.",
        ),
    ] = False,
    sessions: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD=VALUE,…|recorded",
            help="Candidates are conversations with tools: what a candidate generates is spread over turns, and "
            "between two of them a tool runs. Fields with their defaults: turns=3 (on average, geometric), "
            "tool_seconds=0 (on average; without a profile, steps), tool_sigma=1 (how heavy the tail of tools is), "
            "tool_tokens=100 (of a tool's answer), tool_failures=0 (chance that a tool fails and its session is void: "
            "a spare or a new one takes its place). Of a trace with groups of sessions these are replayed, and what is "
            "not said is learned from them; recorded: all of it. Settings of sessions say redundancy, early_stop, "
            "group_size, and selection first or shortest.",
        ),
    ] = None,
    drafts: Annotated[
        bool,
        typer.Option(
            "--drafts",
            help="Try every setting also with drafts, as `serve --enable-rollout-drafts` has them: siblings' tokens "
            "and earlier answers of the prompt are verified several at a time where that is faster. In a single "
            "--setting it is the field drafts=true.",
        ),
    ] = False,
    draft_acceptance: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="How drafts are accepted: a file of `serve --rollout-emulate`, of which its drafts are read. Default: "
            "as measured with 16 answers of a small model to a prompt.",
        ),
    ] = None,
    detection_length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens at which the trace's scores were taken. Default: the recorded number."),
    ] = None,
    prompts_per_step: Annotated[
        int | None, typer.Option(min=1, help="Cut the trace's prompts into rollouts of this many, in their order.")
    ] = None,
    epochs: Annotated[
        int,
        typer.Option(
            min=1,
            help="Go through the trace this often, so that redundancy auto knows its prompts. From the second time on "
            "a prompt's lengths are drawn from its recorded ones.",
        ),
    ] = 1,
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Go on without rows that are broken.")] = False,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    output: Annotated[Path, typer.Option(help="Where the picture (PNG) goes.")] = Path("simulation.png"),
    output_json: Annotated[Path | None, typer.Option(help="Where all numbers go, for a program.")] = None,
    output_trace: Annotated[
        Path | None,
        typer.Option(
            help="Where every simulated rollout goes, as `serve --rollout-record` writes it: `vllm-rollout watch "
            "trace.jsonl whatif.jsonl` shows what would have been beside what was."
        ),
    ] = None,
) -> None:
    """Say what a setting of groups will save, before GPU hours are spent.

    A trace says how long every candidate became; the replay lets them race through the code that decides in the engine,
    on a clock that a profile drives. Same trace and seed, same numbers.

    **Try it** without trace, profile or GPU:

        vllm-rollout simulate --generate prompts=64,sigma=0.9

    **For numbers to plan with**, record rollouts (with early_stop false), profile the engine, replay:

        vllm-rollout serve MODEL --rollout-record trace.jsonl
        vllm-rollout profile MODEL --output ptl.json
        vllm-rollout simulate trace.jsonl --profile ptl.json

    **Your own question** takes the place of the default sweep:

        vllm-rollout simulate trace.jsonl --setting "redundancy=2|4|8,selection=dual_end,patience=1.5"

    **Rounds** (tail batching): what a run would save that returns 32 prompts a round, over three epochs of 256 prompts:

        vllm-rollout simulate --generate prompts=256,prompt_sigma=0.8,sigma=0.8 --rounds 32 --epochs 3
        vllm-rollout simulate trace.jsonl --profile ptl.json --rounds "prompts_per_round=8,prompt_speculation=1.25|1.5"

    **Agents**: what racing conversations would save whose tools take 20 s on average, with a tail, and fail at times:

        vllm-rollout simulate trace.jsonl --profile ptl.json --sessions turns=4,tool_seconds=20,tool_failures=0.05

    **Drafts**: what siblings' tokens would bring as drafts of each other, by the size of the batch:

        vllm-rollout simulate trace.jsonl --profile ptl.json --drafts

    **A trace** has one JSON row per rollout (a training step), or one per prompt. "ends", "scores" and "rewards" are
    optional:

        {"rollout_id": "r1", "model": "m", "group_size": 2, "max_tokens": 1024, "prompts": [
          {"id": "q1", "prompt_tokens": 31, "lengths": [412, 77, 1024], "ends": ["stop", "stop", "length"]}, …]}
        {"prompt_id": "q1", "lengths": [412, 77, 1024]}

    **Reading the tables:** *speed-up* is against the first row, which asks for exactly group_size candidates. *Bubble*
    is the part of the peak batch that stands empty, on average over time: the room there is for spare candidates.
    *Mean* and *P99* say what the trainer sees less of: "first" returns the quickest answers, dual-end also the longest.
    *Freed* is the part of all engines' time for which some of them were emptied for good.
    Of rounds: *over resp.* is the speed-up over the same groups in rounds that wait for all their prompts; *waited* is
    in rounds; *length by place* is the rank correlation of a prompt's length and the round it came back in.
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


def _fail(message: str, status: int) -> NoReturn:
    print(f"vllm-rollout simulate: {message}", file=sys.stderr)
    sys.exit(status)
