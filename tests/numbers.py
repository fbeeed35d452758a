"""Sources of the numbers in README.md and docs/results.md.

A row of a table of results is known by its first two cells, *what* and *against*: they state conditions. All numbers in
its other cells, but the link to the file, are computed here from the JSON that the benchmark wrote.

To quote a number:

1. write the row on the page;
2. add an entry for it to `README` or `RESULTS`: the two cells, the file or files, and a function of their JSON. The
   function returns the row's numbers in the order in which they stand, rounded as printed, with spaces between;
3. run `python -m pytest tests/test_numbers.py`. A difference shows what the page says and what the file says.

Names with digits (`NAMES`) are no numbers. Write counts of runs as digits, or nothing checks them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks.gpu_check.cost import WANTED_RATIOS
from benchmarks.gpu_check.kernels import WANTED_SHARE
from conformance.gain import AT_ONCE_PROMPTS, GRADE_S

ROOT = Path(__file__).parents[1]
NAMES = re.compile(r"H200|Qwen3-8B|SmolLM2-135M|Qwen2\.5-Coder-0\.5B|\b\d+(?:\.\d)?[BM]\b|0\.9 M\b|Eq\. \d")
NUMBER = re.compile(r"[-−+]?\d+(?:,\d{3})*(?:\.\d+)?")
RACE = "race, first 8 of 16"
PLAIN = "waiting for all of 8"
COLOCATED = "colocated_gain_of_many_prompts"
SHORTEST = "auto"
"""As shaping.json calls the shortest 8 of 16, which was the choice of `auto` then."""


class Quoted(NamedTuple):
    """A row of a page: what it measures against what, and how its numbers follow from files."""

    what: str
    against: str
    files: str | tuple[str, ...]
    """In benchmarks/results without their ending, or paths from the root."""
    numbers: Callable[..., str]
    """Numbers computed from the JSON of each file."""


@cache
def loaded(name: str) -> Any:
    text = (ROOT / path_of(name)).read_text()
    return [json.loads(line) for line in text.splitlines()] if name.endswith(".jsonl") else json.loads(text)


def path_of(name: str) -> str:
    if name.endswith(".jsonl"):
        return name
    return f"{name}.json" if "/" in name else f"benchmarks/results/{name}.json"


def paths_of(quoted: Quoted) -> list[str]:
    return [path_of(name) for name in ((quoted.files,) if isinstance(quoted.files, str) else quoted.files)]


def computed(quoted: Quoted) -> list[str]:
    """The row's numbers as the files say."""
    files = (quoted.files,) if isinstance(quoted.files, str) else quoted.files
    return quoted.numbers(*map(loaded, files)).split()


def numbers_in(text: str) -> list[str]:
    """The numbers of a cell, as they are printed."""
    return [found.replace("−", "-").lstrip("+") for found in NUMBER.findall(NAMES.sub("", text))]


def rows(page: str) -> Iterator[list[str]]:
    """The cells of each row of a table of results, without the addresses of links but in the last cell."""
    header: list[str] = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            header = []
        elif not header:
            header = cells
        elif header[:3] == ["what", "against", "result"] and not cells[0].startswith("--"):
            shown = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).replace("`", "").replace("**", "") for cell in cells]
            yield [*shown[:5], *cells[5:]]


# One function for each file whose numbers stand in several rows.


def race(it: Any, way: str) -> float:
    """Seconds of a way over ours, on the real model."""
    return float(it["races"][0]["ratios"][f"{way}/d"])


def tiny_races(it: Any, way: str) -> list[float]:
    """Ratios of races on the tiny model, by number of groups, the smallest first."""
    return sorted(each["ratios"][f"{way}/d"] for each in it["races"][1:])


def of_ideal(it: Any, candidates: int, way: str = "rollouts", digits: int = 0) -> str:
    (size,) = (size for size in it["sizes"] if size["candidates"] == candidates)
    return f"{100 * size['medians'][way]['of_ideal']:.{digits}f}"


def step_ms(it: Any) -> float:
    """Time of a step of the emulated device, before the time that each candidate adds."""
    return float(it["workload"]["device"]["step"]["ms"] / it["workload"]["speed"])


def seeds(it: Any) -> int:
    return int(it["workload"]["repeats"])


