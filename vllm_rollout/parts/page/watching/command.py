"""The commands `vllm-rollout watch` and `vllm-rollout top`.

Invariant: importing them is light.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from vllm_rollout.parts.page.watching.export_command import export


def watch(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Files that `serve --rollout-record FILE` wrote, or is writing, or files of `simulate "
            "--output-trace FILE`."
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page. 0: any free port.")] = 7790,
    host: Annotated[str, typer.Option(help="Address of the page. 127.0.0.1 allows only this machine.")] = "127.0.0.1",
) -> None:
    """Show recorded rollouts on the page that a server has at /rollouts. The page grows with the files.

    Show a simulation beside the record that it started from:

    ```
    vllm-rollout simulate trace.jsonl --profile ptl.json --output-trace whatif.jsonl
    vllm-rollout watch trace.jsonl whatif.jsonl
    ```
    """
    import uvicorn
    from fastapi import FastAPI

    from vllm_rollout.kernel.http.origins import AllowedHosts, OwnPages
    from vllm_rollout.parts.page.http.page import page_router
    from vllm_rollout.parts.page.watching.recorded_feed import RecordedFeed

    try:
        feed = RecordedFeed(*files)
    except OSError as error:
        sys.exit(f"vllm-rollout watch: {error.filename}: {error.strerror}. Name files that `--rollout-record` wrote.")
    app = FastAPI(openapi_url=None)
    app.include_router(feed.router())
    app.add_middleware(OwnPages, allowed=AllowedHosts(bound=host, has_key=False))
    app.include_router(page_router())

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
            await super().startup()
            bound = self.servers[0].sockets[0].getsockname()[1]
            print(f"Look at http://{host}:{bound}/rollouts (Ctrl-C ends it)", flush=True)

    config = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=1)
    try:
        Server(config).run()
    except KeyboardInterrupt:
        sys.exit(130)


def top(
    url: Annotated[str, typer.Argument(help="URL of a server of `vllm-rollout serve`.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar="VLLM_API_KEY", help="Key, if the server asks for one.", show_envvar=True)
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the running rollouts once, and end.")] = False,
) -> None:
    """Show a running server in this terminal: its ranks, its rollouts, and groups with their growing candidates."""
    from vllm_rollout.kernel.client.connection import RolloutError
    from vllm_rollout.parts.page.watching.top import top as show

    try:
        show(url, api_key, once=once)
    except RolloutError as error:
        sys.exit(f"vllm-rollout top: {error.message}")
    except KeyboardInterrupt:
        sys.exit(130)


def register(app: typer.Typer) -> None:
    """Add the part's commands to the `vllm-rollout` command."""
    for command in (watch, top, export):
        app.command()(command)
