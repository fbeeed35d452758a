"""A judge beside an actor on one emulated device: a share reserved for it, or the whole device in turns.

A 7B model decodes groups, and a judge grades each answer as it ends: it prefills the question and the answer and
generates one token (`choices`). Both have vLLM's scheduler, and the actor has our groups. The device is a clock, so
seconds do not depend on this host, and a run repeats to the digit. An actor's steps do not depend on grades, so each
rollout runs once and is replayed beside a judge in each arrangement:

own        the judge has a device of its own. This is also the most that MPS can give, with both computing at once
reserved   the judge has this share of the device, used or not: a step of the actor takes 1/(1 - share) of its time, one
           of the judge 1/share
slices     a model that computes alone has all of the device, otherwise each has half: two processes on a GPU without
           MPS, in short slices
turns      as slices, but by whole steps, one of each in turn
judge      the judge's steps come first, the actor has the rest
after      the judge begins when the rollout is over

The judge takes no memory from the actor, switching costs nothing, and no time passes between the two servers.

Run from the repository root: python -m benchmarks.rewards.judge_emulated
"""

from __future__ import annotations

import math
import os
import random
import tempfile
from collections import deque
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from rich.console import Console
from vllm.v1.engine import FinishReason

from benchmarks.common import ROOT, arguments_of, median, percentile, publish, quartiles, ratios, record_of_run
from benchmarks.rollpacker import MODELS, PROMPT_TOKENS, TAIL_SOURCE, TAILS
from benchmarks.tables import columns, number, percent
from tests.parts.emulation.emulated_run import EmulatedRun
from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.model_files import tiny
from vllm_rollout.parts.emulation.settings import Settings, StepSettings
from vllm_rollout.parts.rewards.grading.grader import NUM_REQUESTS

MODEL, GROUP_SIZE, MAX_NUM_SEQS, BLOCK_SIZE = "7B/8k", 8, 1024, 16
MAX_TOKENS = MODELS[MODEL].max_tokens
NUM_PROMPTS = (8, 32)
"""Prompts on one device. 8 prompts of 8 answers are RollPacker's share of a batch."""
TEMPLATE_TOKENS = 50
"""Tokens of a judge's question around prompt and answer."""
SHORTER = 4
"""Short answers have a quarter of the tokens."""
STEPS = {
    "7B": {"ms": 5.2, "ms_per_request": 0.012, "ms_per_context_token": 2.0e-5, "ms_per_prefilled_token": 0.03},
    "1.5B": {"ms": 1.5, "ms_per_request": 0.0024, "ms_per_context_token": 1.0e-5, "ms_per_prefilled_token": 0.006},
}
"""7B is examples/emulate_7b.json, and the actor. 1.5B has a fifth of its weights, half of its KV (28 layers, 2 KV heads
of 128) and the same overhead of 0.6 ms.
"""
WAYS = ("own", "reserved 0.1", "reserved 0.2", "reserved 0.3", "slices", "turns", "judge", "after")
TOLERANCE_S = 1e-9


class Cell(NamedTuple):
    judge: str
    answers: str
    num_prompts: int
    redundancy: int
    """Candidates of a group beyond the 8 that it waits for."""


class Answer(NamedTuple):
    group: int
    num_tokens: int


class Step(NamedTuple):
    seconds: float
    answers: list[Answer]
    """Answers that end with the step and are returned, so that the judge grades them."""


class Replayed(NamedTuple):
    rollout_s: float
    last_grade_s: float
    waits_s: list[float]
    """Seconds from an answer's end to its grade."""
    judge_s: float
    """Seconds for which the judge computes, at the speed of a whole device."""