def at_once(it: Any, name: str = "gain_of_many_prompts") -> Any:
    return next(check["at_once"] for check in it["checks"] if check["name"] == name)


def gain(it: Any, key: str = "generation_spares", name: str = "gain_of_many_prompts") -> str:
    return f"{at_once(it, name)['ratios'][key]:.1f}"


def runs_of_gain(it: Any) -> int:
    return len(at_once(it)["seconds"]["generation"]["plain"])


def grading(it: Any, ratio: str) -> str:
    """Speed-ups of both kinds of rounds."""
    return "{:.1f} {:.1f}".format(*sorted(shape["ratios"][ratio]["median"] for shape in it["results"]))


def graded(it: Any) -> str:
    """Right answers that learned limits ended, and all right answers."""
    ways = [shape["ways"]["learned"] for shape in it["results"]]
    return " ".join(str(sum(way[key] for way in ways)) for key in ("num_right_killed", "num_right"))


def epochs(it: Any) -> int:
    """Number of epochs of each way, without the first one, in which limits are learned."""
    return len({each["epoch"] for each in it["rounds"]} - {0})


def rounds_faster(it: Any, prompts: float, answers: float) -> str:
    seconds = {
        (each["prompt_speculation"], each["response_speculation"]): each["emulated"]["prompt_s"]
        for each in it["settings"]
    }
    return f"{seconds[1.0, 1.0] / seconds[prompts, answers]:.2f}"


def arm(it: Any, name: str, style: str = "long is wrong") -> Any:
    return next(row for row in it["styles"][style] if row["arm"] == name)


def to_goal(it: Any, name: str, style: str = "long is wrong") -> float:
    """Median seconds to a success rate of 0.60."""
    return float(arm(it, name, style)["to_0.6"]["gpu_seconds"])


def sooner(it: Any, name: str, style: str = "long is wrong", than: str = "plain") -> str:
    seconds, other = (to_goal(it, each, style) for each in (name, than))
    return f"{other / seconds:.1f} {seconds:.0f} {other:.0f}"


def reached(it: Any, *names: str, style: str = "long is wrong") -> str:
    """Number of an arm's trainings that reached the goal, and number of all its trainings, for each arm."""
    found = [arm(it, name, style) for name in names]
    return " ".join(f"{each['to_0.6']['num']} {len(each['seeds'])}" for each in found)


def clocked(it: Any, name: str) -> Any:
    """The row of an arm on the virtual clock, where training is a quarter of a step that waits."""
    (row,) = (row for row in it["worlds"]["quarter"] if row["arm"] == name)
    return row


def best_without_race(it: Any) -> str:
    """The asynchronous arm without a race that was soonest."""
    return str(clocked(it, "wait")["to_0.6"]["gain_over_best"]["arm"])


def paired_gain(it: Any, name: str) -> str:
    """Gain to 0.60 over the best asynchronous arm without a race: the median of pairs of one seed."""
    assert best_without_race(it) == "stale4-drop"
    return f"{clocked(it, name)['to_0.6']['gain_over_best']['value']:.1f}"


def clocked_gain(it: Any, name: str, than: str) -> str:
    """Gain to 0.60 over another arm, seconds of both, and how many runs of how many reached it."""
    rows = [clocked(it, each) for each in (name, than)]
    seconds, other = (row["to_0.6"]["seconds"] for row in rows)
    counts = " ".join(f"{row['to_0.6']['num']} {len(row['seeds'])}" for row in rows)
    return f"{other / seconds:.1f} {seconds:.0f} {other:.0f} {counts}"


def best_rate(it: Any, name: str) -> tuple[float, int]:
    """Seconds at the learning rate at which an arm is soonest, and how many trainings: all of them reached the goal."""
    arms = [row for of in it["styles"].values() for row in of if row["arm"] == name]
    whole = [row for row in arms if row["to_0.6"]["num"] == len(row["seeds"])]
    return min((row["to_0.6"]["gpu_seconds"], len(row["seeds"])) for row in whole)


def at_best_rates(it: Any) -> str:
    (seconds, num), (other, num_others) = (best_rate(it, name) for name in ("race", "plain"))
    return f"{other / seconds:.1f} {seconds:.0f} {other:.0f} {num} {num} {num_others} {num_others}"


def pruned(it: Any, way: str, key: str = "mean_ratio") -> float:
    return float(it["phases"]["compare"]["survivors"][way][key])


