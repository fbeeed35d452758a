"""The phases of `benchmarks.pruning` that talk to a server.

Invariant: a run in a phase's log is not measured again, and an interrupted phase continues after its last run.
The learned state lies in a file beside the logs, and only `learn` posts rewards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import in_turn
from benchmarks.long_run import Progressed, RunLog, keep_state
from benchmarks.pruning.records import Record, Run
from benchmarks.pruning.setup import Phase, Question, Sizes, evaluation_questions, learning_questions
from vllm_rollout import AsyncRolloutClient
from vllm_rollout.kernel.http.answers import Candidate, Trajectory
from vllm_rollout.parts.pruning.rules.assessment import Confidence

TRAINING_QUIET_S = 3.0
"""Training counts as done when the head has not changed for this long."""
TRAINING_TIMEOUT_S = 120.0

SHADOW = {"mode": "shadow", "allow_fewer": True}
"""Pruning that reports its decisions for a group and stops no candidate."""
COMPARED: Mapping[str, Mapping[str, Any]] = {
    "none": {"keep_ratio": 1.0},
    "random": {"rule": "paper", "strength": 0.0, "keep_ratio": 0.5},
    "paper": {"rule": "paper", "keep_ratio": 0.5},
    "balance": {"rule": "balance", "keep_ratio": 0.5},
    "gradient": {"rule": "gradient", "keep_ratio": 0.5},
}
"""Ways of `compare`. The paper's rule with strength 0 keeps every candidate with the same probability."""
SWEPT: Mapping[str, Mapping[str, Any]] = {str(ratio): {"keep_ratio": ratio} for ratio in (1.0, 0.75, 0.5, 0.25)}
"""Ways of `sweep`, which use the default rule."""
FEWER: tuple[str, str] = ("none", "fewer")
"""Ways of `fewer`: all candidates, and the first half of them."""
SEEDS = {"learn": 0, "evaluate": 1, "vote": 2, "compare": 3, "sweep": 4}
"""Offset of the seeds in millions, by the phase whose prompts are used."""

Log = RunLog[Run]


def log_of(folder: Path, phase: Phase) -> Log:
    return RunLog(folder / f"{phase}.jsonl", Run)


@dataclass(slots=True)
class Bench:
    """Sizes, folder and client that every phase uses."""

    sizes: Sizes
    folder: Path
    client: AsyncRolloutClient
    progress: Progressed

    def log(self, phase: Phase) -> Log:
        return log_of(self.folder, phase)

    @property
    def learned(self) -> Path:
        """The file with the state that `learn` has learned."""
        return self.folder / "learned.state"

    async def restore(self, path: Path) -> None:
        if not path.exists():
            raise ValueError(f"{path} does not exist: run phase learn first, with the same --output.")
        await self.client.set_state(path.read_bytes())

    async def keep(self, path: Path) -> None:
        await keep_state(self.client, path)


async def learn(bench: Bench) -> dict[str, Any]:
    """Run rollouts in shadow mode, judge their answers and post rewards. Several rollouts overlap, so the server never
    idles.

    Returns the server's report when training is done.
    """
    sizes, log = bench.sizes, bench.log("learn")
    batches = _split(learning_questions(sizes), sizes.learn_prompts)
    todo = iter([(number, batch) for number, batch in enumerate(batches) if ("rewarded", number) not in log])
    pruning = {"detection_length": sizes.detection_length, **SHADOW}

    def num_accepted() -> int:
        return sum((run.rewards or {}).get("accepted", 0) for run in log.runs if run.key[0] == "rewarded")

    async def work() -> None:
        for number, batch in todo:
            if num_accepted() >= sizes.labels:
                return
            run = await roll(
                bench,
                ("rewarded", number),
                batch,
                phase="learn",
                group_size=sizes.learn_group_size,
                pruning=pruning,
                seed=_seed(sizes, "learn", number),
                post_rewards=True,
            )
            log.add(run)
            bench.progress(num_accepted(), sizes.labels, "learn: labels")

    bench.progress(num_accepted(), sizes.labels, "learn: labels")
    num_workers = max(2, round(1.5 * sizes.at_once / (sizes.learn_prompts * sizes.learn_group_size)))
    await _together([work() for _ in range(num_workers)])
    await wait_for_training(bench, sizes.detection_length)
    await bench.keep(bench.learned)
    return {"server_report": asdict(await bench.client.report(sizes.detection_length))}