def main() -> None:
    parser = arguments_of(__doc__, "rewards.judge_emulated", repeats=5)
    parser.set_defaults(output=ROOT / "benchmarks/results/judge_emulated.json")
    arguments = parser.parse_args()
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    workload = {
        "conditions": __doc__, "steps": STEPS, "group_size": GROUP_SIZE, "prompt_tokens": PROMPT_TOKENS,
        "template_tokens": TEMPLATE_TOKENS, "lengths": TAILS[MODEL].described(), "shorter": SHORTER,
        "max_tokens": MAX_TOKENS, "requests_at_once": NUM_REQUESTS, "repeats": arguments.repeats,
        "sources": [TAIL_SOURCE, "examples/emulate_7b.json"],
    }  # fmt: skip
    result = record_of_run(seed=arguments.seed, workload=workload) | {"cells": []}
    with tempfile.TemporaryDirectory() as model:
        tiny(model)
        for shape in product(("short", "long"), NUM_PROMPTS, (0, GROUP_SIZE)):
            seeds = range(arguments.seed, arguments.seed + arguments.repeats)
            rollouts = [rollout(model, *shape, seed) for seed in seeds]
            for judge, way in product(STEPS, WAYS):
                runs = [replay(steps, _engine(model, judge), way) for steps in rollouts]
                row = summary(runs, [sum(step.seconds for step in steps) for steps in rollouts])
                result["cells"].append(Cell(judge, *shape)._asdict() | {"way": way} | row)
            Console(stderr=True).print(*shape, highlight=False)
    publish(arguments, result, tables)


def _engine(model: str, size: str) -> EmulatedRun:
    kv_tokens = Settings.read(ROOT / "examples/emulate_7b.json").kv_tokens
    assert kv_tokens is not None, "the example says how many"
    return EmulatedRun(
        model, Settings(step=StepSettings(**STEPS[size])), drafts=False, max_model_len=2 * MAX_TOKENS,
        max_num_seqs=MAX_NUM_SEQS, num_blocks=kv_tokens // BLOCK_SIZE, block_size=BLOCK_SIZE,
        options=ServeOptions(audit_ratio=0.0),
    )  # fmt: skip


def rollout(model: str, answers: str, num_prompts: int, redundancy: int, seed: int) -> list[Step]:
    """The steps of an actor that has its device alone."""
    run, chance, tail = _engine(model, "7B"), random.Random(f"judge/{seed}"), TAILS[MODEL]
    center = math.log(tail.median / (SHORTER if answers == "short" else 1))
    for group in range(num_prompts):
        of_prompt = chance.gauss(center, tail.described()["prompt_sigma"])
        drawn = [math.exp(chance.gauss(of_prompt, tail.described()["sigma"])) for _ in range(2 * GROUP_SIZE)]
        lengths = [max(1, min(MAX_TOKENS, round(each))) for each in drawn[: GROUP_SIZE + redundancy]]
        prompt = [100 + group, *range(1, PROMPT_TOKENS)]
        run.launch(str(group), lengths, prompt, GroupTerms(GROUP_SIZE, len(lengths)), max_tokens=MAX_TOKENS)
    steps, running, before = [], set(run.scheduler.requests), 0.0
    while run.step():
        ended = {name for name in running if name in run.outputs and run.outputs[name][-1].finished}
        running -= ended
        returned = sorted(name for name in ended if run.last(name).finish_reason != FinishReason.ABORT)
        if run.seconds > before:  # a step that only clears away takes no time
            said = [Answer(int(name.partition("/")[0]), run.num_tokens(name)) for name in returned]
            steps.append(Step(run.seconds - before, said))
        before = run.seconds
    assert sum(len(step.answers) for step in steps) == num_prompts * GROUP_SIZE
    return steps