def drafts(it: Any, fewest: int, most: int) -> list[float]:
    """Speed-ups for answers whose lengths differ."""
    return [
        cell["faster"]
        for cell in it["cells"]
        if cell["part"] == "long"
        and cell["device"] == "roofline"
        and fewest <= cell["batch_size"] <= most
        and cell["sigma"] > 0
    ]


def throughput(it: Any, way: str) -> str:
    return " ".join(f"{each['ratios'][way]['median']:.2f}" for each in it["results"])


def repeats(it: Any) -> str:
    return " ".join(str(each["repeats"]) for each in it["results"])


def free_share(it: Any, way: str) -> str:
    one = it["ways"][way]["emulated"]
    return f"{100 * one['freed_rank_s'] / (it['workload']['ranks'] * one['seconds']):.0f}"


def longer(it: Any, way: str) -> str:
    seconds = {name: each["emulated"]["seconds"] for name, each in it["ways"].items()}
    return f"{100 * (seconds[way] / seconds['stay'] - 1):.1f}"


def agents(it: Any, way: str, digits: int) -> str:
    found = [row["seconds_to_race"] for row in it["medians"] if row["way"] == way]
    return f"{min(found):.{digits}f} {max(found):.{digits}f}"


def sessions(it: Any) -> str:
    found = [row["sessions"] for row in it["medians"]]
    return f"{min(found)} {max(found):,}"


def moved(it: Any, way: str, tokens: int) -> float:
    return median(each["wait_s"] for each in it["moves"][way][str(tokens)])


def judged(it: Any, way: str) -> str:
    """Time of the last grade, relative to the rollout alone: 64 long answers, a judge of 7B."""
    load = {"judge": "7B", "answers": "long", "num_prompts": 8, "redundancy": 0, "way": way}
    (cell,) = (cell for cell in it["cells"] if cell.items() >= load.items())
    return f"{cell['last_grade']['median']:.2f}"


def step(it: Any, key: str) -> str:
    """Speed-up of the last row against the first one, the synchronous step."""
    return f"{it['measured'][0][key] / it['measured'][-1][key]:.1f}"


def streamed(it: Any, name: str) -> Any:
    return next(each for each in it["stream"] if each["name"] == name)


def ordered(it: Any) -> list[list[float]]:
    """Seconds of the second and third epoch over those of the prompts' order, by cell: 8 ranks of 256 places."""
    cells = [cell for cell in it["cells"] if (cell["ranks"], cell["places"]) == (8, 256)]
    return [[ratio for ratios in cell["ratios"] for ratio in ratios[1:3]] for cell in cells]


def believed(it: Any, audit_ratio: float) -> str:
    """Success rate that the report believes, less the true one."""
    world = {"way": "raced", "longer": 1.0, "audit_ratio": audit_ratio}
    (cell,) = (cell for cell in it["bias"] if cell.items() >= world.items())
    return f"{cell['report']['mean']:.3f}"


def waited(it: Any) -> str:
    (cost,) = (each for each in it["cost"] if (each["num_prompts"], each["audit_unit"]) == (64, "rollout"))
    return f"{cost['wait']['raced']:.2f} {cost['wait']['audited']:.2f}"


def saved(it: Any, key: str) -> str:
    """Mean errors by sigma, in percent: the smallest and the largest; the largest standard deviation."""
    means = [100 * row[key]["mean"] for row in it["errors"]]
    return f"{min(means):.0f} {max(means):.0f} {100 * max(row[key]['std'] for row in it['errors']):.0f}"


def found(it: Any, name: str) -> Any:
    """Result of a piece of a lease. Its last line counts."""
    return [line["value"] for line in it if line["kind"] == "result" and line["name"] == name][-1]


def repeated(it: Any, **wanted: Any) -> list[Any]:
    """Values of a lease without the first repeat, which warms up."""
    return [line for line in it if line["kind"] == "value" and line.items() >= wanted.items() and line.get("repeat", 1)]


def pairs(it: Any, way: str) -> int:
    return len([line for line in repeated(it, piece="overhead", way=way) if "seconds" in line])


def confidence(it: Any, rows: int, key: str) -> float:
    (one,) = repeated(it, operator="token_confidence", dtype="bfloat16", rows=rows)
    return float(one[key])


