"""The whole demo: start the server, run both phases on it, print the table, draw the picture."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from collections.abc import Callable

import httpx
from rich.console import Console
from rich.table import Table

from vllm_rollout.client.client import RolloutError
from vllm_rollout.demo.options import MAX_CANDIDATES, Options
from vllm_rollout.demo.phases import Phase, compare_kept, run_phases
from vllm_rollout.demo.picture import draw
from vllm_rollout.models import list_models, resolve
from vllm_rollout.process import (
    ServerProcess,
    exit_on_sigterm,
    free_port,
    log_folder,
    runs_on_cpu,
    server_environment,
    server_flags,
)


def run(options: Options) -> None:
    """The whole demo. Raises: RuntimeError (model, server) with what to do; KeyboardInterrupt."""
    console = Console()
    exit_on_sigterm()
    in_catalogue = options.model in {model.name for model in list_models()}
    model = resolve(options.model) if in_catalogue else options.model
    console.print(
        f"[bold]vllm-rollout demo[/]: {options.prompts} prompts, {options.candidates} candidates each, of which a "
        f"trainer keeps {options.group_size}; {options.model}, at most {options.max_tokens} tokens, "
        f"{'CPU' if runs_on_cpu() else 'CUDA'}"
    )
    with log_folder() as folder:
        command = [sys.executable, "-m", "vllm_rollout.cli", "serve", model]
        command += server_flags(MAX_CANDIDATES)
        with ServerProcess(command, free_port(), server_environment(model), folder / "server.log") as server:
            with console.status("the server starts") as status:
                started_s = server.wait_until_healthy(
                    lambda seconds, line: status.update(
                        f"the server starts, {seconds:.0f} s: [dim]{textwrap.shorten(line, 90).replace('[', '(')}[/]"
                    )
                )
            console.print(f"[green]✔[/] server ready after {started_s:.0f} s ({server.url})")
            try:
                stock, race = asyncio.run(run_phases(server, options, console))
            except (httpx.TransportError, RolloutError) as error:
                raise server.lost(error) from error
            finally:
                console.print("[dim]the server stops[/]")
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
