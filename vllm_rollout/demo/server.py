"""What both demos share: a server with what they need, the two ways on it, and what is shown of them."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import httpx
from rich.console import Console, RenderableType

from vllm_rollout.client.client import RolloutError
from vllm_rollout.demo.options import MAX_CANDIDATES, DemoOptions
from vllm_rollout.demo.phases import PhaseType, Way, run_phases
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


def show(
    options: DemoOptions,
    what: str,
    questions: Sequence[str],
    ways: Mapping[str, Way[PhaseType]],
    results: Callable[[PhaseType, PhaseType], Iterable[RenderableType]],
    draw: Callable[[PhaseType, PhaseType], None],
) -> None:
    """A whole demo: both ways on one server, what they came to, the picture.

    Raises: RuntimeError (model, server) with what to do; KeyboardInterrupt.
    """
    console = Console()
    device = "CPU" if runs_on_cpu() else "CUDA"
    console.print(f"[bold]vllm-rollout demo[/]: {what}; {options.model}, at most {options.max_tokens} tokens, {device}")
    with demo_server(options.model, console) as server:
        before, after = asyncio.run(run_phases(server, console, questions, ways))
    for each in results(before, after):
        console.print(each)
    draw(before, after)
    console.print(f"Picture: [bold]{options.output.resolve()}[/]")


@contextmanager
def demo_server(name: str, console: Console) -> Iterator[ServerProcess]:
    """Ready, with its start told. Raises: RuntimeError (model, server) with what to do; KeyboardInterrupt."""
    exit_on_sigterm()
    model = resolve(name)
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
                yield server
            except (httpx.TransportError, RolloutError) as error:
                raise server.lost(error) from error
            finally:
                console.print("[dim]the server stops[/]")
