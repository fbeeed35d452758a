"""Drafts in vLLM's asynchronous loop: how much of their gain remains if a step's tokens arrive a step late.

The asynchronous loop launches a step before the tokens of the step before are on the host. A proposer on the host has
the tokens of two steps before. It has to guess the tokens of the step in flight: all of its drafts, and one token more.

Answers of a real model (SmolLM2-135M-Instruct, temperature 1) are replayed, all of a group in lockstep. A draft is
accepted if the answer has that token. `new`: 16 answers of a prompt draft for each other. `again`: 8 more answers,
which also draft from the 16. Tokens are drafted down to a probability of `least`, and at most `most` per row.

Run from the repository root: python -m benchmarks.drafts_ahead
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import arguments_of, publish, record_of_run
from benchmarks.prompts import PROMPTS
from benchmarks.tables import columns, number
from vllm_rollout.models import DEFAULT_MODEL, resolve
from vllm_rollout.parts.drafts.worker.memory import DraftMemory

NUM_PROMPTS, NUM_NEW, NUM_AGAIN, MAX_TOKENS = 16, 16, 8, 384
CELLS = ((4, 0.5), (4, 0.2), (8, 0.2), (8, 0.05))
"""Most drafts per row, and least probability of a draft."""


class Answers(NamedTuple):
    prompt: list[int]
    answers: list[list[int]]


class Row:
    """A candidate whose answer is known in advance."""

    def __init__(self, sequence: int, answer: list[int]) -> None:
        self.sequence, self.left = sequence, answer
        self.drafts: list[int] = []
        self.guess: list[int] | None = []
        """Tokens that the step in flight is guessed to make. None if its drafts follow from a wrong guess."""

    def verify(self) -> list[int]:
        """One step. Returns the tokens that it makes."""
        num = 0
        while num < min(len(self.drafts), len(self.left) - 1) and self.drafts[num] == self.left[num]:
            num += 1
        made, self.left = self.left[: num + 1], self.left[num + 1 :]
        return made


def play(memory: DraftMemory, answers: Answers, begin: int, end: int, most: int, least: float, late: bool) -> Any:
    """Number of tokens, rows and drafts when these answers are replayed. The memory keeps the answers."""
    rows = [Row(memory.begin("p", answers.prompt), answer) for answer in answers.answers[begin:end]]
    counts = np.zeros(3, int)
    known: list[list[int]] = [[] for _ in rows]
    while rows:
        proposed = propose(memory, rows, known, most, least) if late else None
        made = [row.verify() for row in rows]
        counts += [sum(map(len, made)), len(rows), sum(len(row.drafts) for row in rows)]
        if proposed is None:
            found = memory.step(numbers(rows), padded(made), np.full(len(rows), most))
            for row, tokens, chances in zip(rows, *found, strict=True):
                row.drafts = likely(tokens, chances, most, least)
        else:
            for row, (drafts, guess), tokens in zip(rows, proposed, made, strict=True):
                row.drafts, row.guess = drafts, [] if guess == tokens else None
        ended = [row for row in rows if not row.left]
        if ended:
            if late:
                tokens = [made[rows.index(row)] for row in ended]
                memory.step(numbers(ended), padded(tokens), np.zeros(len(ended), int))
            memory.end([row.sequence for row in ended])
        known = [tokens for row, tokens in zip(rows, made, strict=True) if row.left]
        rows = [row for row in rows if row.left]
    return counts


def propose(
    memory: DraftMemory, rows: Sequence[Row], known: Sequence[list[int]], most: int, least: float
) -> list[tuple[list[int], list[int] | None]]:
    """Drafts for the next step, made while a step is in flight, and the tokens that this step is guessed to make."""
    found = memory.step(numbers(rows), padded(known), np.full(len(rows), 2 * most + 1))
    proposed: list[tuple[list[int], list[int] | None]] = []
    for row, tokens, chances in zip(rows, *found, strict=True):
        drafts = row.drafts if row.guess is not None else []  # else none of them is accepted
        num = len(drafts) + 1
        if tokens[: num - 1].tolist() != drafts or (tokens[:num] < 0).any() or num > len(tokens):
            proposed.append(([], None))
        else:
            proposed.append((likely(tokens[num:], chances[num:], most, least), tokens[:num].tolist()))
    return proposed


def likely(tokens: NDArray[Any], chances: NDArray[Any], most: int, least: float) -> list[int]:
    """The drafts to propose: at most `most`, with a chance of at least `least`. Chances fall along a row."""
    num = min(most, int(((tokens >= 0) & (chances >= least)).sum()))
    return tokens[:num].tolist()


def numbers(rows: Sequence[Row]) -> NDArray[Any]:
    return np.array([row.sequence for row in rows])


def padded(rows: Sequence[Sequence[int]]) -> NDArray[Any]:
    width = max(1, *map(len, rows))
    return np.array([[*row, *[-1] * (width - len(row))] for row in rows], np.int32)


def generate(seed: int) -> list[Answers]:
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm import SamplingParams

    import vllm_rollout

    llm = vllm_rollout.LLM(resolve(DEFAULT_MODEL), max_model_len=1024, enforce_eager=True, max_num_seqs=128)
    sampling = SamplingParams(n=NUM_NEW + NUM_AGAIN, temperature=1.0, max_tokens=MAX_TOKENS, seed=seed)
    prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:NUM_PROMPTS]]
    outputs = llm.chat(prompts, sampling)
    return [Answers(each.prompt_token_ids, [list(one.token_ids) for one in each.outputs]) for each in outputs]


def measure(data: Sequence[Answers], most: int, least: float) -> list[dict[str, Any]]:
    cells = []
    for what in ("new", "again"):
        cell: dict[str, Any] = {"what": what, "most": most, "least": least}
        for name, late in (("at_once", False), ("late", True)):
            counts = np.zeros(3, int)
            for answers in data:
                memory = DraftMemory(1 << 26)
                first = play(memory, answers, 0, NUM_NEW, most, least, late and what == "new")
                counts += first if what == "new" else play(memory, answers, NUM_NEW, None, most, least, late)
            tokens, rows, drafts = counts.tolist()
            cell[name] = {"tokens_per_row": tokens / rows, "drafts_per_row": drafts / rows}
        gains = [cell[name]["tokens_per_row"] - 1 for name in ("late", "at_once")]
        cells.append(cell | {"share_of_gain": gains[0] / gains[1]})
    return cells


def tables(result: dict[str, Any]) -> str:
    return columns(
        "Drafts that come a step late",
        result["cells"],
        {
            "answers": lambda cell: cell["what"],
            "most drafts": lambda cell: number(cell["most"]),
            "least probability": lambda cell: number(cell["least"], 2),
            "tokens a row, at once": lambda cell: number(cell["at_once"]["tokens_per_row"]),
            "a step late": lambda cell: number(cell["late"]["tokens_per_row"]),
            "share of the gain": lambda cell: number(cell["share_of_gain"], 2),
        },
    )


def main() -> None:
    arguments = arguments_of(__doc__, "drafts_ahead").parse_args()
    data = generate(arguments.seed)
    workload = {"conditions": __doc__, "tokens": sum(len(each) for answers in data for each in answers.answers)}
    cells = [cell for most, least in CELLS for cell in measure(data, most, least)]
    publish(arguments, record_of_run(seed=arguments.seed, workload=workload) | {"cells": cells}, tables)


if __name__ == "__main__":
    main()
