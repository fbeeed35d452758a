"""The whole demo of the race: run both phases on a server, print the table, draw the picture."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from vllm_rollout.demo.options import Options
from vllm_rollout.demo.phases import Phase, compare_kept, run_phases
from vllm_rollout.demo.picture import draw
from vllm_rollout.demo.server import demo_server, described


def run(options: Options) -> None:
    """The whole demo. Raises: RuntimeError (model, server) with what to do; KeyboardInterrupt."""
    console = Console()
    console.print(
        f"[bold]vllm-rollout demo[/]: {options.prompts} prompts, {options.candidates} candidates each, of which a "
        f"trainer keeps {options.group_size}; {described(options.model, options.max_tokens)}"
    )
    with demo_server(options.model, console) as server:
        stock, race = asyncio.run(run_phases(server, options, console))
    console.print(results_table(stock, race))
    console.print(compare_kept(stock, race))
    draw(stock, race, options, options.output)
    console.print(f"Picture: [bold]{options.output.resolve()}[/]")


def results_table(stock: Phase, race: Phase) -> Table:
    table = Table(title="The same prompts and seeds, one after the other on one server", title_justify="left")
    table.add_column("")
    table.add_column("stock vLLM\n(waits for all)", justify="right")
    table.add_column("vllm-rollout\n(race)", justify="right", style="bold")
    table.add_column("race / stock", justify="right")

    def add(name: str, value: Callable[[Phase], float], form: str) -> None:
        before, after = value(stock), value(race)
        ratio = f"{after / before:.2f}" if before else "-"
        table.add_row(name, format(before, form), format(after, form), ratio)

    add("seconds", lambda phase: phase.seconds, ".1f")
    add("generated tokens", lambda phase: phase.generated_tokens, ",d")
    add("returned tokens", lambda phase: phase.returned_tokens, ",d")
    add("wasted tokens", lambda phase: phase.wasted_tokens, ",d")
    add("generated tokens/s", lambda phase: phase.generated_tokens / phase.seconds, ",.0f")
    add("returned tokens/s", lambda phase: phase.returned_tokens / phase.seconds, ",.0f")
    table.add_section()
    table.add_row("[bold]speed-up[/]", "1.0x", f"[bold green]{stock.seconds / race.seconds:.1f}x[/]", "")
    return table
