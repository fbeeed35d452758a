"""In which order groups start, over HTTP: `python -m benchmarks.launch_order_served`.

Servers on an emulated device with 64 places, one per spread of lengths: 64 prompts of 8 answers, the same ones in each
epoch, with other seeds. Each epoch runs twice, with the same lengths: first with the order that is chosen, which so
knows earlier epochs only, then in that of the prompts. *ratio*: seconds of the chosen order over those of the other,
the median of the second epoch and later ones.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import arguments_of, median, publish, record_of_run, server_process
from benchmarks.tables import columns, number
from vllm_rollout.client.client import RolloutClient
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.process import exit_on_sigterm, log_folder

STEP = {"ms": 8.0, "ms_per_request": 0.02}
PLACES, PROMPTS, GROUP_SIZE, MEAN_TOKENS, MAX_TOKENS = 64, 64, 8, 120, 1500
SIGMAS = ((0.5, 0.5), (1.0, 0.5), (1.0, 1.0), (0.3, 1.2))
"""Of log lengths between prompts and within them."""


def main() -> None:
    arguments = arguments_of(__doc__, "launch_order_served", seed=1, repeats=6).parse_args()
    exit_on_sigterm()
    workload = {
        "conditions": __doc__, "step": STEP, "places": PLACES, "prompts": PROMPTS, "group_size": GROUP_SIZE,
        "mean_tokens": MEAN_TOKENS, "max_tokens": MAX_TOKENS, "sigmas": SIGMAS,
    }  # fmt: skip
    begun = record_of_run(seed=arguments.seed, workload=workload)
    with log_folder() as folder:
        cells = [{"sigmas": sigmas, "epochs": measure(sigmas, arguments, folder)} for sigmas in SIGMAS]
    publish(arguments, {**begun, "cells": cells}, tables)


def measure(sigmas: tuple[float, float], arguments: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    between, within = sigmas
    name = f"{between}_{within}"
    lengths = {"log_normal": {"mean": MEAN_TOKENS, "sigma": within, "prompt_sigma": between, "cap": MAX_TOKENS}}
    device = folder / f"device_{name}.json"
    device.write_text(json.dumps({"step": STEP, "lengths": lengths, "seed": arguments.seed}))
    flags = ["--max-model-len", "2048", "--max-num-seqs", str(PLACES), "--emulate", str(device)]
    epochs = []
    with server_process("rollout", resolve(DEFAULT_MODEL), flags, folder / f"server_{name}.log") as server:
        server.wait_until_healthy(lambda seconds, line: None)
        with RolloutClient(server.url) as client:
            for epoch in range(arguments.repeats):
                epochs.append({order: seconds_of(client, epoch, order) for order in ("auto", "prompts")})
                Console(stderr=True).print(f"sigma {name}: {epoch + 1} of {arguments.repeats}", highlight=False)
    return epochs


def seconds_of(client: RolloutClient, epoch: int, order: str) -> float:
    prompts = [{"id": f"p{i}", "prompt_token_ids": [100, 200 + i, 300]} for i in range(PROMPTS)]
    sampling = {"max_tokens": MAX_TOKENS, "seed": epoch}
    return client.rollout(prompts, GROUP_SIZE, order=order, sampling=sampling).timing.latency_s


def tables(result: dict[str, Any]) -> str:
    def ratio(cell: dict[str, Any]) -> float:
        return median(epoch["auto"] / epoch["prompts"] for epoch in cell["epochs"][1:])

    def seconds(order: str) -> Any:
        return lambda cell: number(median(epoch[order] for epoch in cell["epochs"][1:]), 2)

    cells = {
        "sigma between, within": lambda cell: "{}, {}".format(*cell["sigmas"]),
        "as chosen, s": seconds("auto"),
        "order of prompts, s": seconds("prompts"),
        "ratio": lambda cell: number(ratio(cell), 2),
    }
    return columns("Rollouts whose groups start in the order that is chosen, over HTTP", result["cells"], cells)


if __name__ == "__main__":
    main()
