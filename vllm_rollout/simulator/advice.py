"""The setting to try next: the newest rollouts of a trace are replayed with others than theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from vllm_rollout.parts.page.watching.receipt import Found, Next
from vllm_rollout.parts.shaping.rules.trace import Trace
from vllm_rollout.simulator.clock import clock_of
from vllm_rollout.simulator.options import SimulateOptions
from vllm_rollout.simulator.race import Pools
from vllm_rollout.simulator.replay import sweep
from vllm_rollout.simulator.settings import Setting, default_sweep

MAX_REPLAYED = 8
"""Number of the newest rollouts that are replayed to find the next setting."""
HARDLY_LESS = 0.02
"""Share of time by which a better setting must be faster."""


def advice(source: str, found: Found, profile: Path | None) -> Next | str | None:
    """The setting to try next, or the reason why none is known. None for a source that cannot be replayed.

    Raises: OSError for an unreadable profile.
    """
    if found.trace is None:
        return None
    try:
        options = SimulateOptions(Path(source), profile=profile, data_parallel_size=found.num_ranks)
        return next_setting(found.trace, options, found.sum.seconds)
    except ValueError as error:
        return f"not known: {error} (`vllm-rollout simulate` has these flags)."


def next_setting(trace: Trace, options: SimulateOptions, seconds: float | None) -> Next | str:
    """The setting with which the trace's newest rollouts are replayed fastest, or the reason why there is none.

    Raises: ValueError and OSError for a profile that cannot be read.
    """
    if trace.group_size is None:
        return "not known, since the trace does not say one group_size. See vllm-rollout simulate --group-size."
    newest = replace(trace, rollouts=trace.rollouts[-MAX_REPLAYED:])
    clock = clock_of(options, trace.models, trace.longest_context)
    recorded = _recorded(newest, trace.group_size)
    tried = default_sweep(trace.group_size, clock.machine.max_candidates)
    its = sweep(Pools(newest), list(dict.fromkeys([recorded, *tried])), clock.machine)
    best = its.fastest
    share = 1 - best.seconds / its.baseline.seconds
    if share < HARDLY_LESS:
        return f"nothing that was tried is {HARDLY_LESS:.0%} faster than {recorded.name}."
    fields = ("redundancy", "selection", "num_longest", "patience", "early_stop")
    before, after = recorded.described(), best.setting.described()
    text = (
        f"{best.setting.name} instead of {recorded.name} would take {share:.0%} less time; answers are "
        f"{its.baseline.lengths.mean:,.0f} -> {best.lengths.mean:,.0f} tokens long on average."
    )
    if clock.machine.is_ideal:
        text += " Every step counted the same: give a --profile, since spare candidates cost time, too."
    return Next(
        {name: after[name] for name in fields if after[name] != before[name]},
        None if seconds is None else share * seconds,
        text,
    )


def _recorded(trace: Trace, group_size: int) -> Setting:
    """The recorded setting, as far as the trace shows it."""
    spare = max(len(prompt.candidates) for prompt in trace.prompts) - group_size
    raced = any(candidate.end == "surplus" for prompt in trace.prompts for candidate in prompt.candidates)
    return Setting(group_size, max(spare, 0), early_stop=None if raced or spare <= 0 else False)
