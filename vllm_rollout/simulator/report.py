"""Tables, recommendation and notes of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import floor, log10
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from vllm_rollout.parts.shaping.rules.trace import Trace, told_reasons
from vllm_rollout.simulator.machine import Machine, duration
from vllm_rollout.simulator.outcome import SimulationOutcome, Sweep

HARDLY_FASTER = 1.02
"""Speed-up below which a setting is not recommended."""

LENGTHS = ("mean", "std", "P50", "P90", "P99")

Column = tuple[str, Callable[[SimulationOutcome], str]]


def tables(sweep: Sweep) -> list[Table]:
    """Tables of time and tokens, and of the answers that the trainer gets."""
    steps = "\nin steps" if sweep.machine.is_ideal else ""
    costs: list[Column] = [
        (f"time{steps}", lambda o: _time(o.seconds, sweep)),
        ("speed-up", lambda o: f"{sweep.speed_up(o):.2f}x"),
        ("first\ngroup", lambda o: _time(o.time_to_first_group_s, sweep)),
        ("candidates\nper prompt", lambda o: f"{o.candidates_per_prompt:.1f}"),
        ("tokens\ngenerated", lambda o: count(o.generated_tokens)),
        ("tokens\nreturned", lambda o: count(o.returned_tokens)),
        ("wasted", lambda o: f"{o.wasted_tokens / o.generated_tokens:.0%}"),
        ("bubble", lambda o: f"{o.bubble:.0%}"),
    ]
    lengths: list[Column] = [
        *((name, lambda o, name=name: f"{getattr(o.lengths, name.lower()):,.0f}") for name in LENGTHS),
        ("cut at\nmax_tokens", lambda o: f"{o.truncated_share:.1%}"),
    ]
    if any(outcome.incomplete_share for outcome in sweep.outcomes):
        lengths.append(("groups\nincomplete", lambda o: f"{o.incomplete_share:.1%}"))
    if any(outcome.setting.redundancy == "auto" for outcome in sweep.outcomes):
        lengths.append(("at upper\nbound", lambda o: f"{o.upper_bound_share:.1%}"))
    if any(outcome.num_pruned for outcome in sweep.outcomes):
        lengths.append(("candidates\npruned", lambda o: f"{o.num_pruned / o.num_candidates:.1%}"))
    moves: list[Column] = [
        ("groups\nmoved", lambda o: f"{o.num_moves:,}"),
        ("busy", lambda o: f"{o.busy_share:.0%}"),
        ("freed", lambda o: f"{o.freed_share:.0%}"),
    ]
    sessions: list[Column] = [
        (f"time{steps}", lambda o: _time(o.seconds / o.num_rollouts, sweep)),
        ("tokens\ngenerated", lambda o: count(round(o.generated_tokens / o.num_rollouts))),
        ("tokens\nwasted", lambda o: count(round(o.wasted_tokens / o.num_rollouts))),
        ("turns\nper session", lambda o: f"{o.num_turns / o.num_candidates:.1f}"),
        ("void", lambda o: f"{o.num_void / o.num_candidates:.1%}"),
    ]
    told = [("Time and tokens", costs), ("What the trainer gets: tokens of returned answers", lengths)]
    told += [("Time of all engines", moves)] if sweep.machine.moves_groups else []
    told += [("Sessions, per rollout", sessions)] if sweep.baseline.num_turns else []
    best = (sweep.fastest, sweep.fastest_with_longest)
    return [table_of(title, columns, sweep.outcomes, best) for title, columns in told]


def table_of(
    title: str, columns: Sequence[tuple[str, Callable[[Any], str]]], outcomes: Sequence[Any], best: Sequence[Any]
) -> Table:
    """Table with a row per outcome. A column has a header and a function of its cells. Outcomes in `best` are bold."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name, value in columns:
        widest = max(map(len, [*name.split("\n"), *map(value, outcomes)]))
        table.add_column(name, justify="right", no_wrap=True, min_width=widest)
    for outcome in outcomes:
        style = "bold" if any(outcome is each for each in best) else ""
        table.add_row(escape(outcome.setting.name), *(value(outcome) for _, value in columns), style=style)
    return table


def count(tokens: int) -> str:
    """Number of tokens as text with three figures, such as "1.23 M"."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if tokens >= size:
            value = tokens / size
            return f"{value:,.{max(0, 2 - floor(log10(value)))}f} {letter}"
    return str(tokens)


def _time(value: float, sweep: Sweep) -> str:
    """Time as text. If the unit is steps, the table's header says so."""
    return f"{value:,.0f}" if sweep.machine.is_ideal else duration(value, in_steps=False)


