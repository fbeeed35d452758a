"""Drafts from siblings and earlier answers: what recorded answers would have accepted, and what a step costs.

Replay: answers that a model gave are replayed in lockstep, a group at a time: at each step what the memory drafts for a
candidate, while its probability stays above a threshold, is compared with the answer that was sampled, and the
candidate goes on by what is equal and one token more. A draft of one token is accepted with the policy's probability of
it, so the replay is unbiased. With `half of them earlier` a prompt has half of its answers before the others begin.

Cost: siblings of synthetic text (four successors of each token, of which the likeliest comes six times in ten) write in
rows of one step; medians over steps of the thread's CPU time. The memory alone: there is no model and no engine.

--trace: a line for each group, {"prompt_ids": [...], "cands": [[...], ...]}, token ids; without it nothing is replayed.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import arguments_of, median, publish, record_of_run
from benchmarks.tables import columns, number
from vllm_rollout.tracker.draft_memory import DraftMemory

UNBOUNDED = 1 << 40
GROUP_SIZE = 16
VOCABULARY = 32_000
CUMULATIVE = np.array([0.6, 0.8, 0.95])
"""Of the successors of a token, likeliest first; the fourth has the rest."""
TOKENS_PER_STEP = 2
FILL_TOKENS = 256
"""Tokens of a row appended at once while a memory is filled."""

Group = dict[str, Any]


def parse_arguments() -> argparse.Namespace:
    parser = arguments_of(__doc__, "draft_memory", repeats=31)
    add = parser.add_argument
    add("--trace", type=Path, help="recorded answers; none: only costs are measured")
    add("--longest", type=int, nargs="+", default=[6, 16], help="tokens of a draft at most")
    add("--min-match", type=int, nargs="+", default=[1, 2, 3], help="shortest matches")
    add(
        "--threshold",
        type=float,
        nargs="+",
        default=[0.1, 0.2, 0.3, 0.4, 0.5],
        help="probabilities above which to draft",
    )
    add("--rows", type=int, nargs="+", default=[16, 64, 256, 1024], help="rows of a step")
    add("--length", type=int, nargs="+", default=[1024, 8192], help="tokens that each sequence has")
    return parser.parse_args()


def cut(tokens: np.ndarray, probabilities: np.ndarray, threshold: float) -> list[int]:
    return tokens[probabilities >= threshold].tolist()


class Replay:
    """Groups of a trace under one setting; what was drafted and accepted in all."""

    def __init__(self, longest: int, min_match: int, threshold: float) -> None:
        self.longest, self.min_match, self.threshold = longest, min_match, threshold
        self.num_steps = self.num_tokens = self.num_drafted = self.num_accepted = 0
        self.judged: list[tuple[float, bool]] = []
        """Each drafted token: the probability it was given, and whether it and all before it were accepted."""

    def run(self, group: Group, num_earlier: int) -> None:
        memory = DraftMemory(UNBOUNDED, min_match=self.min_match)
        prompt = group["prompt_ids"]
        for answer in group["cands"][:num_earlier]:
            earlier = memory.begin("p", prompt)
            memory.step(np.array([earlier]), np.array([answer], np.int32), np.zeros(1, int))
            memory.end([earlier])
        answers = dict(enumerate(group["cands"][num_earlier:]))
        numbers = {i: memory.begin("p", prompt) for i in answers}
        written = dict.fromkeys(answers, 0)
        sampled: dict[int, list[int]] = {i: [] for i in answers}
        while answers:
            rows = [[*sampled[i], *[-1] * (self.longest + 1 - len(sampled[i]))] for i in answers]
            sequences = np.array([numbers[i] for i in answers])
            drafts = memory.step(sequences, np.array(rows, np.int32), np.full(len(rows), self.longest))
            for i, tokens, probabilities in zip(list(answers), *drafts, strict=True):
                sampled[i] = self._verify(answers[i], written[i], tokens, probabilities)
                written[i] += len(sampled[i])
                if written[i] == len(answers[i]):
                    last = np.array([sampled[i]], np.int32)
                    memory.step(np.array([numbers[i]]), last, np.zeros(1, int))
                    memory.end([numbers[i]])
                    del answers[i]

    def _verify(self, answer: list[int], start: int, tokens: np.ndarray, probabilities: np.ndarray) -> list[int]:
        """The tokens that this step brings: what equals the answer, and one more."""
        drafted = cut(tokens, probabilities, self.threshold)
        rest = answer[start:]
        accepted = 0
        while accepted < min(len(drafted), len(rest)) and drafted[accepted] == rest[accepted]:
            accepted += 1
        self.num_steps += 1
        self.num_tokens += min(accepted + 1, len(rest))
        self.num_drafted += len(drafted)
        self.num_accepted += accepted
        self.judged += [(float(p), i < accepted) for i, p in enumerate(probabilities[: len(drafted)])]
        return rest[: accepted + 1]

    def row(self, source: str) -> dict[str, Any]:
        return {
            "source": source,
            "longest": self.longest,
            "min_match": self.min_match,
            "threshold": self.threshold,
            "tokens_per_step": round(self.num_tokens / self.num_steps, 3),
            "drafted_per_step": round(self.num_drafted / self.num_steps, 3),
            "accepted_of_drafted": round(self.num_accepted / max(1, self.num_drafted), 3),
        }


def replay(groups: list[Group], arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of all settings; the calibration at the lowest threshold."""
    rows, calibrations = [], []
    for source, share in (("running siblings", 0.0), ("half of them earlier", 0.5)):
        for longest in arguments.longest:
            for min_match in arguments.min_match:
                for threshold in arguments.threshold:
                    done = Replay(longest, min_match, threshold)
                    for group in groups:
                        done.run(group, int(share * len(group["cands"])))
                    rows.append(done.row(source))
                    if threshold == min(arguments.threshold):
                        setting = {"source": source, "longest": longest, "min_match": min_match}
                        calibrations += [setting | each for each in calibration(done.judged)]
    return rows, calibrations