def over_stock(it: Any, way: str) -> float:
    return float(found(it, f"{way}: throughput over stock's")["median"])


TRAINED = "throughput while a head trains 5 ms after each step, over none"


def gain_on_gpu(it: Any) -> str:
    return f"{found(it, 'ours, first 8: times as fast as stock')['median']:.2f}"


def races_on_gpu(it: Any) -> int:
    return len(repeated(it, piece="race", way="ours, first 8"))


def prompts(it: Any) -> int:
    return int(it["races"][0]["num_groups"])


def runs(it: Any) -> int:
    real = it["races"][0]
    return len(real["measurements"]) // len(real["ways"])


def lost(it: Any) -> str:
    counts = it["counts"]
    waiting = counts["prompts_handed_in"] - counts["prompts_returned_or_filtered"]
    return f"{len(it['problems'])} {counts['prompts_handed_in']:,} {counts['lives']:,} {waiting}"


def refused(it: Any) -> str:
    answers = sum(it["answers_by_status"].values())
    return f"{it['num_answers_500_or_above']} {answers:,} {it['num_violations']} {it['num_acts']:,}"


LEASE = "benchmarks/results/gpu_h200/lease.jsonl"

README: Sequence[Quoted] = (
    Quoted("race, first 8 of 16, H200", "stock vLLM, all 16 awaited", LEASE,
           lambda it: f"{gain_on_gpu(it)} 256 {races_on_gpu(it)}"),
    Quoted(RACE, "vLLM, n=8, all awaited", "group_race",
           lambda it: f"{race(it, 'b'):.1f} {prompts(it)} {runs(it)}"),
    Quoted("race, 2,048 candidates", "a streaming client that aborts losers", "front_end",
           lambda it: f"{of_ideal(it, 2048)} {of_ideal(it, 2048, 'stream')} {step_ms(it):.0f} {seeds(it)} "
                      f"{of_ideal(it, 2048, 'rust-close')}"),
    Quoted("TRL in one process, 16 prompts", "TRL without spare candidates", "conformance/results/trl",
           lambda it: f"{gain(it, 'step_rewarded', COLOCATED)} {runs_of_gain(it)} {GRADE_S} "
                      f"{gain(it, 'step_spares', COLOCATED)}"),
    Quoted("learning to a success rate of 0.60", PLAIN, "time_to_reward",
           lambda it: f"{sooner(it, 'race').split()[0]} {len(arm(it, 'race')['seeds'])} "
                      f"{sooner(it, 'race', 'long is right').split()[0]}"),
    Quoted("a race one step off, stopped answers trained on", "asynchronous training that drops old groups",
           "asynchronous",
           lambda it: f"{paired_gain(it, 'off-race-taught')} 0.60 {len(clocked(it, 'off-race-taught')['seeds'])} "
                      f"{paired_gain(it, 'race-taught')}"),
    Quoted("rounds with a batched tail", "waiting for all", ("rounds_emulated", "rounds_emulated_earlier"),
           lambda *draws: " ".join(rounds_faster(it, 1.25, 1.25) for it in draws) + f" {len(draws)} "
           + " ".join(rounds_faster(it, 1.0, 1.25) for it in draws)),
)  # fmt: skip

