"""Seconds of training that disappear behind a rollout, and what that costs: `python -m benchmarks.stream_training`.

Training is real: a Llama of 0.9 million parameters, float32, on one core, lengths scaled to at most `MAX_TOKENS`. The
rollout is emulated: every candidate's next token comes at the same pace, a group ends with the last of its candidates
that is wanted, and the rollout takes `--ratio` times as long as training all of it. Nothing else runs, so the clock is
a sum: what has come is worked on, one after the other, and each piece takes the CPU seconds of its one thread, which
other work on the host does not lengthen much.

- Stream trainer: a plain loop (backward of each group with 1/N, clip, step) after the rollout, against `StreamTrainer`
  as groups end, and against one that starts when half of the responses have ended, as on ranks that `scale_down` frees.
- Incremental forward: log probabilities of all trajectories after the rollout, group by group, against passes over each
  `PASS_TOKENS` new tokens while it runs; and the same with the graph kept for a backward pass, where whole groups go
  forward and backward one after the other. Saved are the bytes that autograd keeps at most, each storage once.
- Precision: the same weights in bfloat16, gradients of groups of 4 short answers; how far their sum is from the exact
  sum of the same gradients, as a share of its norm, and how far that is from the gradient in float32.

Ways are measured in turns; numbers are medians over repeats.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common import ROOT, arguments_of, median, publish, record_of_run
from benchmarks.tables import Row, columns, number, percent
from vllm_rollout.trace.file import read_trace
from vllm_rollout.training.incremental import IncrementalLogprobs
from vllm_rollout.training.stream import StreamTrainer

PROMPTS, GROUP_SIZE, PROMPT_TOKENS, MAX_TOKENS = 16, 8, 16, 384
PASS_TOKENS = (128, 512, 2048)
GROUPS_AT_ONCE = 4
"""Of the incremental forward's rollout: 32 candidates that grow together."""


class Group(NamedTuple):
    lengths: list[int]
    """Tokens of the answers that come back."""
    stopped: list[int]
    """Tokens of those that were stopped."""

    @property
    def ends_at(self) -> int:
        """Steps after the rollout's start."""
        return max(self.lengths)


def recorded(wanted: int) -> list[Group]:
    """Of the trace in this repository; its answers were cut at 1,024 tokens, a third of them."""
    prompts = read_trace(ROOT / "benchmarks/traces/smollm2_math500.jsonl").rollouts[0].prompts[:PROMPTS]
    return [
        raced([-(-each.num_tokens * MAX_TOKENS // 1024) for each in prompt.candidates], wanted) for prompt in prompts
    ]


def log_normal(num_candidates: int, rng: np.random.Generator) -> list[Group]:
    """Median 60 tokens, log deviations of 0.8 within and 0.5 between prompts, cut at `MAX_TOKENS`."""
    logs = np.log(60) + 0.5 * rng.standard_normal((PROMPTS, 1)) + 0.8 * rng.standard_normal((PROMPTS, num_candidates))
    lengths = np.clip(np.exp(logs), 1, MAX_TOKENS).astype(int)
    return [raced(row.tolist(), GROUP_SIZE) for row in lengths]


def raced(lengths: Sequence[int], wanted: int) -> Group:
    """The first to end come back; the others stop then."""
    first = sorted(lengths)[:wanted]
    return Group(first, [first[-1]] * (len(lengths) - wanted))


def policy() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4)
    ).eval()


def batch_of(group: Group, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, the answers' mask, and advantages: [num_samples, length], the same less one, [num_samples, 1]."""
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
    """When the last piece is done: each after the one before, none before it has come, the first not before `start`."""
    clock = start
    for arrival, each in zip(arrivals, seconds, strict=True):
        clock = max(clock, arrival) + each
    return clock


def train_both_ways(groups: list[Group], model: torch.nn.Module, turn: int) -> dict[str, Any]:
    """Seconds of a plain loop, of each `add` and of `finish`; the largest relative difference of their gradients."""
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


def summed(model: torch.nn.Module, batches: list[tuple[torch.Tensor, ...]], float32_sums: bool = True) -> torch.Tensor:
    """The flat gradient of a step, normalized by tokens."""
    trainer = StreamTrainer(model.parameters(), float32_sums=float32_sums)
    trainer.begin(0)
    for batch in batches:
        trainer.add(losses_of(model, batch), batch[1])
    trainer.finish()
    return torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])