def calibration(judged: list[tuple[float, bool]]) -> list[dict[str, Any]]:
    rows = []
    for tenth in range(10):
        inside = [(p, accepted) for p, accepted in judged if min(int(10 * p), 9) == tenth]
        if inside:
            estimated, accepted = np.array(inside, float).mean(axis=0)
            rows.append(
                {
                    "from": tenth / 10,
                    "num_drafted": len(inside),
                    "estimated": round(float(estimated), 3),
                    "accepted": round(float(accepted), 3),
                }
            )
    return rows


class Text:
    """Siblings of synthetic text, of `num_rows` / 16 prompts."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.successors = self.rng.zipf(1.3, (VOCABULARY, 4)) % VOCABULARY
        self.last = np.repeat(self.rng.integers(0, VOCABULARY, -(-num_rows // GROUP_SIZE)), GROUP_SIZE)[:num_rows]

    def next(self, width: int) -> np.ndarray:
        columns = []
        for _ in range(width):
            choice = np.searchsorted(CUMULATIVE, self.rng.random(len(self.last)))
            self.last = self.successors[self.last, choice]
            columns.append(self.last)
        return np.array(columns, np.int32).T.copy()


def cost(num_rows: int, length: int, min_match: int, longest: int, arguments: argparse.Namespace) -> dict[str, Any]:
    text = Text(num_rows, arguments.seed)
    memory = DraftMemory(UNBOUNDED, min_match=min_match)
    numbers = np.array([memory.begin(str(row // GROUP_SIZE), []) for row in range(num_rows)])
    nothing, limits = np.zeros(num_rows, np.int32), np.full(num_rows, longest, np.int32)
    filling = 0.0
    for _ in range(length // FILL_TOKENS):
        tokens = text.next(FILL_TOKENS)
        start = time.thread_time()
        memory.step(numbers, tokens, nothing)
        filling += time.thread_time() - start
    bytes_per_token = memory.num_bytes / (num_rows * (length // FILL_TOKENS) * FILL_TOKENS)
    seconds, drafted = [], 0
    for _ in range(arguments.repeats):
        tokens = text.next(TOKENS_PER_STEP)
        start = time.thread_time()
        drafts = memory.step(numbers, tokens, limits)
        seconds.append(time.thread_time() - start)
        drafted += int((drafts.tokens >= 0).sum())
    start = time.thread_time()
    memory.end(numbers.tolist())
    ending = time.thread_time() - start
    return {
        "implementation": memory.implementation.name,
        "num_rows": num_rows,
        "length": length,
        "min_match": min_match,
        "longest": longest,
        "drafted_per_row": round(drafted / arguments.repeats / num_rows, 2),
        "us_per_row": round(1e6 * median(seconds) / num_rows, 2),
        "us_per_step": round(1e6 * median(seconds), 1),
        "bytes_per_token": round(bytes_per_token, 2),
        "fill_us_per_token": round(1e6 * filling / (num_rows * length), 3),
        "end_us_per_row": round(1e6 * ending / num_rows, 2),
    }


def beginning(length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Of a prompt of random tokens, the dearest there is, and of its next candidate, which shares it."""
    rng = np.random.default_rng(arguments.seed)
    first, again, bytes_per_token = [], [], 0.0
    for repeat in range(arguments.repeats):
        context = rng.integers(0, VOCABULARY, length)
        memory = DraftMemory(UNBOUNDED)
        for seconds in (first, again):
            start = time.thread_time()
            memory.begin(str(repeat), context)
            seconds.append(time.thread_time() - start)
        bytes_per_token = memory.num_bytes / length
    return {
        "length": length,
        "bytes_per_token": round(bytes_per_token, 2),
        "first_ms": round(1e3 * median(first), 3),
        "again_ms": round(1e3 * median(again), 3),
        "first_us_per_token": round(1e6 * median(first) / length, 4),
    }


