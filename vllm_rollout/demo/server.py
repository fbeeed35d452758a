"""Parts that both demos share: their server, both ways on it, and the output."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import httpx
from rich.console import Console, RenderableType

from vllm_rollout import AsyncRolloutClient, RolloutError, on_cpu
from vllm_rollout.demo.clock import Clock
from vllm_rollout.demo.options import MAX_CANDIDATES, DemoOptions
from vllm_rollout.demo.phases import Begin, PhaseType, Way, run_phases
from vllm_rollout.models import resolve
from vllm_rollout.process import (
    ServerProcess,
    exit_on_sigterm,
    free_port,
    log_folder,
    runs_on_cpu,
    server_environment,
    server_flags,
)


async def no_beginning(client: AsyncRolloutClient, clock: Clock) -> Mapping[str, float]:
    """A beginning that does nothing and expects no times."""
    return {}


def show(
    options: DemoOptions,
    what: str,
    questions: Sequence[str],
    ways: Mapping[str, Way[PhaseType]],
    results: Callable[[PhaseType, PhaseType], Iterable[RenderableType]],
    write: Callable[[PhaseType, PhaseType], None],
    begin: Begin = no_beginning,
) -> None:
    """Run a whole demo: both ways on one server, their results, and the files that `write` writes.

    Raises: RuntimeError (model, server) with what to do. OSError for a file. KeyboardInterrupt.
    """
    console = Console()
    clock = Clock(console)
    clock.say(f"[bold]vllm-rollout demo[/]: {what}; {options.model}, at most {options.max_tokens} tokens")
    environment = server_environment(options.model)
    clock.say(device_chosen(environment))
    with demo_server(options.model, environment, clock) as server:
        before, after = asyncio.run(run_phases(server, clock, questions, ways, begin))
    for each in results(before, after):
        console.print(each)
    write(before, after)
    clock.say(f"picture: [bold]{options.output.resolve()}[/]")


def device_chosen(environment: Mapping[str, str]) -> str:
    """Description of the server's device and of the settings chosen for it."""
    if not runs_on_cpu():
        return "CUDA, as vLLM chooses"
    return f"{on_cpu.this_cpu().summary}; KV cache {environment[on_cpu.KV_SPACE]} GiB"


@contextmanager
def demo_server(name: str, environment: Mapping[str, str], clock: Clock) -> Iterator[ServerProcess]:
    """A ready server, whose start is printed. Raises: RuntimeError (model, server) with what to do.
    KeyboardInterrupt."""
    exit_on_sigterm()
    model = resolve(name)
    clock.say("the server starts: about 20 s on two cores")
    with log_folder() as folder:
        command = [sys.executable, "-m", "vllm_rollout.cli", "serve", model]
        command += server_flags(MAX_CANDIDATES)
        with ServerProcess(command, free_port(), environment, folder / "server.log") as server:
            with clock.console.status("the server starts") as status:
                started_s = server.wait_until_healthy(
                    lambda seconds, line: status.update(
                        f"the server starts, {seconds:.0f} s: [dim]{textwrap.shorten(line, 90).replace('[', '(')}[/]"
                    )
                )
            clock.say(f"server ready after {started_s:.0f} s ({server.url})")
            try:
                yield server
            except (httpx.TransportError, RolloutError) as error:
                raise server.lost(error) from error
            finally:
                clock.say("the server stops")
