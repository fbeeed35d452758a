"""In which order groups start, over HTTP: `python -m benchmarks.launch_order_served`.

Servers on an emulated device with 64 places, one per spread of lengths: 64 prompts of 8 answers, the same ones in each
epoch, with other seeds. Each epoch runs twice, with the same lengths: first with the order that is chosen, which so
knows earlier epochs only, then in that of the prompts. *ratio*: seconds of the chosen order over those of the other,
the median of the second epoch and later ones. With --model that model runs here instead, with 16 places: 16 everyday
and arithmetic prompts of 8 answers of at most 512 tokens, at temperature 1.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.common import arguments_of, median, publish, record_of_run, server_process
from benchmarks.prompts import PROMPTS as REAL_PROMPTS
from benchmarks.tables import columns, number
from vllm_rollout.client.client import RolloutClient
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.process import exit_on_sigterm, log_folder

STEP = {"ms": 8.0, "ms_per_request": 0.02}
PLACES, PROMPTS, GROUP_SIZE, MEAN_TOKENS, MAX_TOKENS = 64, 64, 8, 120, 1500
SIGMAS = ((0.5, 0.5), (1.0, 0.5), (1.0, 1.0), (0.3, 1.2))
"""Of log lengths between prompts and within them."""
MODEL_PLACES, MODEL_MAX_TOKENS = 16, 512


class Cell(NamedTuple):
    """A server, and what it is asked in each epoch."""

    named: dict[str, Any]
    model: str
    places: int
    flags: tuple[str, ...]
    prompts: list[dict[str, Any]]
    max_tokens: int


def main() -> None:
    parser = arguments_of(__doc__, "launch_order_served", seed=1, repeats=6)
    parser.add_argument("--model", help="a model's name or folder, in place of emulated devices")
    arguments = parser.parse_args()
    if arguments.repeats < 2:
        parser.error(f"--repeats: {arguments.repeats}; at least 2, since the first epoch knows no lengths.")
    exit_on_sigterm()
    workload = {
        "conditions": __doc__, "step": STEP, "places": PLACES, "prompts": PROMPTS, "group_size": GROUP_SIZE,
        "mean_tokens": MEAN_TOKENS, "max_tokens": MAX_TOKENS, "sigmas": SIGMAS,
    }  # fmt: skip
    begun = record_of_run(seed=arguments.seed, workload=workload)
    with log_folder() as folder:
        if arguments.model is None:
            cells = [emulated(sigmas, arguments.seed, folder) for sigmas in SIGMAS]
        else:
            cells = [real(arguments.model)]
        measured = [{**cell.named, "epochs": measure(cell, arguments, folder)} for cell in cells]
    publish(arguments, {**begun, "cells": measured}, tables)


def emulated(sigmas: tuple[float, float], seed: int, folder: Path) -> Cell:
    between, within = sigmas
    lengths = {"log_normal": {"mean": MEAN_TOKENS, "sigma": within, "prompt_sigma": between, "cap": MAX_TOKENS}}
    device = folder / f"device_{between}_{within}.json"
    device.write_text(json.dumps({"step": STEP, "lengths": lengths, "seed": seed}))
    prompts = [{"id": f"p{i}", "prompt_token_ids": [100, 200 + i, 300]} for i in range(PROMPTS)]
    return Cell({"sigmas": sigmas}, DEFAULT_MODEL, PLACES, ("--emulate", str(device)), prompts, MAX_TOKENS)


def real(model: str) -> Cell:
    prompts = [{"id": text, "messages": [{"role": "user", "content": text}]} for text in REAL_PROMPTS]
    return Cell({"cell": f"{model}, {MODEL_PLACES} places"}, model, MODEL_PLACES, (), prompts, MODEL_MAX_TOKENS)


def measure(cell: Cell, arguments: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    flags = ["--max-model-len", "2048", "--max-num-seqs", str(cell.places), *cell.flags]
    epochs = []
    with server_process("rollout", resolve(cell.model), flags, folder / "server.log") as server:
        server.wait_until_healthy(lambda seconds, line: None)
        with RolloutClient(server.url) as client:
            for epoch in range(arguments.repeats):
                epochs.append({order: seconds_of(client, cell, epoch, order) for order in ("auto", "prompts")})
                said = f"{name_of(cell.named)}: {epoch + 1} of {arguments.repeats}"
                Console(stderr=True).print(said, highlight=False)
    return epochs


def seconds_of(client: RolloutClient, cell: Cell, epoch: int, order: str) -> float:
    sampling = {"max_tokens": cell.max_tokens, "seed": epoch, "temperature": 1.0}
    return client.rollout(cell.prompts, GROUP_SIZE, order=order, sampling=sampling).timing.latency_s


def name_of(cell: dict[str, Any]) -> str:
    return cell["cell"] if "cell" in cell else "{}, {}".format(*cell["sigmas"])


def tables(result: dict[str, Any]) -> str:
    def ratio(cell: dict[str, Any]) -> float:
        return median(epoch["auto"] / epoch["prompts"] for epoch in cell["epochs"][1:])

    def seconds(order: str) -> Any:
        return lambda cell: number(median(epoch[order] for epoch in cell["epochs"][1:]), 2)

    cells = {
        "sigma between, within prompts": name_of,
        "as chosen, s": seconds("auto"),
        "order of prompts, s": seconds("prompts"),
        "ratio": lambda cell: number(ratio(cell), 2),
    }
    return columns("Rollouts whose groups start in the order that is chosen, over HTTP", result["cells"], cells)


if __name__ == "__main__":
    main()
