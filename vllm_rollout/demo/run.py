"""The demo of the race: stock vLLM, then the race; the table, the picture."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table

from vllm_rollout.demo.options import Options
from vllm_rollout.demo.phases import Phase, Way, compare_kept, run_race, run_stock
from vllm_rollout.demo.picture import draw
from vllm_rollout.demo.server import show


def run(options: Options) -> None:
    """The whole demo. Raises: as `show`."""
    ways: dict[str, Way[Phase]] = {
        f"stock: wait for all {options.candidates}": lambda http, _, over: run_stock(http, options, over),
        f"race: first {options.group_size} of {options.candidates}": lambda _, client, over: run_race(
            client, options, over
        ),
    }
    show(
        options,
        f"{options.prompts} prompts, {options.candidates} candidates each, of which a trainer keeps "
        f"{options.group_size}",
        options.questions,
        ways,
        lambda stock, race: (results_table(stock, race), compare_kept(stock, race)),
        lambda stock, race: draw(stock, race, options, options.output),
    )


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
