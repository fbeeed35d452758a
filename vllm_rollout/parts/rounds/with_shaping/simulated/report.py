"""Tables, summary and notes of a sweep of runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich.table import Table

from vllm_rollout.parts.rounds.with_shaping.simulated.outcome import (
    Fairness,
    RoundSweep,
    RunOutcome,
    fairness_of,
    mean_of_longest,
    mean_seconds,
    percentile_of_lengths,
)
from vllm_rollout.parts.shaping.rules.trace import Trace
from vllm_rollout.simulator.machine import duration
from vllm_rollout.simulator.report import count, ideal_times, left_out, preemptions, table_of

Column = tuple[str, Callable[[RunOutcome], str]]
DASH = "—"


def tables(sweep: RoundSweep) -> list[Table]:
    """Tables of times, lengths and the order of prompts."""
    ideal = sweep.conditions.machine.is_ideal
    steps = "\nin steps" if ideal else ""
    fair = {id(outcome): fairness_of(outcome) for outcome in sweep.outcomes}

    def time(value: float | None) -> str:
        return DASH if value is None else f"{value:,.0f}" if ideal else duration(value, in_steps=False)

    def over_responses_only(outcome: RunOutcome) -> str:
        other = sweep.responses_only_of(outcome)
        return DASH if other is None or other is outcome else f"{other.prompt_s / outcome.prompt_s:.2f}x"

    times: list[Column] = [
        ("short\n+long", lambda o: f"{len(o.of('short'))}+{len(o.of('long'))}"),
        (f"round{steps}", lambda o: time(o.round_s)),
        ("short", lambda o: time(mean_seconds(o.of("short")))),
        ("long", lambda o: time(mean_seconds(o.of("long")))),
        ("speed-up", lambda o: f"{sweep.speed_up(o):.2f}x"),
        ("over\nresp.", over_responses_only),
        ("whole\nrun", lambda o: f"{sweep.speed_up_of_run(o):.2f}x"),
        ("tokens", lambda o: count(o.generated_tokens)),
        ("wasted", lambda o: f"{o.wasted_tokens / o.generated_tokens:.0%}"),
    ]
    if (machine := sweep.conditions.machine).moves_groups:
        times.append(("freed", lambda o: f"{o.freed_rank_s / (machine.num_ranks * o.seconds):.0%}"))
    lengths: list[Column] = [
        ("short rounds\nlongest", lambda o: _tokens(mean_of_longest(o.of("short")))),
        ("\nP75", lambda o: _tokens(percentile_of_lengths(o.of("short"), 75))),
        ("long rounds\nlongest", lambda o: _tokens(mean_of_longest(o.of("long")))),
        ("\nP75", lambda o: _tokens(percentile_of_lengths(o.of("long"), 75))),
        ("all\nmean", lambda o: _tokens(o.returned_tokens / sum(len(prompt.lengths) for prompt in o.returned))),
        ("against\nsynchronous", lambda o: f"{sweep.length_bias(o):+.1%}"),
    ]

    def said(text: Callable[[Fairness], str]) -> Callable[[RunOutcome], str]:
        return lambda outcome: text(fair[id(outcome)])

    order: list[Column] = [
        ("returned\nper prompt", said(lambda f: f"{f.least_returns} to {f.most_returns}")),
        ("deferred", said(lambda f: f"{f.deferred_share:.0%}")),
        ("waited\nmean", said(lambda f: f"{f.mean_wait:.2f}")),
        ("\nmost", said(lambda f: f"{f.max_wait}")),
        ("length by\nplace", said(lambda f: f"{f.order_correlation:+.2f}")),
        ("mean length\nshort", said(lambda f: _departure(f.short_departure))),
        ("\nlong", said(lambda f: _departure(f.long_departure))),
        ("\nfarthest", said(lambda f: f"{f.largest_departure:.0%}")),
    ]
    told = {
        f"Time of a round, over {sweep.span}": times,
        "Lengths of returned answers, in tokens; longest: mean over rounds": lengths,
        "Which prompts come back when, and how far a round's mean length is from the run's": order,
    }
    return [table_of(title, columns, sweep.outcomes, [sweep.fastest]) for title, columns in told.items()]


def _tokens(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f}"


def _departure(share: float | None) -> str:
    return DASH if share is None else f"{share:+.0%}"


def summary(sweep: RoundSweep) -> str:
    """Sentence with the fastest setting, its speed-up and its effect on lengths."""
    fastest, baseline = sweep.fastest, sweep.baseline
    if fastest is baseline:
        return "Nothing that was tried is faster than waiting for every prompt."
    said = f"Fastest: {fastest.setting.name}, {sweep.speed_up(fastest):.2f}x"
    if not sweep.conditions.whole_epochs:
        said += f" in whole periods, {sweep.speed_up_of_run(fastest):.2f}x from the first round to the last"
    short, before = mean_of_longest(fastest.of("short")), mean_of_longest(baseline.of("short"))
    if fastest.of("long") and short and before:
        said += f"; its short rounds end after {short:,.0f} tokens instead of {before:,.0f}"
    bias = sweep.length_bias(fastest)
    return f"{said}; returned answers are {abs(bias):.1%} {'shorter' if bias < 0 else 'longer'} on average."


def notes(sweep: RoundSweep, trace: Trace | None) -> list[str]:
    """Notes on numbers that are estimated. `trace`: None if lengths are generated."""
    said = [] if trace is None else left_out(trace)
    if trace is not None:
        said.append(
            "What runs beyond the recorded candidates of a prompt (spare ones, deferred prompts, later epochs) is "
            "drawn from its recorded lengths. Record more per prompt where its tail matters."
        )
        if trace.num_stopped:
            said.append(
                f"{trace.num_stopped:,} recorded candidates were stopped, and the rest of their lengths is drawn. "
                "Record with early_stop false and without pruning to avoid that."
            )
    said += ideal_times(sweep.conditions.machine, "speculation looks cheaper than it is")
    partial = [outcome.setting.name for outcome in sweep.outcomes if not outcome.has_full_period]
    if partial:
        said.append(
            f"{', '.join(partial)}: the queue never filled a long round before the prompts ended. The mean round is "
            "one of the whole run, with the rounds that end it. Run more prompts or epochs."
        )
    return said + preemptions(sweep.outcomes)


def to_json(sweep: RoundSweep) -> dict[str, Any]:
    """All numbers of the sweep, for a program."""
    conditions = sweep.conditions
    return {
        **conditions.machine.described(),
        "num_prompts": len(conditions.data.prompts),
        "message_delay": conditions.message_s,
        "whole_epochs": conditions.whole_epochs,
        "baseline": sweep.baseline.setting.name,
        "settings": [described(sweep, outcome) for outcome in sweep.outcomes],
        "fastest": sweep.fastest.setting.name,
        "summary": summary(sweep),
    }


def described(sweep: RoundSweep, outcome: RunOutcome) -> dict[str, Any]:
    """Numbers of one setting. Rounds are lists, so that a program can draw them."""
    kinds = {kind: outcome.of(kind) for kind in ("short", "long")}
    other = sweep.responses_only_of(outcome)
    return {
        "setting": outcome.setting.described(),
        "mean_round_time": outcome.round_s,
        "time_per_prompt": outcome.prompt_s,
        "speed_up": sweep.speed_up(outcome),
        "speed_up_over_responses_only": None if other is None else other.prompt_s / outcome.prompt_s,
        "speed_up_of_run": sweep.speed_up_of_run(outcome),
        "run_time": outcome.seconds,
        "num_rounds": len(outcome.rounds),
        "has_full_period": outcome.has_full_period,
        **{
            f"{kind}_rounds": {
                "number": len(rounds),
                "mean_time": mean_seconds(rounds),
                "mean_longest": mean_of_longest(rounds),
                "least_longest": min((its.max_tokens for its in rounds), default=None),
                "p75": percentile_of_lengths(rounds, 75),
            }
            for kind, rounds in kinds.items()
        },
        "generated_tokens": outcome.generated_tokens,
        "returned_tokens": outcome.returned_tokens,
        "wasted_tokens": outcome.wasted_tokens,
        "length_bias": sweep.length_bias(outcome),
        "num_preemptions": outcome.num_preemptions,
        "num_moves": outcome.num_moves,
        "freed_rank_s": outcome.freed_rank_s,
        "fairness": asdict(fairness_of(outcome)),
        "rounds": {
            "kind": [its.kind for its in outcome.rounds],
            "is_last": [its.is_last for its in outcome.rounds],
            "time": [its.seconds for its in outcome.rounds],
            "longest": [its.max_tokens for its in outcome.rounds],
            "num_returned": [len(its.returned) for its in outcome.rounds],
        },
    }
