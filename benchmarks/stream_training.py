"""Seconds of training that overlap with a rollout, and the cost of overlapping: `python -m benchmarks.stream_training`.

Training is real: a Llama of 0.9 million parameters, float32, on one core, lengths scaled to at most `MAX_TOKENS`. The
rollout is emulated. Every candidate's next token comes at the same pace, and a group ends with the last of its wanted
candidates. The rollout takes `--ratio` times as long as training on all of it. The clock is a sum, because nothing else
runs: groups that have arrived are trained on one after the other. Each takes the CPU seconds of its one thread, which
other work on the host hardly lengthens.

Three ways are compared: a plain loop (backward of each group with 1/N, clip, step) after the rollout, `StreamTrainer`
as groups end, and `StreamTrainer` from the time at which half of the responses have ended, as on ranks that
`scale_down` frees.

Ways are measured in turns. Numbers are medians over repeats.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common import ROOT, arguments_of, median, publish, record_of_run
from benchmarks.tables import Row, columns, number, percent
from vllm_rollout.parts.page.recording.file import read_trace
from vllm_rollout.training.stream import StreamTrainer

PROMPTS, GROUP_SIZE, PROMPT_TOKENS, MAX_TOKENS = 16, 8, 16, 384


class Group(NamedTuple):
    lengths: list[int]
    """Tokens of each returned answer."""
    stopped: list[int]
    """Tokens of each stopped answer."""

    @property
    def ends_at(self) -> int:
        """Step of the rollout in which the last wanted answer ends."""
        return max(self.lengths)


def recorded(wanted: int) -> list[Group]:
    """Groups of the trace in this repository. Its answers were cut at 1,024 tokens, a third of them."""
    prompts = read_trace(ROOT / "benchmarks/traces/smollm2_math500.jsonl").rollouts[0].prompts[:PROMPTS]
    return [
        raced([-(-each.num_tokens * MAX_TOKENS // 1024) for each in prompt.candidates], wanted) for prompt in prompts
    ]


def log_normal(num_candidates: int, rng: np.random.Generator) -> list[Group]:
    """Groups with a median of 60 tokens, log deviations of 0.8 within and 0.5 between prompts, cut at `MAX_TOKENS`."""
    logs = np.log(60) + 0.5 * rng.standard_normal((PROMPTS, 1)) + 0.8 * rng.standard_normal((PROMPTS, num_candidates))
    lengths = np.clip(np.exp(logs), 1, MAX_TOKENS).astype(int)
    return [raced(row.tolist(), GROUP_SIZE) for row in lengths]


def raced(lengths: Sequence[int], wanted: int) -> Group:
    """A group whose first `wanted` candidates to end are returned. The others stop at that time."""
    first = sorted(lengths)[:wanted]
    return Group(first, [first[-1]] * (len(lengths) - wanted))


def policy() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4)
    ).eval()


def batch_of(group: Group, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids [num_samples, length], the answers' mask [num_samples, length - 1], and advantages [num_samples, 1]."""
    lengths = torch.tensor(group.lengths)
    token_ids = torch.randint(64, (len(lengths), PROMPT_TOKENS + max(group.lengths)), generator=generator)
    place = torch.arange(1, token_ids.shape[1])
    mask = (place >= PROMPT_TOKENS) & (place < PROMPT_TOKENS + lengths[:, None])
    return token_ids, mask, torch.randn(len(lengths), 1, generator=generator)