def precision_row(num_groups: int) -> Row:
    batches = [batch_of(Group([24, 32, 20, 28], []), torch.Generator().manual_seed(i)) for i in range(num_groups)]
    low, full = policy().to(torch.bfloat16), policy()
    full.load_state_dict(low.state_dict())
    tokens = sum(int(mask.sum()) for _, mask, _ in batches)
    exact = torch.zeros(())
    for batch in batches:
        exact = exact + summed(low, [batch]) * int(batch[1].sum()) / tokens
    sums = {name: summed(low, batches, float32) for name, float32 in (("float32", True), ("bfloat16", False))}
    away = {name: ((each - exact).norm() / exact.norm()).item() for name, each in sums.items()}
    return {"num_groups": num_groups, **away, "model": ((exact - summed(full, batches)).norm() / exact.norm()).item()}


class Candidate(NamedTuple):
    key: tuple[str, int]
    token_ids: list[int]
    """The prompt and the answer."""
    returned: bool

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) - PROMPT_TOKENS


def candidates_of(groups: list[Group]) -> list[Candidate]:
    generator = torch.Generator().manual_seed(0)
    return [
        Candidate((str(g), i), torch.randint(64, (PROMPT_TOKENS + length,), generator=generator).tolist(), returned)
        for g, group in enumerate(groups)
        for i, (length, returned) in enumerate([(n, True) for n in group.lengths] + [(n, False) for n in group.stopped])
    ]


class Overlapped(NamedTuple):
    busy_s: float
    """Of passes, all together."""
    left_s: float
    """After the rollout's last token."""
    num_dropped: int
    """Tokens that were passed over for nothing."""
    cache_bytes: int
    """At most."""


def overlapped(
    candidates: list[Candidate], passes: IncrementalLogprobs, pass_tokens: int, rollout_s: float
) -> tuple[Overlapped, dict[tuple[str, int], torch.Tensor]]:
    """Passes while candidates grow, by a clock that goes on by what each pass was measured to take."""
    for each in candidates:
        passes.begin(each.key, each.token_ids[:PROMPT_TOKENS])
    steps = max(each.num_tokens for each in candidates)
    growing = {each.key: 0 for each in candidates}
    known = {each.key: each for each in candidates}
    found: dict[tuple[str, int], torch.Tensor] = {}
    clock, busy, dropped, peak = 0.0, 0.0, 0, 0
    while growing:
        step = min(int(clock / rollout_s * steps), steps)
        for key, sent in list(growing.items()):
            each = known[key]
            until = min(step, each.num_tokens)
            passes.add(key, sent, each.token_ids[PROMPT_TOKENS + sent : PROMPT_TOKENS + until])
            growing[key] = until
        ended = [key for key, sent in growing.items() if sent == known[key].num_tokens]
        for key in [key for key in ended if not known[key].returned]:
            dropped += passes.drop(key)
            del growing[key]
        if passes.num_new >= pass_tokens or step == steps:
            seconds = timed(passes.forward)
            busy += seconds
            clock += seconds
            peak = max(peak, passes.cache_bytes)
            for key in [key for key in ended if known[key].returned]:
                found[key] = passes.finish(key).logprobs
                del growing[key]
        else:
            clock = (step + 1.001) / steps * rollout_s
    return Overlapped(busy, clock - rollout_s, dropped, peak), found


