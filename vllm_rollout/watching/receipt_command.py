"""The command `vllm-rollout receipt`.

Invariant: importing it is light.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def receipt(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|URL",
            help="What `serve --rollout-record FILE` wrote, an answer of /v1/rollouts or of a round saved as JSON, or "
            "the URL of a server, which tells of its last 64 rollouts.",
        ),
    ],
    profile: Annotated[
        Path | None,
        typer.Option(
            help="What `vllm-rollout profile MODEL` wrote, for the next setting. Without it every step takes the same "
            "time, and spare candidates look cheaper than they are."
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="VLLM_API_KEY", help="If the server asks for one.", show_envvar=True)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what rollouts spent, and what stopping candidates saved against waiting for all of them.

    **Of what was recorded**, with the setting to try next:

        vllm-rollout receipt trace.jsonl --profile ptl.json

    **Of a server**, for a program:

        vllm-rollout receipt http://127.0.0.1:8000 --json

    **Counted** are tokens and seconds that passed, candidates that were stopped, and the share of places that stood
    empty until the end (*bubble*).

    **Predicted**, from lengths in which a stopped candidate counts as longer than its stop: the tokens it would still
    have generated (*saved*), and the seconds that waiting for all would have taken (*waiting*). *Error* is that of the
    same prediction where the remainder did run: in audit groups, and in rollouts that stop nobody. -10 % means that
    a tenth too few were predicted. A dash means that nobody can tell.

    **Groups of sessions** (docs/guides/agents.md) have a table of their own, of what is counted.

    **The sum** takes off what long rounds took: waiting for all in the short rounds would have left them nothing to do.

    **Next**, of a trace: the one setting that `vllm-rollout simulate` expects to save most. How right all of
    this is: docs/guides/watching.md.
    """
    from vllm_rollout.client.connection import RolloutError
    from vllm_rollout.watching.receipt import show

    try:
        show(source, profile, api_key, as_json=as_json)
    except RolloutError as error:
        sys.exit(f"vllm-rollout receipt: {error.message}")
    except (ValueError, OSError) as error:
        sys.exit(f"vllm-rollout receipt: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
