"""What answers of earlier weights are worth as drafts, and what more answers of the same weights are.

A small policy (`examples.grpo.pretrain`) learns by GRPO and answers, with the weights of some of its steps, 48 problems
that it is not trained on 48 times each, at temperature 1. 16 answers of each problem are replayed in lockstep, with
drafts of the real memory; one that equals what was sampled is accepted, which in the mean is what rejection sampling
accepts.

ages     beside their siblings the memory has 16 ended answers of the same problem, of the weights so many updates
         before (0: other answers of the same weights), each with so much of a vote; none: it has siblings alone.
factors  four ended answers each of the weights 4, 8, 12 and 16 updates before, whose votes each update multiplies by
         the factor; 0: they are forgotten.
more     so many further answers for the last quarter of a problem's candidates: complete beforehand, or begun on
         another rank when that quarter is left, a token a step.

Gain at s: tokens per step / (1 + s x drafts per step), with the least probability that is best for it. A draft takes s
of a step's time: next to 0 in a tail on a device that reads its weights, 0.3 where a batch computes. Intervals are of
95 %, from a bootstrap over problems; a comparison takes the same problems for both.

Run from the repository root: python -m benchmarks.drafts_drift models/careful runs/drift (half an hour on two cores)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file
from transformers import DynamicCache

from benchmarks.common import arguments_of, publish, record_of_run
from benchmarks.tables import Row, columns, number
from examples.grpo.model import EOS, load, prompt_ids, save_weights
from examples.grpo.server import Server
from examples.grpo.task import problems
from examples.grpo.train import Training, parse
from vllm_rollout.group.drafting import MAX_DRAFT_TOKENS
from vllm_rollout.tracker.draft_memory import DraftMemory

NUM_ANSWERS, NUM_TARGETS, MAX_TOKENS = 48, 16, 512
PROBLEMS = problems("chain", "drift", 48)
STEPS = (0, 4, 6, 7, 8, 12, 14, 15, 16)
AGES = {8: (0, 1, 2, 4, 8), 16: (0, 1, 2, 4, 8, 16)}
"""Steps whose answers are drafted for, and how many updates before the ended ones were made."""
HALVINGS = (0, 1, 2, 4, 8, 30)
"""Of a vote; after 30 it decides only where no other is."""
MIXED_AGES = (16, 12, 8, 4)
FACTORS: dict[str, float] = {"1": 0.0, "0.84": 0.25, "0.71": 0.5, "0.5": 1.0, "0.25": 2.0}
"""Halvings that an update makes."""
NUM_MORE = (0, 4, 8, 16, 32)
THRESHOLDS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75)
COSTS = (0.0, 0.1, 0.3)

Answers = list[list[list[int]]]
"""By problem."""
Counts = NDArray[np.float64]
"""Steps, tokens and drafts, [thresholds, problems, 3]."""


def main() -> None:
    parser = arguments_of(__doc__, "drafts_drift")
    parser.add_argument("model", type=Path, help="a folder of examples.grpo.pretrain")
    parser.add_argument("runs", type=Path, help="a folder for the training; what is there is gone on with")
    parser.add_argument("--lr", type=float, default=3e-4, help="of the training; default %(default)s")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load(arguments.model)
    prompts = [prompt_ids(tokenizer, problem) for problem in PROBLEMS]
    workload = {
        "conditions": __doc__,
        "learning_rate": arguments.lr,
        "thresholds": THRESHOLDS,
        "max_tokens": MAX_TOKENS,
    }
    begun = record_of_run(seed=arguments.seed, workload=workload)
    train(arguments)
    answers = {}
    for step in track(STEPS, "answers", console=Console(stderr=True)):
        kept = arguments.runs / f"answers-{step}.json"
        if not kept.exists():
            model.load_state_dict(load_file(arguments.runs / f"step-{step}" / "model.safetensors"), strict=False)
            kept.write_text(json.dumps(sampled(model, prompts, arguments.seed + step)))
        answers[step] = json.loads(kept.read_text())
    publish(arguments, begun | measured(prompts, answers), tables)


def train(arguments: argparse.Namespace) -> None:
    words = [str(arguments.model), str(arguments.runs), "--serve", "--evaluate-every", "1", "--lr", str(arguments.lr)]
    args = parse([*words, "--steps", str(max(STEPS)), "--max-tokens", str(MAX_TOKENS)])
    if not (args.output / f"step-{max(STEPS)}").exists():
        args.output.mkdir(parents=True, exist_ok=True)
        with Server(args) as server:
            Kept(args, server).go()


class Kept(Training):
    """A training that keeps its weights where it would evaluate itself. Overrides: evaluate."""

    def evaluate(self) -> None:
        if self.progress.step in STEPS:
            save_weights(self.model, self.args.output / f"step-{self.progress.step}")


@torch.inference_mode()
def sampled(model: Any, prompts: list[list[int]], seed: int) -> Answers:
    """NUM_ANSWERS of each prompt; those of one length together, so that nothing is padded."""
    torch.manual_seed(seed)
    answers: Answers = [[[] for _ in range(NUM_ANSWERS)] for _ in prompts]
    for length in sorted(set(map(len, prompts))):
        its = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        going = [answer for i in its for answer in answers[i]]
        tokens = torch.tensor([prompts[i] for i in its]).repeat_interleave(NUM_ANSWERS, 0)
        cache = DynamicCache(config=model.config)
        for _ in range(MAX_TOKENS):
            logits = model(input_ids=tokens, past_key_values=cache).logits[:, -1]
            tokens = torch.multinomial(logits.softmax(-1), 1)
            for answer, token in zip(going, tokens[:, 0].tolist(), strict=True):
                answer.append(token)
            left = (tokens[:, 0] != EOS).nonzero()[:, 0]
            if not len(left):
                break
            if len(left) < len(going):
                going, tokens = [going[i] for i in left.tolist()], tokens[left]
                cache.batch_select_indices(left)
    return answers


class Rows:
    """Answers of all problems as arrays."""

    def __init__(self, memory: DraftMemory, prompts: list[list[int]], answers: Iterable[tuple[int, list[int]]]) -> None:
        its = list(answers)
        self.problem = np.array([i for i, _ in its])
        self.length = np.array([len(answer) for _, answer in its])
        self.tokens = np.full((len(its), max(self.length) + MAX_DRAFT_TOKENS + 1), -2, np.int32)
        for row, (_, answer) in enumerate(its):
            self.tokens[row, : len(answer)] = answer
        self.number = np.array([memory.begin(str(i), prompts[i]) for i in self.problem])

    def between(self, rows: NDArray[Any], first: NDArray[Any], after: NDArray[Any]) -> NDArray[np.int32]:
        """[rows, width], padded with -1."""
        at = first[:, None] + np.arange(max(after - first, default=0))
        return np.where(at < after[:, None], self.tokens[rows[:, None], at], -1).astype(np.int32)


def replay(
    prompts: list[list[int]], answers: Answers, ended: Sequence[tuple[Answers, int]], threshold: float,
    more: Answers | None = None,
) -> NDArray[np.float64]:  # fmt: skip
    """Steps, tokens and drafts of each problem, [problems, 3].

    ended: what ended before, the oldest first, and how often votes were halved after that.
    more: what begins when the last quarter of a problem's candidates is left; only that quarter is counted then.
    """
    memory = DraftMemory(2**30)
    for earlier, halvings in ended:
        gone = Rows(memory, prompts, flat(earlier))
        all_rows, none = np.arange(len(gone.length)), np.zeros(len(gone.length), np.int64)
        memory.step(gone.number, gone.between(all_rows, none, gone.length), none)
        memory.end(gone.number.tolist())
        for _ in range(halvings):
            memory.age()
    rows = Rows(memory, prompts, [*flat(answers), *flat(more or [])])
    is_more = np.arange(len(rows.length)) >= sum(map(len, answers))
    known, place = np.zeros_like(rows.length), np.where(is_more, 0, 1)  # a first token comes with the prompt
    counts = np.zeros((len(prompts), 3))
    runs = np.ones(len(rows.length), bool)
    while (runs & ~is_more).any():
        left = np.bincount(rows.problem[runs & ~is_more], minlength=len(prompts))
        in_tail = (left <= NUM_TARGETS / 4)[rows.problem]
        now = np.flatnonzero(runs & (~is_more | in_tail))
        longest = np.where(is_more | (place == rows.length), 0, MAX_DRAFT_TOKENS)[now]
        drafts = memory.step(rows.number[now], rows.between(now, known[now], place[now]), longest)
        known[now] = place[now]
        memory.end(rows.number[over := now[place[now] == rows.length[now]]].tolist())
        runs[over] = False
        tokens = np.where(drafts.probabilities >= threshold, drafts.tokens, -1)
        ahead = rows.tokens[now[:, None], place[now, None] + np.arange(tokens.shape[1])]
        accepted = np.cumprod((tokens == ahead) & (tokens >= 0), axis=1).sum(axis=1)
        place[now] = np.minimum(place[now] + accepted + 1, rows.length[now])
        counted = ~is_more[now] & runs[now] & (in_tail[now] if more is not None else True)
        seen = np.stack([np.ones(len(now)), place[now] - known[now], (tokens >= 0).sum(axis=1)], axis=1)
        np.add.at(counts, rows.problem[now[counted]], seen[counted])
    return counts


def flat(answers: Answers) -> list[tuple[int, list[int]]]:
    return [(i, answer) for i, its in enumerate(answers) for answer in its]


def some(answers: Answers, first: int, after: int) -> Answers:
    return [its[first:after] for its in answers]


def measured(prompts: list[list[int]], answers: dict[int, Answers]) -> dict[str, Any]:
    def counts(target: int, ended: Sequence[tuple[Answers, int]], more: Answers | None = None) -> Counts:
        its = some(answers[target], 0, NUM_TARGETS)
        return np.stack([replay(prompts, its, ended, threshold, more) for threshold in THRESHOLDS])

    def earlier(step: int, first: int = 0, after: int = NUM_TARGETS) -> Answers:
        return some(answers[step], NUM_TARGETS + first, NUM_TARGETS + after)

    ages, factors, more = [], [], []
    for target, its in track(AGES.items(), "ages", console=Console(stderr=True)):
        alone = counts(target, [])
        ages.append({"step": target, "age": None, "vote": 0.0, **gains(alone)})
        for age in its:
            whole = counts(target, [(earlier(target - age), 0)])
            for halvings in HALVINGS if age else HALVINGS[:1]:
                now = counts(target, [(earlier(target - age), halvings)]) if halvings else whole
                row = {"step": target, "age": age, "vote": 0.5**halvings, **gains(now)}
                ages.append(row | {"by_whole_vote": versus(now, whole), "by_forgotten": versus(now, alone)})
    last = max(STEPS)
    updates = [age - after for age, after in pairwise((*MIXED_AGES, 0))]
    mixed = [earlier(last - age, 0, 4) for age in MIXED_AGES]
    by_factor = {"0": counts(last, [])}
    for factor, per_update in FACTORS.items():
        halved = [round(per_update * num) for num in updates]
        by_factor[factor] = counts(last, list(zip(mixed, halved, strict=True)))
    for factor, now in by_factor.items():
        factors.append({"factor": factor, **gains(now), "by_half": versus(now, by_factor["0.5"])})
    nobody: Answers = [[] for _ in PROBLEMS]
    for step in track((0, last), "more", console=Console(stderr=True)):
        none = counts(step, [], nobody)
        for num, is_ready in product(NUM_MORE, (True, False)):
            others = earlier(step, 0, num)
            now = none if not num else counts(step, [(others, 0)], nobody) if is_ready else counts(step, [], others)
            more.append({"step": step, "more": num, "beforehand": is_ready, **gains(now), "by_none": versus(now, none)})
    return {"ages": ages, "factors": factors, "more": more}


def gain(counts: Counts, cost: float) -> NDArray[np.float64]:
    """Of [..., thresholds, 3], the best threshold's: [...]."""
    best: NDArray[np.float64] = (counts[..., 1] / (counts[..., 0] + cost * counts[..., 2])).max(axis=-1)
    return best