def main() -> None:
    arguments = parse_arguments()
    record = record_of_run(
        seed=arguments.seed,
        workload="replay: recorded answers of --trace in lockstep by groups; cost: siblings of synthetic text, "
        f"{GROUP_SIZE} of a prompt, {TOKENS_PER_STEP} tokens appended per row and step",
    )
    rows, calibrations = [], []
    if arguments.trace is not None:
        groups = [json.loads(line) for line in arguments.trace.read_text().splitlines() if line.strip()]
        rows, calibrations = replay(groups, arguments)
    costs = [
        cost(num_rows, length, min_match, longest, arguments)
        for length in arguments.length
        for num_rows in arguments.rows
        for min_match, longest in ((1, 6), (2, 6), (1, 16))
    ]
    beginnings = [beginning(length, arguments) for length in (1024, 8192, 32_768, 131_072)]
    result = {**record, "replay": rows, "calibration": calibrations, "costs": costs, "beginnings": beginnings}
    publish(arguments, result, tables)


def tables(result: dict[str, Any]) -> str:
    parts = {
        "What recorded answers accept": ("replay", 3),
        "Estimated and true acceptance": ("calibration", 3),
        "What a step costs": ("costs", 2),
        "What the beginning of a candidate costs": ("beginnings", 3),
    }
    return "\n".join(table(title, result[name], digits) for title, (name, digits) in parts.items() if result[name])


def table(title: str, rows: list[dict[str, Any]], digits: int) -> str:
    def cell(name: str) -> Any:
        return lambda row: number(row[name], digits) if isinstance(row[name], float) else str(row[name])

    return columns(title, rows, {name.replace("_", " "): cell(name) for name in rows[0]})


if __name__ == "__main__":
    main()
