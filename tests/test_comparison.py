"""Tables and code of docs/guides/comparison.md: cells follow from the records of `benchmarks.asynchronous`.

python -m tests.test_comparison  # prints the tables
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import geometric_mean, median
from typing import Any

from tests.numbers import ROOT, loaded

PAGE = (ROOT / "docs/guides/comparison.md").read_text()
FILES = {"first": "asynchronous", "second": "asynchronous_2", "third": "asynchronous_3"}
ARMS = {
    "wait for 8 of 8": "wait",
    "one step off": "off",
    "staleness 1": "stale1",
    "staleness 2": "stale2",
    "staleness 4": "stale4",
    "staleness 8": "stale8",
    "staleness 2, dropping": "stale2-drop",
    "staleness 4, dropping": "stale4-drop",
    "[rounds](rounds.md)": "rounds",
    "the first 7 of 16, and the longest": "dual",
    "race 8 of 16": "race",
    "staleness 2, race 8 of 12": "stale2-race12",
    "race 8 of 16 + stopped": "race-taught",
    "one step off, race 8 of 16": "off-race",
    "one step off, race 8 of 16 + stopped": "off-race-taught",
    "staleness 1, race 8 of 16 + stopped": "stale1-race16-taught",
    "no device idles, 8 of 8": "bound",
}
KEYS = ("to_0.6", "to_0.7")
COLUMNS = ("wait", "stale2-drop", "stale4-drop", "race-taught", "off-race-taught", "stale1-race16-taught", "bound")
CASES = {
    "a quarter, third": ("third", "quarter"),
    "training a tenth, first": ("first", "tenth"),
    "training a tenth, second": ("second", "tenth"),
    "half, first": ("first", "half"),
    "half, second": ("second", "half"),
    "answers of 32k, first": ("first", "long"),
    "transfers of 0.2 s, first": ("first", "fast-transfer"),
    "transfers of 10 s, first": ("first", "slow-transfer"),
    "batch bound by arithmetic, first": ("first", "arithmetic"),
}


def row_of(policy: str, world: str, arm: str) -> dict[str, Any] | None:
    rows = loaded(FILES[policy])["worlds"][world]
    return next((row for row in rows if row["arm"] == arm), None)


def seconds(row: dict[str, Any], key: str) -> str:
    """Median seconds to a goal, and how many runs of how many reached it, if not all did."""
    found, num = row[key], len(row["seeds"])
    if found["seconds"] is not None:
        said = f"{found['seconds']:,.0f}"
    elif row["arm"] == "bound":  # it ends with the last update of waiting
        said = f"over {median(run['limit_s'] for run in row['runs']):,.0f}"
    else:
        said = "never"
    return said if found["num"] in (0, num) else f"{said} ({found['num']} of {num})"


def cells(policy: str, arm: str) -> list[str]:
    if (row := row_of(policy, "quarter", arm)) is None:
        return ["—"] * 3
    return [seconds(row, "to_0.6"), seconds(row, "to_0.7"), "—" if row["end"] is None else f"{row['end']:.2f}"]


def both(row: dict[str, Any] | None) -> str:
    return "—" if row is None else f"{seconds(row, 'to_0.6')} / {seconds(row, 'to_0.7')}"


def over_best(arm: str, key: str) -> str:
    """Range over all cases of the gain over the best asynchronous arm without a race, a median of pairs of one seed."""
    rows = [row for name in FILES.values() for of in loaded(name)["worlds"].values() for row in of if row["arm"] == arm]
    found = [row[key]["gain_over_best"] for row in rows]
    assert {each["arm"] for each in found} == {"stale2-drop", "stale4-drop"}
    values = [each["value"] for each in found]
    return f"{min(values):.1f} to {max(values):.1f}"


def over_policy(arm: str, key: str) -> str:
    """Geometric mean of the gain over the same race on policy, and in how many pairs of how many it is above 1."""
    pairs = list[float]()
    for name in FILES.values():
        for rows in loaded(name)["worlds"].values():
            (its, others) = (
                {run["seed"]: run[key] for row in rows if row["arm"] == each for run in row["runs"]}
                for each in (arm, "race-taught")
            )
            pairs += [others[seed] / its[seed] for seed in its.keys() & others.keys()]
    return f"{geometric_mean(pairs):.2f} ({sum(each > 1 for each in pairs)} of {len(pairs)})"


def gains(arm: str) -> list[str]:
    others = ["—"] * 2 if arm == "race-taught" else [over_policy(arm, key) for key in KEYS]
    return [*(over_best(arm, key) for key in KEYS), *others]


def lines() -> Iterator[str]:
    """The rows of the tables."""
    for title, arm in ARMS.items():
        yield line([title, *cells("first", arm), *cells("second", arm)])
    for title, (policy, world) in CASES.items():
        yield line([title, *(both(row_of(policy, world, arm)) for arm in COLUMNS)])
    for title, arm in {
        "on policy": "race-taught",
        "one step off": "off-race-taught",
        "staleness 1": "stale1-race16-taught",
    }.items():
        yield line([title, *gains(arm)])


def line(row: Sequence[str]) -> str:
    return f"| {' | '.join(row)} |"


def test_each_arm_was_trained() -> None:
    assert [arm for arm in ARMS.values() if row_of("first", "quarter", arm) is None] == []


def test_each_row_is_that_of_its_file() -> None:
    tables = PAGE[PAGE.index("## Success over seconds") :]
    shown = [
        each
        for each in tables.splitlines()
        if each.startswith("| ") and not each.startswith(("| arm |", "| case", "| race + stopped | over"))
    ]
    assert shown == [*lines()]


def test_one_step_off_is_as_the_page_says() -> None:
    """Each batch is trained on once, while the next one runs, and new weights wait for its end."""
    (code,) = re.findall(r"```python\n(race = .*?)```", PAGE, re.DOTALL)
    told: list[str] = []

    class Client:
        def rollout(self, prompts: int, **race: Any) -> Any:
            assert race == {"group_size": 8, "redundancy": 8, "include": ["logprobs", "stopped"]}
            told.append(f"rollout {prompts}")
            return type("Answer", (), {"groups": prompts})

        def give_weights(self, folder: str, name: str) -> None:
            told.append(name)

    names = {"client": Client(), "prompts": itertools.count(), "num_steps": 3, "folder": "", "ThreadPoolExecutor": Now}
    exec(code, {**names, "train": lambda groups: told.append(f"train {groups}")})
    batches = ["rollout 1", "train 0", "step-1", "rollout 2", "train 1", "step-2"]
    assert told == ["rollout 0", *batches, "train 2"]


class Now(ThreadPoolExecutor):
    """Has the result of what is submitted before it returns, so that the order is known."""

    def submit(self, *call: Any, **fields: Any) -> Any:
        running = super().submit(*call, **fields)
        running.result()
        return running


if __name__ == "__main__":
    print("\n".join(lines()))
