"""The server that a demo runs on: started with what the demo needs, stopped when the demo is over."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from rich.console import Console

from vllm_rollout.client.client import RolloutError
from vllm_rollout.demo.options import MAX_CANDIDATES
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


def described(model: str, max_tokens: int) -> str:
    return f"{model}, at most {max_tokens} tokens, {'CPU' if runs_on_cpu() else 'CUDA'}"


@contextmanager
def demo_server(name: str, console: Console) -> Iterator[ServerProcess]:
    """Ready, with its start told. Raises: RuntimeError (model, server) with what to do; KeyboardInterrupt."""
    exit_on_sigterm()
    model = resolve(name) if name in {model.name for model in list_models()} else name
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
