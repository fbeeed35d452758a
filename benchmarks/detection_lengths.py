"""Which detection length is best, and what a score of the whole trajectory is worth, on a real model.

Plain arithmetic and word sums, reward for the right number alone: what a first line looks like says nothing, so that an
early score has little to go by. One server, one client; problems and checker are those of benchmarks/tasks.py.

  learn     groups in shadow mode, scored at several detection lengths and by their last token, their rewards posted;
            the server's audits are on (nobody is stopped here, so that they change nothing but what is counted).
            What GET /v1/quality_head/detection_lengths then says is kept: every score was given before its reward
  pruned    other prompts, half kept (allow_fewer, the default rule, no audits), at each of the lengths in turn and
            with nobody pruned: the tokens that were saved beside those that were foretold, and survivors' success
  votes     larger groups of other prompts in shadow mode: maj@k by majority, by confidence, by the head's score at
            the recommended length and by its score of the whole trajectory; AUC of each on the same candidates

A run goes on where it stopped. Minutes on the tiny random model, whose numbers mean nothing:
  python -m benchmarks.detection_lengths --quick
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from benchmarks import long_run
from benchmarks.common import record_of_run, write_json
from benchmarks.pruning.measures import (
    FINAL_VOTES,
    Draws,
    correct_by_prompt,
    interval,
    overview,
    prediction,
    survivors,
    votes,
)
from benchmarks.pruning.phases import Bench, roll, wait_for_training
from benchmarks.pruning.records import Log, Record, records_of, share
from benchmarks.pruning.run import REAL
from benchmarks.pruning.setup import TINY, Question, Sizes, held_out, questions
from benchmarks.tables import INK, grid, number, percent, picture
from benchmarks.tasks import FAMILIES
from vllm_rollout.group.report import auc, within_group_auc

FAMILIES_ASKED = ("arithmetic", "word_sum")
VOTE_SIZES = (4, 8, 16)
SCORES = {
    "confidence of the trajectory": lambda record: record.mean_confidence,
    "quality head": lambda record: record.score,
    "quality head, whole trajectory": lambda record: record.final_score,
}


def main() -> None:
    arguments = parse_arguments()
    long_run.main("detection_lengths", arguments, lambda console: measure(arguments, console), tables, draw)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.detection_lengths",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--again", action="store_true", help="measure anew")
    long_run.add_arguments(parser, "detection_lengths")
    add("--model", help=f"a name of `vllm-rollout models list`, or a directory (default {REAL})")
    add("--lengths", type=int, nargs="+", default=[16, 48, 96], help="detection lengths (default 16 48 96)")
    add("--labels", type=int, default=1600, help="learn: rewards to be accepted (default 1600)")
    add("--prompts", type=int, default=24, help="pruned: prompts, 16 candidates each (default 24)")
    add("--vote-prompts", type=int, default=24, help="votes: prompts, 16 candidates each (default 24)")
    add("--max-tokens", type=int, default=256, help="length cap of an answer (default 256)")
    add("--seed", type=int, default=11, help="problems and sampling (default 11)")
    small = {
        "labels": 300,
        "prompts": 4,
        "vote_prompts": 4,
        "lengths": [4, 8],
        "max_tokens": 40,
        "model": TINY,
    }
    arguments = long_run.parse(parser, "detection_lengths", small)
    arguments.model = arguments.model or REAL
    return arguments


def sizes_of(arguments: argparse.Namespace) -> Sizes:
    """In the words of `benchmarks.pruning`, whose questions and requests these are."""
    unused = dict.fromkeys(
        ("window", "evaluate_prompts", "blocks", "sweep_blocks", "sweep_labels", "sweep_block_prompts",
         "sweep_detection_length", "overhead_blocks", "overhead_tokens", "block_prompts"), 1,
    )  # fmt: skip
    return Sizes(
        model=arguments.model,
        families=FAMILIES_ASKED,
        sweep_families=FAMILIES_ASKED,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        temperature=1.0,
        detection_length=min(arguments.lengths),
        at_once=96,
        labels=arguments.labels,
        learn_group_size=8,
        learn_prompts=6,
        vote_prompts=arguments.vote_prompts,
        vote_candidates=16,
        group_size=16,
        **unused,
    )


def measure(arguments: argparse.Namespace, console: Console) -> None:
    """Raises: ValueError when what is there was made with other sizes."""
    assert set(FAMILIES_ASKED) <= set(FAMILIES)
    work = arguments.output.with_suffix("")
    if arguments.again:
        long_run.remove(work, ("learn.jsonl", "pruned.jsonl", "votes.jsonl", "server.state", "begun.json"))
    asked = {name: getattr(arguments, name) for name in ("model", "lengths", "labels", "prompts", "vote_prompts",
        "max_tokens", "seed")}  # fmt: skip
    begun = long_run.begin(work, asked, arguments.seed, __doc__)
    flags = ["--rollout-state", str(work / "server.state")]
    sizes = sizes_of(arguments)
    with (
        long_run.running_server(sizes.model, sizes.at_once, flags, arguments.server_args, console) as server,
        long_run.progress(console) as progressed,
    ):

        async def all_of_it() -> dict[str, Any]:
            async with long_run.client_of(server) as client:
                return await measure_on(Bench(sizes, work, client, progressed), arguments.lengths, arguments.prompts)

        found = uvloop.run(all_of_it())
    record = record_of_run(seed=arguments.seed, workload=__doc__)
    write_json(arguments.output, {**record, "date": begun["date"], "sizes": asked, **found})


async def measure_on(bench: Bench, lengths: Sequence[int], num_prompts: int) -> dict[str, Any]:
    sizes = bench.sizes
    learned_from = questions(sizes, -(-3 * sizes.labels // (2 * sizes.learn_group_size)), sizes.seed, sizes.families)
    taken = {question.text for question in learned_from}
    others = held_out(sizes, num_prompts + sizes.vote_prompts, sizes.seed + 1, sizes.families, taken)
    runs = await learn(bench, learned_from, sorted(lengths))
    for length in (*lengths, 0):
        await wait_for_training(bench, length)
    trial = asdict(await bench.client.detection_lengths())
    report = await bench.client.report(0)
    best = trial["recommended"] or sorted(lengths)[len(lengths) // 2]
    ways = await pruned(bench, others[:num_prompts], sorted(lengths))
    voted = await vote(bench, others[num_prompts:], best)
    return {
        "learn": {**overview(records_of(runs)), "num_labels": sum(sum((r.rewards or {}).values()) for r in runs)},
        "trial": trial,
        "final": {"head_version": report.head.version if report.head else 0, "signals": {
            name: {"auc": its.auc, "within_group_auc": its.within_group_auc, "num_labels": its.num_positive
                   + its.num_negative} for name, its in report.signals.items()}},
        "pruned": ways,
        "votes": voted,
    }  # fmt: skip


async def learn(bench: Bench, asked: Sequence[Question], lengths: Sequence[int]) -> list[Any]:
    """Until so many rewards have been accepted."""
    sizes, log = bench.sizes, Log(bench.folder / "learn.jsonl")
    pruning = {"detection_length": list(lengths), "final_score": True, "allow_fewer": True}
    batches = [asked[start : start + sizes.learn_prompts] for start in range(0, len(asked), sizes.learn_prompts)]
    todo = iter([(number, batch) for number, batch in enumerate(batches) if ("learn", number) not in log])

    def num_accepted() -> int:
        return sum((run.rewards or {}).get("accepted", 0) for run in log.runs)

    async def work() -> None:
        for place, batch in todo:
            if num_accepted() >= sizes.labels:
                return
            log.add(
                await roll(bench, ("learn", place), batch, phase="learn", group_size=sizes.learn_group_size,
                           pruning=pruning, seed=sizes.seed + 1000 * place, post_rewards=True)
            )  # fmt: skip
            bench.progress(num_accepted(), sizes.labels, "learn: labels")

    await asyncio.gather(*(work() for _ in range(3)))
    return log.runs


async def pruned(bench: Bench, asked: Sequence[Question], lengths: Sequence[int]) -> dict[str, Any]:
    """Nobody pruned, and half of the candidates at each length, over the same prompts and seeds, in turns."""
    sizes, log = bench.sizes, Log(bench.folder / "pruned.jsonl")
    ways: dict[str, Mapping[str, Any] | None] = {"nobody": None}
    ways |= {str(length): {"detection_length": length, "allow_fewer": True} for length in lengths}
    blocks = [asked[start : start + 6] for start in range(0, len(asked), 6)]
    names = list(ways)
    for place, block in enumerate(blocks):
        for way in names[place % len(names) :] + names[: place % len(names)]:
            if (way, place) not in log:
                seed = sizes.seed + 10_000_000 + 1000 * place
                log.add(
                    await roll(bench, (way, place), block, phase="compare", group_size=sizes.group_size,
                               pruning=ways[way], seed=seed, audit_ratio=0.0)
                )  # fmt: skip
            bench.progress(len(log.runs), len(blocks) * len(names), "pruned: requests")
    by_way = {way: [run for run in log.runs if run.key[0] == way] for way in names}
    tokens = {way: sum(run.generated_tokens for run in mine) for way, mine in by_way.items()}
    return {
        way: {
            "generated_tokens": tokens[way],
            "saved_ratio": 1 - (share(tokens[way], tokens["nobody"]) or 0),
            "num_pruned": sum(run.num_pruned for run in mine),
            **survivors(correct_by_prompt(records_of(mine))),
        }
        for way, mine in by_way.items()
    }


async def vote(bench: Bench, asked: Sequence[Question], detection_length: int) -> dict[str, Any]:
    """Large groups in shadow mode, which are not rewarded."""
    sizes, log = bench.sizes, Log(bench.folder / "votes.jsonl")
    pruning = {"detection_length": detection_length, "final_score": True, "mode": "shadow", "allow_fewer": True}
    batches = [asked[start : start + 3] for start in range(0, len(asked), 3)]
    todo = iter([(number, batch) for number, batch in enumerate(batches) if ("votes", number) not in log])

    async def work() -> None:
        for place, batch in todo:
            seed = sizes.seed + 20_000_000 + 1000 * place
            log.add(
                await roll(bench, ("votes", place), batch, phase="vote", group_size=sizes.vote_candidates,
                           pruning=pruning, seed=seed)
            )  # fmt: skip
            bench.progress(len(log.runs), len(batches), "votes: requests")

    await asyncio.gather(*(work() for _ in range(2)))
    records = records_of(log.runs)
    return {
        "detection_length": detection_length,
        **votes(records, VOTE_SIZES, ways=FINAL_VOTES),
        "signals": {name: discrimination(records, score) for name, score in SCORES.items()},
    }


def discrimination(records: Sequence[Record], score: Any, seed: int = 0) -> dict[str, Any]:
    """AUC of a score, overall and within groups, over candidates that have all scores there are; 90 % intervals,
    bootstrapped over prompts."""
    ended = [record for record in records if record.correct is not None]
    there = [of for of in SCORES.values() if any(of(record) is not None for record in ended)]
    known = [record for record in ended if all(of(record) is not None for of in (*there, score))]
    draws, points = Draws(known, score), [prediction(record, score(record)) for record in known]
    return {
        "num_candidates": len(known),
        "auc": {"value": auc(points), "interval": interval(draws.auc(seed))},
        "within_group_auc": {"value": within_group_auc(points), "interval": interval(draws.within_group_auc(seed))},
    }


def tables(result: Mapping[str, Any]) -> str:
    learned, trial, voted = result["learn"], result["trial"], result["votes"]
    foretold = {row["detection_length"]: row for row in trial["lengths"]}
    rows = []
    for way, its in result["pruned"].items():
        row = foretold.get(int(way)) if way != "nobody" else None
        said = ["", "", "", ""]
        if row is not None:
            error = f" ± {row['auc_error']:.3f}" if row["auc_error"] is not None else ""
            said = [f"{number(row['auc'])}{error}", number(row["within_group_auc"]), percent(row["saving_ratio"]),
                    number(row["value"])]  # fmt: skip
        name = way if way == "nobody" else f"{way}{' (recommended)' if int(way) == trial['recommended'] else ''}"
        rows.append([name, *said, percent(its["saved_ratio"]), number(its["overall_ratio"]),
                     number(its["mean_ratio_product"])])  # fmt: skip
    header = ["pruned at", "AUC", "within groups", "to be saved", "value", "saved", "survivors right", "E[ρ̂(1−ρ̂)]"]
    title = (
        f"Detection lengths: {learned['num_labels']:,} labels, {number(learned['success_rate'], 2)} right, mean length "
        f"{learned['mean_tokens']:.0f}; {trial['reason']}"
    )
    parts = [grid(title, header, rows)]
    rows = []
    for name in FINAL_VOTES:
        of = voted["signals"].get(name, {})
        told = [number(of[m]["value"]) if of else "" for m in ("auc", "within_group_auc")]
        maj = [f"{at['accuracy']:.3f} ± {at['standard_error'] or 0:.3f}" for at in voted[name]]
        rows.append([name, *told, *maj])
    sizes = [f"maj@{at['k']}" for at in voted["majority"]]
    title = f"Votes: {voted['num_groups']} prompts, single candidates right {number(voted['mean_success_rate'])}"
    parts.append(grid(title, ["weight", "AUC", "within groups", *sizes], rows))
    return "\n\n".join(parts)


SHOWN = {
    "majority": "#64748b",
    "confidence of the trajectory": "#94a3b8",
    "quality head": "#f59e0b",
    "quality head, whole trajectory": "#0f766e",
}
"""Ways of voting in the picture."""


def draw(result: Mapping[str, Any], path: Path) -> None:
    """What is known at each length and what is saved there; how often votes are right."""
    rows, voted = result["trial"]["lengths"], result["votes"]
    with picture(path, (10.5, 4.0), (1.0, 1.0), 2.0) as (lengths, ballots):
        saved = [100 * row["saving_ratio"] for row in rows]
        lengths.errorbar(
            saved,
            [row["auc"] for row in rows],
            yerr=[row["auc_error"] for row in rows],
            fmt="o",
            color=SHOWN["majority"],
        )
        for row, x in zip(rows, saved, strict=True):
            best = row["detection_length"] == result["trial"]["recommended"]
            text = f"{row['detection_length']} tokens{', recommended' if best else ''}"
            lengths.annotate(text, (x, row["auc"]), xytext=(8, 6), textcoords="offset points", color=INK)
        lengths.axhline(0.5, color="#cbd5e1", linewidth=1)
        lengths.set(xlabel="tokens saved, % (half kept)", ylabel="AUC (± standard error)", xlim=(0, 65))
        lengths.set_title("where to score", loc="left")
        for name, color in SHOWN.items():
            ks = [at["k"] for at in voted[name]]
            ballots.plot(ks, [at["accuracy"] for at in voted[name]], "o-", color=color, label=name)
        ballots.set(xlabel="candidates that vote", ylabel="votes that are right", xticks=ks)
        ballots.set_title("maj@k", loc="left")
        ballots.legend(frameon=False, fontsize=9)


if __name__ == "__main__":
    main()