def gains(counts: Counts) -> dict[str, Any]:
    its = counts.sum(axis=1)
    steps, tokens, drafts = its[THRESHOLDS.index(0.3)]
    at = {"tokens_per_step": tokens / steps, "drafts_per_step": drafts / steps, "accepted": (tokens - steps) / drafts}
    return {"at_0.3": at, "gain": {str(cost): gain(its, cost) for cost in COSTS}}


def versus(counts: Counts, others: Counts) -> dict[str, list[float]]:
    """Gain by the others' gain, and its interval, by cost."""
    draws = np.random.default_rng(0).multinomial(len(PROBLEMS), [1 / len(PROBLEMS)] * len(PROBLEMS), 2000)
    drawn = np.vstack([np.ones(len(PROBLEMS)), draws])
    its, theirs = (np.einsum("dp,tpc->dtc", drawn, each) for each in (counts, others))
    ratios = {str(cost): gain(its, cost) / gain(theirs, cost) for cost in COSTS}
    return {cost: [each[0], *np.percentile(each[1:], (2.5, 97.5))] for cost, each in ratios.items()}


def tables(result: dict[str, Any]) -> str:
    def ratio(row: Row | None, field: str, cost: float) -> str:
        return "—" if row is None or field not in row else "{:.3f} ({:.3f} to {:.3f})".format(*row[field][str(cost)])

    def gained(row: Row, cost: float) -> str:
        return number(row["gain"][str(cost)], 2)

    def of(row: Row, vote: float) -> Row | None:
        its = (each for each in result["ages"] if (each["step"], each["age"]) == (row["step"], row["age"]))
        return next((each for each in its if each["vote"] == vote), None)

    shown: dict[str, Callable[[Row], str]] = {
        "tokens a step": lambda row: number(row["at_0.3"]["tokens_per_step"], 2),
        "drafts": lambda row: number(row["at_0.3"]["drafts_per_step"], 2),
        "accepted": lambda row: number(row["at_0.3"]["accepted"], 2),
    }
    shown |= {f"gain at {cost:g}": partial(gained, cost=cost) for cost in COSTS}
    of_ages = {"step": lambda row: number(row["step"]), "updates before": lambda row: number(row["age"])}
    whole = [row for row in result["ages"] if row["vote"] in (0.0, 1.0)]
    votes = [0.5**halvings for halvings in HALVINGS[1:]]
    return "\n\n".join([
        columns("Ended answers of earlier weights, with whole votes", whole, of_ages | shown | {
            "by siblings alone, at 0.1": lambda row: ratio(row, "by_forgotten", 0.1),
        }),
        columns("Gain at 0.1 by that of whole votes", [row for row in whole if row["age"]], of_ages | {
            f"vote {vote:.2g}": lambda row, vote=vote: ratio(of(row, vote), "by_whole_vote", 0.1) for vote in votes
        }),
        columns("Factor of each update", result["factors"], {"factor": lambda row: row["factor"]} | shown | {
            f"by 0.5's, at {cost:g}": lambda row, cost=cost: ratio(row, "by_half", cost) for cost in COSTS
        }),
        columns("The last quarter, with more answers", result["more"], {
            "step": lambda row: number(row["step"]),
            "more": lambda row: number(row["more"]),
            "complete": lambda row: "beforehand" if row["beforehand"] else "later",
            **shown,
            "by none, at 0": lambda row: ratio(row, "by_none", 0.0),
        }),
    ])  # fmt: skip


if __name__ == "__main__":
    main()