def recommendation(sweep: Sweep) -> str:
    """Sentence with the setting to take, its speed-up and its change of lengths."""
    baseline, fastest, keeping = sweep.baseline, sweep.fastest, sweep.fastest_with_longest
    if sweep.speed_up(fastest) < HARDLY_FASTER:
        said = (
            f"Nothing that was tried is faster than {baseline.setting.name}: here the steps that early stop saves do "
        )
        said += "not make up for those that spare candidates make longer."
    else:
        said = f"Fastest: {fastest.setting.name}, {sweep.speed_up(fastest):.2f}x; answers are "
        said += _shift(baseline, fastest) + "."
    if keeping is None:
        return said
    if keeping is fastest:
        return f"{said} It keeps long answers, too."
    return (
        f"{said} Of those that keep long answers: {keeping.setting.name}, {sweep.speed_up(keeping):.2f}x, "
        f"{_shift(baseline, keeping)}."
    )


def _shift(baseline: SimulationOutcome, outcome: SimulationOutcome) -> str:
    before, after = baseline.lengths, outcome.lengths
    return (
        f"{before.mean:,.0f} -> {after.mean:,.0f} tokens long on average ({_change(before.mean, after.mean)}), "
        f"P99 {before.p99:,.0f} -> {after.p99:,.0f}"
    )


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.0%}" if before else "-"


def notes(sweep: Sweep, trace: Trace) -> list[str]:
    """Notes on numbers that are estimated instead of recorded."""
    said = ideal_times(sweep.machine, "spare candidates look cheaper than they are")
    if (staying := sweep.without_moves) is not None:
        moved = sweep.baseline
        said.append(
            f"If groups stayed on their engines, {moved.setting.name} would take "
            f"{duration(staying.seconds, sweep.machine.is_ideal)}, not "
            f"{duration(moved.seconds, sweep.machine.is_ideal)} ({_change(staying.seconds, moved.seconds)}). Freed: "
            f"{moved.freed_share:.0%} of the engines' time."
        )
    said += left_out(trace)
    if trace.num_stopped:
        most = max(outcome.num_drawn for outcome in sweep.outcomes)
        total = sum(len(prompt.candidates) for prompt in trace.prompts)
        said.append(
            f"{trace.num_stopped:,} of {total:,} recorded candidates were stopped, so that their length is not known: "
            "the rest is drawn from a log-normal distribution fitted to their prompt, for up to "
            f"{most:,} candidates of a setting. Record with early_stop false and without pruning to avoid that."
        )
    resampled = [outcome for outcome in sweep.outcomes if outcome.num_resampled]
    if resampled:
        most = max(outcome.num_resampled / outcome.num_candidates for outcome in resampled)
        said.append(
            f"{len(resampled)} of {len(sweep.outcomes)} settings want more candidates than the trace has: these are "
            f"candidates of the same prompt once more, up to {most:.0%} of a setting's. Record more per prompt to "
            "avoid that."
        )
    for outcome in sweep.outcomes:
        if outcome.num_without_history:
            said.append(
                f"{outcome.setting.name}: nothing was known of {outcome.num_without_history:,} of "
                f"{outcome.num_groups:,} prompts when they came, which then all count alike. Prompts that come again, "
                "recorded or with --epochs, have a history."
            )
            break
    for outcome in sweep.outcomes:
        if outcome.setting.pruning is not None and not outcome.num_pruned:
            said.append(
                f"{outcome.setting.name}: nobody was pruned. It takes scores, and rewards of earlier rollouts: at "
                f"least {outcome.setting.pruning.min_labels} of either kind (min_labels)."
            )
    return said + preemptions(sweep.outcomes)


def ideal_times(machine: Machine, what_looks_cheap: str) -> list[str]:
    """Note that times without a profile are steps. Empty with a profile."""
    if not machine.is_ideal:
        return []
    slow = "No --profile: every step takes the same time, whatever is in it. Times are in steps, not seconds, and"
    return [f"{slow} {what_looks_cheap}."]


def preemptions(outcomes: Sequence[Any]) -> list[str]:
    most = max(outcome.num_preemptions for outcome in outcomes)
    return [f"The KV cache was too small for what ran; most preemptions in a setting: {most:,}."] if most else []


def left_out(trace: Trace) -> list[str]:
    """Notes on the parts of the trace that are not replayed."""
    said = [told_reasons(trace.skipped) + "."] if trace.skipped else []
    if trace.num_failed:
        said.append(f"{trace.num_failed:,} candidates that failed are left out.")
    if trace.num_empty:
        said.append(f"{trace.num_empty:,} prompts none of whose candidates had a token are left out.")
    if trace.others:
        said.append(f"Left out: {trace.others}.")
    return said


def to_json(sweep: Sweep, trace: Trace) -> dict[str, Any]:
    """All numbers of the sweep, for a program."""
    keeping = sweep.fastest_with_longest
    return {
        **sweep.machine.described(),
        "num_rollouts": len(trace.rollouts),
        "num_prompts": len(trace.prompts),
        "without_moves": None if sweep.without_moves is None else sweep.without_moves.to_json(),
        "baseline": sweep.baseline.setting.name,
        "settings": [{**outcome.to_json(), "speed_up": sweep.speed_up(outcome)} for outcome in sweep.outcomes],
        "fastest": sweep.fastest.setting.name,
        "fastest_with_longest": None if keeping is None else keeping.setting.name,
        "recommendation": recommendation(sweep),
    }
