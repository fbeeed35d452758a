"""Accuracy of receipts: `python -m benchmarks.receipts`.

There is one server on an emulated device for each spread of lengths. Each seed's rollout races, the first 8 of 16 for
each of 32 prompts, and its receipt predicts the cost of waiting for all. Then the same rollout waits for all. Its
lengths are the same, because they follow from prompt and seed, and its measured cost is the truth. The receipt of the
waiting rollout also estimates the cost of a race, which is the *check*. Errors are relative: 0.1 is a tenth too much.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import arguments_of, emulated_process, median, publish, record_of_run, started
from benchmarks.tables import columns, number, percent
from vllm_rollout import RolloutClient
from vllm_rollout.process import exit_on_sigterm, log_folder

SIGMAS = (0.5, 0.9, 1.3)
"""Standard deviations of log lengths within a prompt."""
LENGTHS = {"mean": 200, "prompt_sigma": 0.5}
STEP = {"ms": 10.0, "ms_per_request": 0.02}
PROMPTS, GROUP_SIZE, REDUNDANCY, MAX_TOKENS = 32, 8, 8, 2048


def main() -> None:
    parser = arguments_of(__doc__, "receipts", seed=1, repeats=8)
    parser.add_argument("--sigmas", type=float, nargs="+", default=SIGMAS, help="of log lengths (default %(default)s)")
    arguments = parser.parse_args()
    exit_on_sigterm()
    workload = {
        "conditions": __doc__, "step": STEP, "lengths": LENGTHS, "sigmas": list(arguments.sigmas), "prompts": PROMPTS,
        "group_size": GROUP_SIZE, "redundancy": REDUNDANCY, "max_tokens": MAX_TOKENS,
    }  # fmt: skip
    begun = record_of_run(seed=arguments.seed, workload=workload)
    with log_folder() as folder:
        rows = [row for sigma in arguments.sigmas for row in measure(sigma, arguments, folder)]
    publish(arguments, {**begun, "rollouts": rows, "errors": summary(rows)}, tables)


def measure(sigma: float, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    device = {"step": STEP, "lengths": {"log_normal": {**LENGTHS, "sigma": sigma}}, "seed": arguments.seed}
    flags = ["--max-model-len", "4096", "--max-num-seqs", str(PROMPTS * (GROUP_SIZE + REDUNDANCY))]
    rows = []
    (folder / f"{sigma}").mkdir()
    with started(emulated_process(device, flags, folder / f"{sigma}")) as server, RolloutClient(server.url) as client:
        roll_out(client, 0, True)  # the first one waits for what the process imports
        for repeat in range(1, arguments.repeats + 1):
            seed = arguments.seed + repeat
            raced, waited = (roll_out(client, seed, early_stop) for early_stop in (True, False))
            rows.append({"sigma": sigma, "seed": seed, "raced": raced, "waited": waited})
            Console(stderr=True).print(f"sigma {sigma}: {repeat} of {arguments.repeats}", highlight=False)
    return rows


def roll_out(client: RolloutClient, seed: int, early_stop: bool) -> dict[str, Any]:
    """The receipt of one rollout. `seed` makes new prompts, and the lengths of their candidates."""
    prompts = [{"id": f"{seed}-{i}", "prompt_token_ids": [100 + seed, 200 + i, 300]} for i in range(PROMPTS)]
    sampling = {"max_tokens": MAX_TOKENS, "seed": seed}
    answer = client.rollout(prompts, GROUP_SIZE, REDUNDANCY, early_stop=early_stop, sampling_params=sampling)
    assert answer.receipt is not None
    return asdict(answer.receipt)


def errors_of(row: dict[str, Any]) -> dict[str, float]:
    raced, waited = row["raced"], row["waited"]
    saved = waited["generated_tokens"] - raced["generated_tokens"]
    return {
        "saved_tokens": raced["saved_tokens"] / saved - 1,
        "check": waited["saved_tokens_error"],
        "waiting_seconds": raced["waiting_seconds"] / waited["seconds"] - 1,
        "saved_seconds": raced["saved_seconds"] / (waited["seconds"] - raced["seconds"]) - 1,
    }


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation of each error over seeds, by sigma."""
    found = []
    for sigma in dict.fromkeys(row["sigma"] for row in rows):
        own = [row for row in rows if row["sigma"] == sigma]
        errors = [errors_of(row) for row in own]
        found.append({
            "sigma": sigma,
            "time_of_waiting": median(row["raced"]["seconds"] / row["waited"]["seconds"] for row in own),
            **{name: spread([each[name] for each in errors]) for name in errors[0]},
            "check_off_by": median(abs(each["saved_tokens"] - each["check"]) for each in errors),
        })  # fmt: skip
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values)}


def tables(result: dict[str, Any]) -> str:
    def error(name: str) -> Any:
        return lambda row: f"{100 * row[name]['mean']:+.0f} ± {100 * row[name]['std']:.0f} %"

    return columns(f"Errors of receipts, {PROMPTS} prompts, the first {GROUP_SIZE} of {GROUP_SIZE + REDUNDANCY}",
        result["errors"], {
        "sigma": lambda row: number(row["sigma"], 1),
        "race / waiting": lambda row: number(row["time_of_waiting"], 2),
        "`saved_tokens`": error("saved_tokens"),
        "check": error("check"),
        "check off by": lambda row: percent(row["check_off_by"]),
        "`waiting_seconds`": error("waiting_seconds"),
        "`saved_seconds`": error("saved_seconds"),
    })  # fmt: skip


if __name__ == "__main__":
    main()