def losses_of(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    token_ids, _, advantages = batch
    logits = model(input_ids=token_ids[:, :-1]).logits
    return advantages * (logits.logsumexp(-1) - logits.gather(-1, token_ids[:, 1:, None])[..., 0])


def timed(work: Callable[[], Any]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def end_of_queue(arrivals: Sequence[float], seconds: Sequence[float], start: float = 0.0) -> float:
    """Time at which the last piece of work is done, in seconds.

    Pieces run one after the other. A piece begins after its arrival, and the first one not before `start`.
    """
    clock = start
    for arrival, each in zip(arrivals, seconds, strict=True):
        clock = max(clock, arrival) + each
    return clock


def train_both_ways(groups: list[Group], model: torch.nn.Module, turn: int) -> dict[str, Any]:
    """Seconds of a plain loop, of each `add` and of `finish`, and the gradients' largest relative difference."""
    batches = [batch_of(group, torch.Generator().manual_seed(i)) for i, group in enumerate(groups)]
    tokens = sum(int(mask.sum()) for _, mask, _ in batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    found: dict[str, Any] = {}
    gradients: dict[str, list[torch.Tensor]] = {}

    def plain() -> None:
        optimizer.zero_grad()
        for batch in batches:
            ((losses_of(model, batch) * batch[1]).sum() / tokens).backward()
        gradients["plain"] = [parameter.grad.clone() for parameter in model.parameters()]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def stream() -> None:
        trainer = StreamTrainer(model.parameters(), max_norm=None)
        trainer.begin(turn)
        found["add_s"] = [
            timed(lambda batch=batch: trainer.add(losses_of(model, batch), batch[1])) for batch in batches
        ]
        begun = time.process_time()
        trainer.finish()
        gradients["stream"] = [parameter.grad.clone() for parameter in model.parameters()]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found["finish_s"] = time.process_time() - begun

    for way in (plain, stream)[:: 1 if turn % 2 else -1]:
        seconds = timed(way)
        if way is plain:
            found["plain_s"] = seconds
    pairs = zip(gradients["plain"], gradients["stream"], strict=True)
    found["difference"] = max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)
    return found


def stream_row(name: str, groups: list[Group], model: torch.nn.Module, arguments: argparse.Namespace) -> Row:
    groups = sorted(groups, key=lambda group: group.ends_at)
    runs = [train_both_ways(groups, model, turn) for turn in range(arguments.repeats + 1)][1:]
    steps = groups[-1].ends_at
    half = sorted(length for group in groups for length in (*group.lengths, *group.stopped))
    hidden: dict[str, list[float]] = {"all": [], "freed": []}
    for run in runs:
        training = sum(run["add_s"]) + run["finish_s"]
        rollout = arguments.ratio * training
        arrivals = [group.ends_at / steps * rollout for group in groups]
        starts = {"all": 0.0, "freed": half[len(half) // 2] / steps * rollout}
        for way, start in starts.items():
            end = max(end_of_queue(arrivals, run["add_s"], start), rollout) + run["finish_s"]
            hidden[way].append((rollout + training - end) / training)
    training = median(run["plain_s"] for run in runs)
    return {
        "name": name, "plain_s": training, "cost": median(
            (sum(run["add_s"]) + run["finish_s"]) / run["plain_s"] for run in runs
        ), "hidden": median(hidden["all"]), "hidden_freed": median(hidden["freed"]),
        "step": (1 + arguments.ratio) / (1 + arguments.ratio - median(hidden["all"])),
        "difference": max(run["difference"] for run in runs), "runs": runs,
    }  # fmt: skip


def tables(record: Row) -> str:
    return columns("Stream trainer", record["stream"], {
        "rollout": lambda row: row["name"],
        "training, CPU s": lambda row: number(row["plain_s"], 2),
        "hidden": lambda row: percent(row["hidden"]),
        "hidden, from half of the responses on": lambda row: percent(row["hidden_freed"]),
        "step": lambda row: f"{number(row['step'], 2)} times faster",
        "work": lambda row: number(row["cost"], 3),
        "gradients differ by": lambda row: f"{row['difference']:.0e}",
    })  # fmt: skip


def main() -> None:
    parser = arguments_of(__doc__, "stream_training", repeats=5)
    parser.add_argument(
        "--ratio", type=float, default=2.0, help="seconds of rollout per second of training (%(default)s)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(arguments.seed)
    rollouts = {
        "recorded, 8 of 8": recorded(8), "recorded, first 4 of 8": recorded(4),
        "log-normal, 8 of 8": log_normal(8, rng), "log-normal, first 8 of 16": log_normal(16, rng),
    }  # fmt: skip
    workload = {
        "conditions": __doc__,
        "ratio": arguments.ratio,
        "lengths": {k: [g._asdict() for g in v] for k, v in rollouts.items()},
    }
    record = record_of_run(seed=arguments.seed, workload=workload)
    model = policy()
    record["stream"] = [stream_row(name, groups, model, arguments) for name, groups in rollouts.items()]
    publish(arguments, record, tables)


if __name__ == "__main__":
    main()
