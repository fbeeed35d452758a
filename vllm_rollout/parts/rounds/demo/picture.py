"""Picture of the demo of rounds: both ways on one axis of seconds, a row per prompt of a round.

Invariant: a bar ends where its prompt was complete or deferred. A frame ends where its round was over.
"""

from __future__ import annotations

from pathlib import Path

from vllm_rollout.demo.picture import AVOIDED_STYLE as IDLE
from vllm_rollout.demo.picture import only_bottom
from vllm_rollout.drawing import INK, figure_at
from vllm_rollout.parts.rounds.demo.options import RoundsOptions
from vllm_rollout.parts.rounds.demo.rounds import Period, ReturnedGroup, Round

OWN_ROUND = "#0f766e"
LATER = "#f59e0b"
LABELS = {"plain": "round", "short": "short", "long": "long"}


def draw(plain: Period, tail: Period, options: RoundsOptions, path: Path) -> None:
    """Draw plain rounds above and tail batching below, each with its seconds. Writes the file `path`."""
    from matplotlib.patches import Patch

    later = tail.deferred
    longest_s = max(plain.seconds, tail.seconds)
    path.parent.mkdir(parents=True, exist_ok=True)
    with figure_at(path, (14, 8.6), {"font.size": 10, "xtick.color": INK}) as figure:
        panels = figure.subplots(2, 1, sharex=True)
        figure.subplots_adjust(left=0.02, right=0.985, top=0.80, bottom=0.125, hspace=0.34)
        figure.text(0.02, 0.945, _headline(plain, tail), size=19, weight="bold")
        figure.text(
            0.02, 0.905, f"{len(options.questions())} prompts x {options.group_size} trajectories in rounds of "
            f"{options.prompts} prompts, at most {options.max_tokens} tokens, {Path(options.model).name}, same server, "
            "prompts and seeds. Numbers are prompts.",
            size=10.5,
        )  # fmt: skip
        terms = options.terms
        batching = (
            f"tail batching: {terms.num_prompts} prompts start, the first {terms.prompts_per_round} end the round, the "
            "others wait for the long one"
        )
        how = ("plain rounds: each waits for its slowest prompt", batching)
        for axes, period, title in zip(panels, (plain, tail), how, strict=True):
            _draw_period(axes, period, later, longest_s)
            waste = period.wasted_tokens / period.generated_tokens
            text = f"{title}. {period.seconds:.1f} s, {period.generated_tokens:,} tokens, {waste:.0%} wasted"
            axes.set_title(text, loc="left", fontsize=11.5, weight="bold", pad=34)
        panels[0].tick_params(labelbottom=False)
        panels[1].set_xlabel("seconds of rollout, rounds one after the other", color=INK)
        figure.legend(
            handles=[
                Patch(color=OWN_ROUND, label="prompt that its round returned"),
                Patch(color=LATER, label="prompt that tail batching deferred to the long round"),
                Patch(label="complete, and its round is not over", **IDLE),
            ],
            loc="lower center", ncols=3, frameon=False, fontsize=10.5,
        )  # fmt: skip


def _headline(plain: Period, tail: Period) -> str:
    ratio = plain.seconds / tail.seconds
    kinds = [each.name for each in tail.rounds]
    rounds = f"{kinds.count('short')} short rounds and {kinds.count('long')} long instead of {len(plain.rounds)}"
    if ratio < 1:
        return f"{rounds} plain ones: {1 / ratio:.2f} times slower here"
    return f"{rounds} plain ones: {ratio:.1f} times faster"


def _draw_period(axes, period: Period, later: set[int], longest_s: float) -> None:
    num_rows = max(len(each.groups) for each in period.rounds)
    start = 0.0
    for each in period.rounds:
        _draw_round(axes, each, start, later, num_rows, longest_s)
        start += each.seconds
    axes.set_xlim(0, 1.001 * longest_s)
    axes.set_ylim(num_rows - 0.4, -0.6)
    only_bottom(axes)


def _draw_round(axes, each: Round, start: float, later: set[int], num_rows: int, longest_s: float) -> None:
    for row, group in enumerate(sorted(each.groups, key=lambda group: (group.is_deferred, group.seconds))):
        color = LATER if group.prompt in later else OWN_ROUND
        axes.barh(row, each.seconds, left=start, height=0.78, **IDLE)
        axes.barh(row, group.seconds, left=start, height=0.78, color=color)
        _name_prompt(axes, group, start, row, longest_s)
    end = start + each.seconds
    for edge in (start, end):
        axes.axvline(edge, color=INK, lw=2)
    axes.text(
        start + each.seconds / 2, -0.72, f"{LABELS[each.name]}\n{each.seconds:.1f} s", ha="center", va="bottom",
        size=9, linespacing=1.1, color=INK, weight="bold" if each.name == "long" else "normal", clip_on=False,
    )  # fmt: skip


def _name_prompt(axes, group: ReturnedGroup, start: float, row: int, longest_s: float) -> None:
    """Write a prompt's number in its bar, or behind a short bar."""
    is_inside = group.seconds > 0.02 * longest_s
    axes.text(
        start + (0.002 * longest_s if is_inside else group.seconds + 0.002 * longest_s), row, str(group.prompt + 1),
        va="center", ha="left", size=7.5, color="white" if is_inside and not group.is_deferred else INK,
    )  # fmt: skip
