"""The demo of rounds: a period of plain rounds, then of tail batching, with a table and a picture."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from itertools import zip_longest
from typing import Any

from rich.table import Table

from vllm_rollout.demo.phases import Way
from vllm_rollout.demo.server import show
from vllm_rollout.parts.rounds.demo.options import QUICK, RoundsOptions
from vllm_rollout.parts.rounds.demo.picture import draw
from vllm_rollout.parts.rounds.demo.rounds import Period, Round, plain_rounds, tail_rounds


def demo(chosen: Mapping[str, Any], quick: bool) -> None:
    """Face `demo`: of rounds, with the chosen options of the command. Raises: as `RoundsOptions` and `show`."""
    if "candidates" in chosen:
        raise ValueError("--candidates is not for --rounds: a run speculates with 1.25 times --group-size")
    run(RoundsOptions(**((QUICK if quick else {}) | chosen)))


def run(options: RoundsOptions) -> None:
    """Run the whole demo. Raises: as `show`."""
    questions, terms, sampling = options.questions(), options.terms, options.sampling
    ways: dict[str, Way[Period]] = {
        "plain rounds: wait for all": lambda http, _, over: _period(
            plain_rounds(http, questions, terms, sampling, over)
        ),
        "tail batching": lambda _, client, over: _period(tail_rounds(client, questions, terms, sampling, over)),
    }
    show(
        options,
        f"rounds of {terms.prompts_per_round} prompts with {terms.group_size} trajectories each, {len(questions)} "
        "prompts in all",
        questions,
        ways,
        lambda plain, tail: (rounds_table(plain, tail),),
        lambda plain, tail: draw(plain, tail, options, options.output),
    )


async def _period(rounds: AsyncIterator[Round]) -> Period:
    return Period(tuple([each async for each in rounds]))


def _cells(its: Round | None) -> tuple[str, str, str, str]:
    """Name, seconds, longest trajectory and deferred prompts of a round in the table."""
    if its is None:
        return "", "", "", ""
    return its.name, f"{its.seconds:.1f}", str(max(its.lengths)), ", ".join(f"#{p + 1}" for p in its.deferred)


def rounds_table(plain: Period, tail: Period) -> Table:
    table = Table(title="The same prompts and seeds, one after the other on one server", title_justify="left")
    for name in ("round", "plain, s", "longest, tokens", "tail batching", "s", "longest, tokens", "deferred prompts"):
        table.add_column(name, justify="left" if name in ("tail batching", "deferred prompts") else "right")
    for number, rounds in enumerate(zip_longest(plain.rounds, tail.rounds)):
        (_, seconds, longest, _), right = map(_cells, rounds)
        table.add_row(str(number + 1), seconds, longest, *right)
    table.add_section()
    table.add_row("[bold]all[/]", f"{plain.seconds:.1f}", "", "", f"[bold]{tail.seconds:.1f}[/]", "", "")
    table.add_row("tokens", f"{plain.generated_tokens:,}", "", "", f"{tail.generated_tokens:,}", "", "")
    table.add_row("wasted", f"{plain.wasted_tokens:,}", "", "", f"{tail.wasted_tokens:,}", "", "")
    table.add_section()
    table.add_row("[bold]speed-up[/]", "1.0x", "", "", f"[bold green]{plain.seconds / tail.seconds:.2f}x[/]", "", "")
    return table