def replay(steps: Sequence[Step], judge: EmulatedRun, way: str) -> Replayed:
    """Replay one rollout beside a judge that has graded nothing before."""
    ahead, waiting = deque(steps), deque[tuple[str, list[int]]]()
    ended_at, waits_s = list[float](), list[float]()
    actor_s = judge_s = 0.0  # what is left of the steps under way, on a whole device
    now, rollout_s, num_asked, judge_is_next = 0.0, 0.0, 0, False
    while True:
        if not actor_s and ahead:
            actor_s = ahead[0].seconds
        while waiting and num_asked - len(waits_s) < NUM_REQUESTS:
            name, question = waiting.popleft()
            judge.add(name, 1, prompt_token_ids=question, max_tokens=1)
            num_asked += 1
        if not judge_s and not (way == "after" and ahead):
            before = judge.seconds
            while judge.seconds == before and judge.step():
                pass
            judge_s = judge.seconds - before
        if not actor_s and not judge_s:
            return Replayed(rollout_s, now, waits_s, judge.seconds)
        actor, judges = parts(way, bool(actor_s and judge_s), judge_is_next)
        passed = min(left / part for left, part in ((actor_s, actor), (judge_s, judges)) if left and part)
        now += passed
        if judge_s and (judge_s := max(0.0, judge_s - judges * passed)) < TOLERANCE_S:
            judge_s, judge_is_next = 0.0, False
            output = judge.steps[-1].output
            said = zip(output.req_ids, output.sampled_token_ids, strict=True)
            waits_s += [now - ended_at[int(name)] for name, tokens in said if tokens]
        if actor_s and (actor_s := max(0.0, actor_s - actor * passed)) < TOLERANCE_S:
            actor_s, judge_is_next, rollout_s = 0.0, True, now
            for group, num_tokens in ahead.popleft().answers:
                # Answers to the same prompt have its beginning in common, which the prefix cache keeps.
                before_it = [100 + group, *range(1, PROMPT_TOKENS + TEMPLATE_TOKENS)]
                waiting.append((str(len(ended_at)), [*before_it, *[1000 + len(ended_at)] * num_tokens]))
                ended_at.append(now)


def parts(way: str, both: bool, judge_is_next: bool) -> tuple[float, float]:
    """Shares of the device for actor and judge. `judge_is_next`: if steps alternate, the judge's is next."""
    kind, _, share = way.partition(" ")
    if kind == "reserved":
        return 1 - float(share), float(share)
    if kind == "own" or not both:
        return 1.0, 1.0
    if kind == "slices":
        return 0.5, 0.5
    return (0.0, 1.0) if kind == "judge" or judge_is_next else (1.0, 0.0)


def summary(runs: Sequence[Replayed], alone: Sequence[float]) -> dict[str, Any]:
    """Medians over seeds. Ratios are to the actor without a judge. Waits are each run's median and 90th percentile."""
    return {
        "alone_s": median(alone),
        "speed": quartiles(ratios(alone, [run.rollout_s for run in runs])),
        "last_grade": quartiles(ratios([run.last_grade_s for run in runs], alone)),
        "wait_s": median(median(run.waits_s) for run in runs),
        "wait_p90_s": median(percentile(run.waits_s, 90) for run in runs),
        "judges_work": median(ratios([run.judge_s for run in runs], alone)),
    }


def tables(result: dict[str, Any]) -> str:
    rows = {(Cell(*(row[name] for name in Cell._fields)), row["way"]): row for row in result["cells"]}
    cells = [{"cell": cell} for cell in dict.fromkeys(cell for cell, _ in rows)]

    def shown(cell: Cell, way: str) -> str:
        row = rows[cell, way]
        speed, last = percent(row["speed"]["median"]), number(row["last_grade"]["median"], 2)
        return f"{speed}, {last}, {number(row['wait_s'], 2)} s"

    return columns("Decoding speed, last grade by the rollout alone, an answer's wait", cells, {
        "judge of": lambda row: row["cell"].judge,
        "answers": lambda row: f"{row['cell'].num_prompts * GROUP_SIZE} {row['cell'].answers}",
        "race": lambda row: f"8 of {GROUP_SIZE + row['cell'].redundancy}",
        "alone": lambda row: f"{number(rows[row['cell'], WAYS[0]]['alone_s'], 1)} s",
        **{way: lambda row, way=way: shown(row["cell"], way) for way in WAYS},
    })  # fmt: skip


if __name__ == "__main__":
    main()
