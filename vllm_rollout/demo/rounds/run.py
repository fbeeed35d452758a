"""The whole demo of rounds: a period both ways on one server, the table, the picture."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import httpx
from rich.console import Console
from rich.table import Table

from vllm_rollout.client.client import AsyncRolloutClient
from vllm_rollout.demo.phases import phase_progress, show_phase, warm_up
from vllm_rollout.demo.rounds.options import RoundsOptions
from vllm_rollout.demo.rounds.picture import draw
from vllm_rollout.demo.rounds.rounds import Period, Round, plain_rounds, tail_rounds
from vllm_rollout.demo.server import demo_server, described
from vllm_rollout.process import ServerProcess


def run(options: RoundsOptions) -> None:
    """The whole demo. Raises: RuntimeError (model, server) with what to do; KeyboardInterrupt."""
    console = Console()
    terms = options.terms
    console.print(
        f"[bold]vllm-rollout demo[/]: rounds of {terms.prompts_per_round} prompts with {terms.group_size} trajectories "
        f"each, {len(options.questions())} prompts in all; {described(options.model, options.max_tokens)}"
    )
    with demo_server(options.model, console) as server:
        plain, tail = asyncio.run(run_periods(server, options, console))
    console.print(rounds_table(plain, tail))
    draw(plain, tail, options, options.output)
    console.print(f"Picture: [bold]{options.output.resolve()}[/]")


async def run_periods(server: ServerProcess, options: RoundsOptions, console: Console) -> tuple[Period, Period]:
    """Plain rounds, then tail batching, with the same prompts and seeds."""
    questions, terms, sampling = options.questions(), options.terms, options.sampling
    progress = phase_progress(console)
    rows = [
        progress.add_task(name, total=len(questions), start=False, tokens="", running="")
        for name in ("plain rounds: wait for all", "tail batching")
    ]
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=None, trust_env=False) as client,
        # With a transport of its own it asks no proxy for a server on this machine.
        AsyncRolloutClient(server.url, transport=httpx.AsyncHTTPTransport()) as rollouts,
    ):
        await warm_up(client, questions)

        async def plain(on_group: Callable[[], None]) -> Period:
            return await _period(plain_rounds(client, questions, terms, sampling, on_group))

        async def tail(on_group: Callable[[], None]) -> Period:
            return await _period(tail_rounds(rollouts, questions, terms, sampling, on_group))

        with progress:
            return (
                await show_phase(plain, client, server, progress, rows[0]),
                await show_phase(tail, client, server, progress, rows[1]),
            )


async def _period(rounds: AsyncIterator[Round]) -> Period:
    return Period(tuple([each async for each in rounds]))


@dataclass(frozen=True, slots=True)
class _Cells:
    """A round in the table."""

    name: str
    seconds: str
    longest: str
    deferred: str

    @classmethod
    def of(cls, period: Period, number: int) -> _Cells:
        if number >= len(period.rounds):
            return cls("", "", "", "")
        its = period.rounds[number]
        return cls(its.name, f"{its.seconds:.1f}", str(max(its.lengths)), ", ".join(f"#{p + 1}" for p in its.deferred))


def rounds_table(plain: Period, tail: Period) -> Table:
    table = Table(title="The same prompts and seeds, one after the other on one server", title_justify="left")
    for name in ("round", "plain, s", "longest, tokens", "tail batching", "s", "longest, tokens", "deferred prompts"):
        table.add_column(name, justify="left" if name in ("tail batching", "deferred prompts") else "right")
    for number in range(max(len(plain.rounds), len(tail.rounds))):
        left, right = _Cells.of(plain, number), _Cells.of(tail, number)
        cells = (left.seconds, left.longest, right.name, right.seconds, right.longest, right.deferred)
        table.add_row(str(number + 1), *cells)
    table.add_section()
    table.add_row("[bold]all[/]", f"{plain.seconds:.1f}", "", "", f"[bold]{tail.seconds:.1f}[/]", "", "")
    table.add_row("tokens", f"{plain.generated_tokens:,}", "", "", f"{tail.generated_tokens:,}", "", "")
    table.add_row("wasted", f"{plain.wasted_tokens:,}", "", "", f"{tail.wasted_tokens:,}", "", "")
    table.add_section()
    table.add_row("[bold]speed-up[/]", "1.0x", "", "", f"[bold green]{plain.seconds / tail.seconds:.2f}x[/]", "", "")
    return table