@contextmanager
def counted_activations(model: torch.nn.Module) -> Iterator[dict[str, int]]:
    """Bytes that autograd saves inside, without the model's own: each storage once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}
    total = {"bytes": 0}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.data_ptr() not in kept:
            kept[storage.data_ptr()] = storage  # as long as it lives nobody else has its place
            total["bytes"] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total


def whole_logprobs(model: torch.nn.Module, group: list[Candidate]) -> list[torch.Tensor]:
    """In one pass, padded to the longest."""
    rows = [torch.tensor(each.token_ids) for each in group]
    token_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    logits = model(input_ids=token_ids[:, :-1]).logits
    logprobs = logits.gather(-1, token_ids[:, 1:, None])[..., 0] - logits.logsumexp(-1)
    return [row[PROMPT_TOKENS - 1 : len(each.token_ids) - 1] for row, each in zip(logprobs, group, strict=True)]


def whole(model: torch.nn.Module, groups: list[list[Candidate]], gradient: bool) -> tuple[float, int, torch.Tensor]:
    """Group by group: seconds, the most bytes that autograd saved of one, log probabilities."""
    seconds, most, found = 0.0, 0, []
    for group in groups:
        with torch.set_grad_enabled(gradient), counted_activations(model) as saved:
            begun = time.process_time()
            logprobs = torch.cat(whole_logprobs(model, group))
            if gradient:
                logprobs.sum().backward()
            seconds += time.process_time() - begun
        most = max(most, saved["bytes"])
        found.append(logprobs.detach())
    return seconds, most, torch.cat(found)


def incremental_rows(
    name: str, groups: list[Group], model: torch.nn.Module, arguments: argparse.Namespace
) -> Iterator[Row]:
    candidates = candidates_of(groups[:GROUPS_AT_ONCE])
    returned = [each for each in candidates if each.returned]
    by_prompt = [[each for each in returned if each.key[0] == str(g)] for g in range(GROUPS_AT_ONCE)]
    for gradient, pass_tokens in product((False, True), PASS_TOKENS):
        runs = []
        for _ in range(arguments.repeats + 1):
            whole_s, whole_saved, expected = whole(model, by_prompt, gradient)
            passes = IncrementalLogprobs(model, keep_activations=gradient)
            with counted_activations(model) as saved:
                way, found = overlapped(candidates, passes, pass_tokens, arguments.ratio * whole_s)
            ours = torch.cat([found[each.key] for each in returned])
            backward_s = timed(ours.sum().backward) if gradient else 0.0
            model.zero_grad()
            runs.append({
                "whole_s": whole_s, **way._asdict(), "backward_s": backward_s, "saved_bytes": saved["bytes"],
                "whole_saved_bytes": whole_saved, "difference": (ours - expected).abs().max().item(),
                "hidden": 1 - (way.left_s + backward_s) / whole_s, "work": (way.busy_s + backward_s) / whole_s,
            })  # fmt: skip
        runs = runs[1:]
        yield {
            "name": name, "gradient": gradient, "pass_tokens": pass_tokens,
            **{key: median(run[key] for run in runs) for key in runs[0]},
            "num_tokens": sum(len(each.token_ids) for each in returned), "runs": runs,
        }  # fmt: skip


def tables(record: Row) -> str:
    first = columns("Stream trainer", record["stream"], {
        "rollout": lambda row: row["name"],
        "training, CPU s": lambda row: number(row["plain_s"], 2),
        "hidden": lambda row: percent(row["hidden"]),
        "hidden, from half of the responses on": lambda row: percent(row["hidden_freed"]),
        "step": lambda row: f"{number(row['step'], 2)} times faster",
        "work": lambda row: number(row["cost"], 3),
        "gradients differ by": lambda row: f"{row['difference']:.0e}",
    })  # fmt: skip
    second = columns("Incremental forward", record["incremental"], {
        "rollout": lambda row: row["name"],
        "what": lambda row: "forward, backward" if row["gradient"] else "log probabilities",
        "tokens per pass": lambda row: number(row["pass_tokens"]),
        "whole, CPU s": lambda row: number(row["whole_s"], 2),
        "hidden": lambda row: percent(row["hidden"]),
        "work": lambda row: number(row["work"], 2),
        "for nothing, tokens": lambda row: number(int(row["num_dropped"])),
        "cache, MiB": lambda row: number(row["cache_bytes"] / 2**20, 1),
        "saved, MiB": lambda row: number(row["saved_bytes"] / 2**20, 0) if row["gradient"] else "—",
        "saved by the whole, MiB": lambda row: number(row["whole_saved_bytes"] / 2**20, 0) if row["gradient"] else "—",
        "differ by": lambda row: f"{row['difference']:.0e}",
    })  # fmt: skip
    third = columns("Sums of bfloat16 gradients: distance from the exact sum", record["precision"], {
        "groups": lambda row: number(row["num_groups"]),
        "summed in bfloat16": lambda row: percent(row["bfloat16"], 2),
        "summed in float32": lambda row: percent(row["float32"], 2),
        "the exact sum from the gradient in float32": lambda row: percent(row["model"], 2),
    })  # fmt: skip
    return f"{first}\n\n{second}\n\n{third}"


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
    chosen = list(rollouts.items())[2:]
    record["incremental"] = [row for name, groups in chosen for row in incremental_rows(name, groups, model, arguments)]
    record["precision"] = [precision_row(num_groups) for num_groups in (16, 64, 256)]
    publish(arguments, record, tables)


if __name__ == "__main__":
    main()
