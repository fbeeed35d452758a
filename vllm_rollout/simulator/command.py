"""The command `vllm-rollout simulate`.

Invariant: importing it is light. It imports its dependencies when it runs.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import typer

from vllm_rollout.kernel.parts import has
from vllm_rollout.simulator.options import SimulateOptions, takes_options
from vllm_rollout.simulator.parts import FlagError
from vllm_rollout.simulator.receipt_command import receipt

USAGE = 2
"""Exit status for flags that make no sense."""


@takes_options
def simulate(**flags: Any) -> None:
    """Predict the savings of group settings before GPU hours are spent.

    A trace has the length of every candidate. The simulator races these candidates through the engine's own decision
    code, on a clock that a profile drives. The same trace and seed give the same numbers.

    **Try it** without trace, profile or GPU:

        vllm-rollout simulate --generate prompts=64,sigma=0.9

    **For numbers to plan with**, record rollouts (with early_stop false), profile the engine, replay:

        vllm-rollout serve MODEL --rollout-record trace.jsonl
        vllm-rollout profile MODEL --output ptl.json
        vllm-rollout simulate trace.jsonl --profile ptl.json

    **Your own question** takes the place of the default sweep:

        vllm-rollout simulate trace.jsonl --setting "redundancy=2|4|8,selection=dual_end,patience=1.5"

    **Rounds** (tail batching): the savings of a run that returns 32 prompts a round, over three epochs of 256 prompts:

        vllm-rollout simulate --generate prompts=256,prompt_sigma=0.8,sigma=0.8 --rounds 32 --epochs 3
        vllm-rollout simulate trace.jsonl --profile ptl.json --rounds "prompts_per_round=8,prompt_speculation=1.25|1.5"

    **Agents**: the savings of racing conversations whose tools take 20 s on average, with a tail, and fail at times:

        vllm-rollout simulate trace.jsonl --profile ptl.json --sessions turns=4,tool_seconds=20,tool_failures=0.05

    **Drafts**: the speed-up by drafts from siblings' tokens, by the size of the batch:

        vllm-rollout simulate trace.jsonl --profile ptl.json --drafts

    **A trace** has one JSON row per rollout (a training step), or one row per prompt. The fields "ends", "scores" and
    "rewards" are optional:

        {"rollout_id": "r1", "model": "m", "group_size": 2, "max_tokens": 1024, "prompts": [
          {"id": "q1", "prompt_tokens": 31, "lengths": [412, 77, 1024], "ends": ["stop", "stop", "length"]}, …]}
        {"prompt_id": "q1", "lengths": [412, 77, 1024]}

    **Columns:** *speed-up* is against the first row, which asks for exactly group_size candidates. *Bubble*
    is the share of the peak batch that stands empty, averaged over time: places for spare candidates.
    *Mean* and *P99* are lengths of the answers that the trainer gets: "first" returns the quickest answers, dual-end
    also the longest. *Freed* is the share of all engines' time in which engines stood empty for good.

    Columns of rounds: *over resp.* is the speed-up over the same groups in rounds that wait for all their prompts.
    *waited* is a number of rounds. *length by place* is the rank correlation of a prompt's length and its round.
    """
    from vllm_rollout.simulator.simulation import run

    try:
        run(SimulateOptions(**flags))
    except FlagError as error:
        _fail(str(error), USAGE)
    except (ValueError, OSError) as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        sys.exit(130)


def register(app: typer.Typer) -> None:
    """Add the commands to the `vllm-rollout` command."""
    app.command()(simulate)
    if has("page"):
        app.command()(receipt)


def _fail(message: str, status: int) -> NoReturn:
    print(f"vllm-rollout simulate: {message}", file=sys.stderr)
    sys.exit(status)
