"""The command `vllm-rollout receipt`: receipts of the page, and the setting that the simulator advises.

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
            help="File that `serve --rollout-record FILE` wrote, or an answer of /v1/rollouts or of a round, saved "
            "as JSON. A server's URL is possible, too: the server reports its last 64 rollouts.",
        ),
    ],
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Profile that `vllm-rollout profile MODEL` wrote, for the next setting. Default: every step takes "
            "the same time, so spare candidates look cheaper than they are."
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="VLLM_API_KEY", help="Key, if the server asks for one.", show_envvar=True)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Report the cost of rollouts, and the savings of stopping candidates against waiting for all of them.

    **Recorded rollouts**, with the setting to try next:

        vllm-rollout receipt trace.jsonl --profile ptl.json

    **Rollouts of a server**, for a program:

        vllm-rollout receipt http://127.0.0.1:8000 --json

    **Counted:** tokens, seconds, stopped candidates, and the share of places that stood empty until the end (*bubble*).

    **Predicted:** *saved* is the number of tokens that stopped candidates would still have generated. *Waiting* is the
    time that waiting for all candidates would have taken. The prediction uses lengths in which a stopped candidate
    counts as longer than its stop.

    *Error* is the error of this prediction where the remainder did run: in audit groups, and in rollouts without stops.
    With -10 %, a tenth too few tokens were predicted. A dash means that the value is unknown.

    **Groups of sessions** (docs/guides/agents.md) have a table of their own, with counts only.

    **The sum** subtracts the cost of long rounds from the savings. If short rounds waited for all candidates, long
    rounds would have nothing to do.

    **Next** (for a trace): the setting that `vllm-rollout simulate` expects to save most. The accuracy of all these
    numbers: docs/guides/watching.md.
    """
    from rich.console import Console

    from vllm_rollout.kernel.client.connection import RolloutError
    from vllm_rollout.parts.page.watching.receipt import as_json, receipts_of, show
    from vllm_rollout.parts.shaping.rules.trace import told_reasons
    from vllm_rollout.simulator.advice import advice

    try:
        found = receipts_of(source, api_key)
        with Console(stderr=True).status("Replaying the trace with other settings"):
            following = advice(source, found, profile)
        if found.skipped:
            print(f"vllm-rollout receipt: {told_reasons(found.skipped)}.", file=sys.stderr)
        if json:
            print(as_json(source, found, following))
        else:
            show(found, following)
    except RolloutError as error:
        sys.exit(f"vllm-rollout receipt: {error.message}")
    except (ValueError, OSError) as error:
        sys.exit(f"vllm-rollout receipt: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