RESULTS: Sequence[Quoted] = (
    # On a GPU.
    Quoted(RACE, "stock vLLM, all 16 awaited", LEASE,
           lambda it: f"{gain_on_gpu(it)} 256 300 {races_on_gpu(it)} {100 * found(it, 'share of tokens'):.0f}"),
    Quoted("groups that nothing stops, H200", "stock vLLM", LEASE,
           lambda it: f"{over_stock(it, 'tagged'):.3f} 256 256 {pairs(it, 'tagged')} "
                      f"{over_stock(it, 'idle'):.3f}"),
    Quoted("groups whose candidates are scored once", "stock vLLM", LEASE,
           lambda it: f"{over_stock(it, 'scored'):.3f} 256 256 {pairs(it, 'scored')} "
                      f"{WANTED_RATIOS['scored']} {found(it, 'the due step takes longer by, ms'):.0f}"),
    Quoted("a quality head that trains 5 ms after each step", "no training", LEASE,
           lambda it: f"{found(it, TRAINED)['median']:.2f} 256 "
                      f"{len(repeated(it, piece='training', budget_ms=5.0))}"),
    Quoted("token_confidence, 256 rows, bfloat16", "the memory's bandwidth", LEASE,
           lambda it: f"{100 * confidence(it, 256, 'share'):.0f} 50 1,024 {100 * confidence(it, 1024, 'share'):.0f} "
                      f"{100 * WANTED_SHARE:.0f}"),
    Quoted("token_confidence, 1 row, bfloat16", "a step of 5.4 ms", LEASE,
           lambda it: f"{confidence(it, 1, 'us'):.0f} 50"),
    # Measured here.
    Quoted(RACE, "vLLM, n=8, all awaited", "group_race",
           lambda it: f"{race(it, 'b'):.1f} {prompts(it)} {runs(it)}"),
    Quoted(RACE, "a client that streams and aborts", "group_race",
           lambda it: f"{race(it, 'c'):.2f} {prompts(it)} {runs(it)} "
                      f"{tiny_races(it, 'c')[0]:.2f} {tiny_races(it, 'c')[-1]:.2f}"),
    Quoted(f"{RACE}, no tail", "vLLM, n=8, all awaited", "group_race",
           lambda it: f"{1 / tiny_races(it, 'b')[-1]:.1f} {1 / tiny_races(it, 'b')[0]:.1f} "
           + " ".join(str(each["num_groups"]) for each in it["races"][1:]) + f" {runs(it)}"),
    Quoted("rule balance keeps 8 of 16", "all 16 awaited", "pruning",
           lambda it: f"{it['phases']['compare']['speed']['balance']['speed_ratio']:.2f} {pruned(it, 'balance'):.2f} "
                      f"{pruned(it, 'none'):.2f} {it['phases']['compare']['survivors']['none']['num_groups']} "
                      f"{it['phases']['compare']['speed']['balance']['num_blocks']} 8 "
                      f"{it['phases']['fewer']['speed']['fewer']['speed_ratio']:.2f}"),
    Quoted("rule balance keeps 8 of 16", "a random half", "pruning",
           lambda it: f"{pruned(it, 'balance'):.2f} {pruned(it, 'random'):.2f} "
                      f"{it['phases']['compare']['survivors']['none']['num_groups']} "
                      f"{100 * pruned(it, 'balance', 'share_without_variance'):.0f} "
                      f"{100 * pruned(it, 'random', 'share_without_variance'):.0f}"),
    Quoted("quality head after 8 tokens", "mean confidence", "pruning",
           lambda it: " ".join(f"{it['phases']['evaluate']['discrimination']['auc'][name]['value']:.2f}"
                               for name in ("head", "mean"))
           + f" {it['phases']['evaluate']['overview']['num_prompts']} {it['phases']['learn']['num_labels']:,}"),
    Quoted("the shortest 8 of 16", "n=8, all awaited", ("shaping", "shaping_8"),
           lambda it, many: f"{it['ways'][SHORTEST]['speed_up']:.1f} {it['sizes']['prompts']} {len(it['repeats'])} "
                            f"{many['sizes']['prompts']} {max(w['speed_up'] for w in many['ways'].values()):.1f} "
                            f"{many['sizes']['group_size']} {many['ways']['early_stop']['candidates_per_prompt']:.0f}"),
    Quoted("rounds, tails batched by the server", "rounds that wait for all", "rounds",
           lambda it: f"{it['ways']['run']['speed_up']:.1f} {it['sizes']['repeats']} "
                      f"{it['ways']['client']['speed_up']:.1f}"),
    Quoted("a move with KV blocks, 1,900 tokens", "computing them again", "move",
           lambda it: f"{moved(it, 'kv', 1900):.2f} {moved(it, 'recompute', 1900):.2f} {it['workload']['repeats']} 128 "
                      f"{moved(it, 'kv', 128):.2f} {moved(it, 'recompute', 128):.2f}"),
    Quoted("groups that nothing stops", "stock vLLM", "overhead",
           lambda it: f"{throughput(it, 'tagged')} {repeats(it)}"),
    Quoted("seconds from a profile", "seconds of the rollout", "ptl",
           lambda it: f"{100 * it['summary']['error']['median']:.1f} {it['summary']['num_workloads']} "
                      f"{100 * it['summary']['error']['largest']:.1f} "
                      f"{100 * it['summary']['eq4_as_printed_error']['median']:.1f}"),
    # On an emulated device.
    *(
        Quoted(f"race, {candidates:,} candidates", "a streaming client", ("front_end", "front_end_quiet"),
               lambda it, quiet, n=candidates: f"{of_ideal(it, n)} {of_ideal(it, n, 'stream')} {seeds(it)} "
                                               f"{of_ideal(quiet, n)} {of_ideal(quiet, n, 'stream')}")
        for candidates in (256, 2048)
    ),
    Quoted("race, 2,048 candidates", "a client of vLLM's Rust front end", ("front_end", "front_end_quiet"),
           lambda it, quiet: f"{of_ideal(it, 2048)} {of_ideal(it, 2048, 'rust-close')} {seeds(it)} "
                             f"{of_ideal(quiet, 2048)} {of_ideal(quiet, 2048, 'rust-close')}"),
    Quoted("race, 8,192 candidates", "the device alone", "front_end_8192",
           lambda it: f"{of_ideal(it, 8192)} {step_ms(it):.0f} {seeds(it)}"),
    Quoted("TRL in one process, rewards in the engine", "TRL, rewards afterwards", "conformance/results/trl",
           lambda it: f"{gain(it, 'step_rewarded', COLOCATED)} {len(AT_ONCE_PROMPTS)} {runs_of_gain(it)} "
                      f"{gain(it, 'step_spares', COLOCATED)}"),
    Quoted("TRL and a server, rewards in the engine", "TRL, rewards afterwards", "conformance/results/trl",
           lambda it: f"{gain(it, 'step_rewarded')} {len(AT_ONCE_PROMPTS)} {runs_of_gain(it)} "
                      f"{gain(it, 'step_spares')}"),
    *(
        Quoted(f"{name}, 8 spare candidates", f"{name} without", f"conformance/results/{file}",
               lambda it: f"{gain(it)} {len(AT_ONCE_PROMPTS)} {runs_of_gain(it)}")
        for name, file in (("verl", "verl"), ("OpenRLHF", "openrlhf"), ("SkyRL", "skyrl_server"))
    ),
    Quoted("rewards as answers end", "rewards after generation", "rewards",
           lambda it: f"{grading(it, 'after/async')} {epochs(it)} {100 * it['workload']['hanging']:.0f}"),
    Quoted("the same, time limits that learn", "rewards after generation", "rewards",
           lambda it: f"{grading(it, 'after/learned')} {epochs(it)} {graded(it)}"),
    Quoted("a judge that shares the GPU", "10 % of the GPU reserved for it", "judge_emulated",
           lambda it: f"{judged(it, 'turns')} {judged(it, 'reserved 0.1')} 64 {judged(it, 'after')}"),
    Quoted("rounds, prompts and answers x 1.25", "waiting for all", ("rounds_emulated", "rounds_emulated_earlier"),
           lambda *draws: " ".join(rounds_faster(it, 1.25, 1.25) for it in draws)
           + f" {draws[0]['workload']['prompts']} {len(draws)}"),
    Quoted("spare candidates alone, answers x 1.25", "waiting for all", ("rounds_emulated", "rounds_emulated_earlier"),
           lambda *draws: " ".join(rounds_faster(it, 1.0, 1.25) for it in draws)
           + f" {draws[0]['workload']['prompts']} {len(draws)}"),
    Quoted("rounds, prompts and answers x 1.25, 8 engines", "waiting for all", "rounds_emulated_8",
           lambda it: f"{rounds_faster(it, 1.25, 1.25)} {it['workload']['prompts_per_round']} 1"),
    Quoted("consolidation of ranks", "no moves", "moves_emulated",
           lambda it: f"{free_share(it, 'consolidate')} {free_share(it, 'stay')} {it['workload']['ranks']} 1 "
                      f"{longer(it, 'consolidate')}"),
    Quoted("race of conversations, 8 of 16", "waiting for 8 conversations", "agents",
           lambda it: f"{agents(it, 'wait 8', 1)} {sessions(it)} {agents(it, 'client', 2)}"),
    Quoted("a training step with all of it", "a synchronous step", "ablation",
           lambda it: f"{step(it, 'group_s')} {it['workload']['ranks']} 1 {step(it, 'measured_group_s')}"),
    Quoted("training while answers run, first 8 of 16", "training afterwards", "stream_training",
           lambda it: f"{streamed(it, 'log-normal, first 8 of 16')['step']:.2f} "
                      f"{100 * streamed(it, 'log-normal, first 8 of 16')['hidden']:.0f} "
                      f"{len(streamed(it, 'log-normal, first 8 of 16')['runs'])} "
                      f"{100 * streamed(it, 'recorded, 8 of 8')['hidden']:.0f}"),
    Quoted("drafts, 16 to 256 candidates", "no drafts", "drafts_emulated",
           lambda it: f"{min(drafts(it, 16, 256)):.2f} {max(drafts(it, 16, 256)):.2f} {len(drafts(it, 16, 256))} "
                      f"{len(it['cells'][0]['faster_by_seed'])}"),
    Quoted("drafts, 1 to 8 candidates", "no drafts", "drafts_emulated",
           lambda it: f"{min(drafts(it, 1, 8)):.2f} {max(drafts(it, 1, 8)):.2f} {len(drafts(it, 1, 8))} "
                      f"{len(it['cells'][0]['faster_by_seed'])}"),
    Quoted("longest groups first, if that pays", "the prompts' order", "launch_order",
           lambda it: f"{min(map(fmean, ordered(it))):.2f} {max(map(fmean, ordered(it))):.2f} "
                      f"{len(it['cells'][0]['ratios'])} 8 {max(map(max, ordered(it))):.2f}"),
    Quoted("tokens that a receipt calls saved", "the same rollout, awaited", "receipts",
           lambda it: f"{saved(it, 'saved_tokens')} {len(it['rollouts'])} "
                      f"{100 * max(row['saved_seconds']['std'] for row in it['errors']):.0f}"),
    # Computed for a GPU.
    Quoted(RACE, PLAIN, "time_to_reward",
           lambda it: f"{sooner(it, 'race')} {reached(it, 'race', 'plain')}"),
    Quoted("race, stopped answers trained on", PLAIN, "time_to_reward",
           lambda it: f"{sooner(it, 'stopped')} {reached(it, 'stopped', 'plain')}"),
    Quoted("rounds, prompts and answers x 1.25", PLAIN, "time_to_reward",
           lambda it: f"{sooner(it, 'rounds')} {reached(it, 'rounds', 'plain')}"),
    Quoted("TRL's trainer, race", "TRL's trainer", "time_to_reward",
           lambda it: f"{sooner(it, 'trl_race', than='trl')} {reached(it, 'trl_race', 'trl')}"),
    Quoted("race, long answers are right", PLAIN, "time_to_reward",
           lambda it: f"{sooner(it, 'race', 'long is right')} {reached(it, 'race', 'plain', style='long is right')}"),
    Quoted("race, stopped answers trained on, long answers are right", PLAIN, "time_to_reward",
           lambda it: f"{sooner(it, 'stopped', 'long is right')} "
                      f"{reached(it, 'stopped', 'plain', style='long is right')}"),
    Quoted("race, length says nothing", PLAIN, "time_to_reward",
           lambda it: f"{sooner(it, 'race', 'length says nothing')} "
                      f"{reached(it, 'race', 'plain', style='length says nothing')}"),
    Quoted("race, each at its best learning rate", PLAIN, "time_to_reward_rates", at_best_rates),
    Quoted("feed, race, stopped answers trained on", "asynchronous training without a race", "asynchronous_3",
           lambda it: clocked_gain(it, "stale1-race16-taught", best_without_race(it))),
    # Counted.
    Quoted("5 % of requests audited", "no audits", "audits",
           lambda it: f"{believed(it, 0.05)} {believed(it, 0.0)} {waited(it)}"),
    Quoted("prompts of runs on disk", "kills of servers and engine cores", "kills", lost),
    Quoted("groups that are retried", "kills of ranks", "kills_ranks",
           lambda it: f"{it['num_problems']} {it['counts']['groups_asked']:,} {it['counts']['kills']} "
                      f"{it['counts']['groups_that_ended_with_an_error']}"),
    Quoted("answers with status 500 and above", "24 clients for an hour", "soak", refused),
)  # fmt: skip

PAGES: Mapping[str, Sequence[Quoted]] = {"README.md": README, "docs/results.md": RESULTS}