async def evaluate(bench: Bench) -> dict[str, Any]:
    """Shadow mode on prompts without posted rewards, the head unchanged, then larger groups."""
    sizes, log = bench.sizes, bench.log("evaluate")
    await bench.restore(bench.learned)
    held = evaluation_questions(sizes)
    pruning = {"detection_length": sizes.detection_length, **SHADOW}
    jobs = []
    per_request = max(1, sizes.at_once // (2 * sizes.learn_group_size))
    for number, batch in enumerate(_split(held["evaluate"], per_request)):
        jobs.append((("evaluate", number), batch, sizes.learn_group_size))
    for number, batch in enumerate(_split(held["vote"], 1)):
        jobs.append((("vote", number), batch, sizes.vote_candidates))
    todo = iter([job for job in jobs if job[0] not in log])

    async def work() -> None:
        for key, batch, group_size in todo:
            phase, number = key
            seed = _seed(sizes, phase, number)
            log.add(await roll(bench, key, batch, phase=phase, group_size=group_size, pruning=pruning, seed=seed))
            bench.progress(len(log.runs), len(jobs), "evaluate: requests")

    bench.progress(len(log.runs), len(jobs), "evaluate: requests")
    await _together([work() for _ in range(3)])
    return {}


async def compare(bench: Bench) -> dict[str, Any]:
    """Every way over the same prompts and seeds, in turns."""
    sizes, log = bench.sizes, bench.log("compare")
    await bench.restore(bench.learned)
    blocks = _split(evaluation_questions(sizes)["compare"], sizes.block_prompts)
    pruning = {"detection_length": sizes.detection_length, "allow_fewer": True}
    await _take_turns(bench, log, "compare", blocks, {way: {**pruning, **f} for way, f in COMPARED.items()})
    return {}


async def sweep(bench: Bench) -> dict[str, Any]:
    """Every `keep_ratio` over the same prompts and seeds, in turns."""
    sizes, log = bench.sizes, bench.log("sweep")
    await bench.restore(bench.learned)
    blocks = _split(evaluation_questions(sizes)["sweep"], sizes.sweep_block_prompts)
    pruning = {"detection_length": sizes.detection_length, "allow_fewer": True, "min_labels": 16}
    await _take_turns(bench, log, "sweep", blocks, {way: {**pruning, **fields} for way, fields in SWEPT.items()})
    return {}


async def fewer(bench: Bench) -> dict[str, Any]:
    """Half as many candidates against all of them, with the prompts and seeds of `compare`."""
    sizes, log = bench.sizes, bench.log("fewer")
    blocks = _split(evaluation_questions(sizes)["compare"], sizes.block_prompts)
    group_sizes = dict(zip(FEWER, (sizes.group_size, sizes.group_size // 2), strict=True))
    await _take_turns(bench, log, "compare", blocks, dict.fromkeys(FEWER), group_sizes=group_sizes)
    return {}


async def _take_turns(
    bench: Bench,
    log: Log,
    phase: Phase,
    blocks: Sequence[Sequence[Question]],
    ways: Mapping[str, Mapping[str, Any] | None],
    group_sizes: Mapping[str, int] | None = None,
) -> None:
    """Run every way once per block, one after the other. Each block starts with another way.

    phase: the phase whose prompts and seeds are used. group_sizes: of ways that do not have the usual group size.
    """
    names = list(ways)
    total = len(blocks) * len(names)
    done = sum(run.key[0] in ways for run in log.runs)
    for number, block in enumerate(blocks):
        order = [way for way in in_turn(names, number) if (way, number) not in log]
        if not order:
            continue
        bench.progress(done, total, f"{phase}: block {number + 1}")
        # the prompts get into the prefix cache before any way is timed; the first time, everything warms up
        warm_up = {"max_tokens": bench.sizes.detection_length + 8 if done == 0 else 1, "min_tokens": 0}
        key = ("warm-up", number)
        await roll(bench, key, block, phase=phase, group_size=2, pruning=None, seed=number, sampling_params=warm_up)
        for way in order:
            run = await roll(
                bench,
                (way, number),
                block,
                phase=phase,
                group_size=(group_sizes or {}).get(way, bench.sizes.group_size),
                pruning=ways[way],
                seed=_seed(bench.sizes, phase, number),
            )
            log.add(run)
            done += 1
            bench.progress(done, total, f"{phase}: {way}, block {number + 1}, {run.wall_s:.1f} s")


async def roll(
    bench: Bench,
    key: tuple[str | int, ...],
    batch: Sequence[Question],
    *,
    phase: Phase,
    group_size: int,
    pruning: Mapping[str, Any] | None,
    seed: int,
    sampling_params: Mapping[str, Any] | None = None,
    post_rewards: bool = False,
) -> Run:
    """One rollout request. The clock stops when the whole answer has arrived, before checks and rewards."""
    sizes = bench.sizes
    by_id = {f"{phase}/{question.prompt['id']}": question for question in batch}
    prompts = [{**question.prompt, "id": prompt_id} for prompt_id, question in by_id.items()]
    settings = {**sizes.sampling, "seed": seed, **(sampling_params or {})}
    started_s, started = time.time(), time.perf_counter()
    answer = await bench.client.rollout(
        prompts,
        group_size,
        pruning=pruning,
        sampling_params=settings,
        include=["text"],
    )
    wall_s = time.perf_counter() - started
    records = tuple(
        _record(group.prompt_id, candidate, by_id[group.prompt_id])
        for group in answer.groups
        for candidate in sorted([*group.trajectories, *group.candidates], key=lambda candidate: candidate.index)
    )
    rewards = await _post(bench, answer.id, records) if post_rewards else None
    usage = answer.usage
    return Run(
        key,
        started_s,
        wall_s,
        usage.generated_tokens,
        usage.num_scored,
        usage.num_pruned,
        tuple(answer.warnings),
        records,
        rewards,
        sum(group.audit for group in answer.groups),
    )


async def _post(bench: Bench, rollout_id: str, records: Sequence[Record]) -> dict[str, int]:
    rewards = [(r.prompt_id, r.index, float(r.correct)) for r in records if r.correct is not None]
    counts = (await bench.client.post_rewards(rollout_id, rewards)).counts.model_dump() if rewards else {}
    if lost := {status: num for status, num in counts.items() if num and status not in ("accepted", "unscored")}:
        raise ValueError(f"rewards of {rollout_id} were not accepted: {lost}. Does anyone else post to this server?")
    return counts


def _record(prompt_id: str, candidate: Trajectory | Candidate, question: Question) -> Record:
    finished = isinstance(candidate, Trajectory)
    confidence = candidate.confidence
    return Record(
        prompt_id=prompt_id,
        index=candidate.index,
        state="finished" if finished else candidate.state,
        num_tokens=candidate.num_tokens,
        truncated=finished and candidate.finish_reason == "length",
        correct=question.judge(candidate) if finished else None,
        signal=candidate.signal,
        score=candidate.score,
        success_probability=candidate.success_probability,
        survival_probability=candidate.survival_probability,
        head_version=candidate.head_version,
        confidence=None
        if confidence is None
        else Confidence(confidence.mean, confidence.lowest_window, confidence.bottom_windows),
    )


async def wait_for_training(bench: Bench, detection_length: int) -> None:
    """Wait until the head no longer changes. Its training goes on for a while after the last reward."""
    bench.progress(0, 1, "training ends")
    deadline = time.monotonic() + TRAINING_TIMEOUT_S
    seen, since = -1, time.monotonic()
    while time.monotonic() < deadline and time.monotonic() - since < TRAINING_QUIET_S:
        head = (await bench.client.report(detection_length)).head
        num_steps = 0 if head is None else head.num_steps
        if num_steps != seen:
            seen, since = num_steps, time.monotonic()
        await asyncio.sleep(TRAINING_QUIET_S / 6)
    bench.progress(1, 1, "training ends")


async def _together(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all jobs. The first failure ends the others."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _split(items: Sequence[Question], size: int) -> list[Sequence[Question]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _seed(sizes: Sizes, phase: str, number: int) -> int:
    """The seed of sampling: the same for every way of a block, another one for every block and phase."""
    return sizes.seed + 1_000_000 * SEEDS[phase] + 1000 * number


RUN_PHASE: Mapping[Phase, Callable[[Bench], Coroutine[Any, Any, dict[str, Any]]]] = {
    "learn": learn,
    "evaluate": evaluate,
    "compare": compare,
    "sweep": sweep,
    "fewer": fewer,
}
"""The function of each phase, by name."""
