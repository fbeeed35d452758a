"""`/metrics` counts what the answers say; what is read from the engine is up to date there, without a wait for it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from tests.kernel.http.fake_engine import FakeEngine
from vllm_rollout.kernel.http import engine_totals, gauges, metrics
from vllm_rollout.kernel.http.answers import RolloutAnswer, Usage
from vllm_rollout.kernel.http.engine_totals import FOLDER_VARIABLE, EngineTotals, Reading
from vllm_rollout.kernel.http.gauges import FreshGauges
from vllm_rollout.kernel.http.metrics import PREFIX, MetricMaker, Metrics
from vllm_rollout.kernel.rules.types import GroupCounts, RankCounts


async def samples(http: httpx.AsyncClient) -> dict[str, float]:
    """By name and labels; an empty label is none, as for Prometheus."""
    text = (await http.get("/metrics")).text
    return {
        ".".join(filter(None, [sample.name.removeprefix("vllm_rollout:"), *sample.labels.values()])): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def roll(http: httpx.AsyncClient, **fields: object) -> Usage:
    body = {"prompts": [{"prompt": "a"}, {"prompt": "b"}], "group_size": 4, "redundancy": 4, **fields}
    return RolloutAnswer.model_validate_json((await http.post("/v1/rollouts", json=body)).content).usage


async def test_every_series_is_there_before_the_first_rollout(http):
    values = await samples(http)
    names = ["groups_total.complete", "groups_total.incomplete", "tokens_total.wasted", "candidates_total.surplus"]
    for name in [*names, "candidates_total.pruned"]:
        assert values[name] == 0


async def test_counters_add_up_over_rollouts_and_streams(http, engine: FakeEngine):
    first = await roll(http)
    engine.failures = {0: 0, 1: 0}
    second = await roll(http, redundancy=0)
    values = await samples(http)
    for kind in ("returned", "wasted"):
        assert values[f"tokens_total.{kind}"] == getattr(first, f"{kind}_tokens") + getattr(second, f"{kind}_tokens")
    generated = sum(value for name, value in values.items() if name.startswith("tokens_total."))
    assert generated == first.generated_tokens + second.generated_tokens
    for state in ("finished", "pruned", "surplus", "failed"):
        assert values[f"candidates_total.{state}"] == getattr(first, f"num_{state}") + getattr(second, f"num_{state}")
    assert (values["groups_total.complete"], values["groups_total.incomplete"]) == (2, 2)
    assert values["group_latency_seconds_count"] == values["group_wasted_ratio_count"] == 4
    engine.failures = {}
    await http.post("/v1/rollouts", json={"prompts": [{"prompt": "c"}], "group_size": 1, "stream": True})
    assert (await samples(http))["groups_total.complete"] == 3


@pytest.fixture
def fresh(app) -> None:
    app.add_middleware(FreshGauges)


async def told(*each: RankCounts) -> dict[int, RankCounts]:
    return dict(enumerate(each))


@pytest.mark.usefixtures("fresh")
async def test_groups_that_wait_for_requests_are_seen_without_a_rollout(http, monkeypatch):
    counts = RankCounts(GroupCounts(2, 3), 4, 5, 6), RankCounts(GroupCounts(1, 0), 1)
    monkeypatch.setattr(FakeEngine, "rank_counts", lambda _: told(*counts))
    values = await samples(http)
    assert (values["groups_held.running"], values["groups_held.idle"]) == (3, 3)
    assert values["joined_groups_unmet_total"] == 5
    assert (values["internal_errors_total.0"], values["weight_changes_total.0"]) == (5, 6)
    assert values["internal_errors_total.1"] == values["weight_changes_total.1"] == 0


@pytest.mark.usefixtures("fresh")
async def test_a_scrape_reads_the_files_of_all_processes_once(http, engine: FakeEngine, monkeypatch):
    read: list[int] = []
    engine.num_ranks = 2
    monkeypatch.setattr(engine_totals, "_counted_by_all", lambda: read.append(1) or {})
    values = await samples(http)
    assert values["joined_groups_unmet_total"] == values["weight_changes_total.1"] == 0
    assert len(read) == 1


@pytest.mark.usefixtures("fresh")
async def test_an_engine_that_does_not_answer_holds_nobody_up(http, monkeypatch):
    monkeypatch.setattr(gauges, "PATIENCE_S", 0.01)
    monkeypatch.setattr(FakeEngine, "rank_counts", lambda _: asyncio.Event().wait())
    for _ in range(2):
        assert (await http.get("/metrics")).status_code == 200


@pytest.mark.usefixtures("fresh")
async def test_other_paths_ask_nothing_of_the_engine(http: httpx.AsyncClient, monkeypatch):
    monkeypatch.setattr(FakeEngine, "rank_counts", None)
    assert (await http.get("/health")).status_code == 200


# -- Names


UNITS = ("_seconds", "_bytes", "_ratio", "_tokens")
NUMBERS = {
    *("allocated_candidates", "groups_held", "head_version", "races_held", "rewards_awaited", "tensor_parallel_size"),
    *(
        "trajectories_to_grade",
        "auc",
        "calibration_brier",
        "feed_staleness",
        "score",
        "survival_probability",
        "within_group_auc",
    ),
}
"""Gauges and histograms of what has no unit: counts, versions, probabilities and measures of a score."""


def families() -> list[Metric]:
    registry = CollectorRegistry()
    Metrics(registry)
    return [each for each in registry.collect() if not each.name.endswith("_created")]


@pytest.mark.parametrize("family", families(), ids=lambda each: each.name.removeprefix(PREFIX))
def test_a_name_says_type_and_unit(family: Metric) -> None:
    name = family.name.removeprefix(PREFIX)
    assert re.fullmatch(rf"{PREFIX}[a-z][a-z0-9_]*[a-z]", family.name)
    assert not name.endswith("_total"), "the client library appends it to counters"
    assert not re.search(r"share|fraction|percent|_(ms|us|minutes|kb|mb|mib|gib)\b", name)
    if family.type == "counter":
        names = {sample.name.removeprefix(PREFIX) for sample in family.samples}
        assert names <= {f"{name}_total", f"{name}_created"}
    else:
        assert family.type in ("gauge", "histogram")
        assert name.endswith(UNITS) != (name in NUMBERS), "name its unit, or add it to NUMBERS"
        assert "since" not in family.documentation, "a counter"


def test_without_parts_there_are_the_metrics_of_the_kernel(monkeypatch) -> None:
    monkeypatch.setattr(metrics, "faces", lambda face: iter(()))
    names = {each.name.removeprefix(PREFIX) for each in families()}
    assert names == {
        *("groups", "candidates", "clients_left", "tokens", "group_latency_seconds", "group_wasted_ratio"),
        *("groups_held", "joined_groups_unmet", "internal_errors", "weight_changes", "background_task_errors"),
    }


# -- Numbers that every API process reads from the engine

EACH = """
import asyncio, json, sys
from prometheus_client import CollectorRegistry
from tests.kernel.http.fake_engine import FakeEngine
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.rules.types import GroupCounts, RankCounts

class Engine(FakeEngine):
    async def rank_counts(self):
        return {rank: RankCounts(GroupCounts(0, 0), num_internal_errors=each) for rank, each in enumerate(numbers)}

metrics = Metrics(CollectorRegistry())
for line in sys.stdin:
    numbers = json.loads(line)
    asyncio.run(metrics.refresh(Engine()))
    metrics.client_left("rollout")
    print("done", flush=True)
"""


@dataclass
class ApiProcess:
    process: subprocess.Popen[str]

    def read(self, *numbers: int) -> None:
        """It reads so many internal errors of each rank."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(numbers) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


def test_several_api_processes_count_an_event_of_the_engine_once(tmp_path: Path) -> None:
    environment = {**os.environ, FOLDER_VARIABLE: str(tmp_path)}
    command = [sys.executable, "-c", EACH]
    opened = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    try:
        first, second = map(ApiProcess, opened)
        first.read(3, 0)
        second.read(3, 1)
        second.read(5, 1)
        first.read(4, 1)  # it asked before, and was answered late
        first.read(5, 2)
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(tmp_path))
        found = {each.name.removeprefix(PREFIX): each for each in registry.collect()}
        assert found["internal_errors"].type == "counter"
        rows = {(sample.name, sample.labels.get("rank")): sample.value for sample in found["internal_errors"].samples}
        assert rows == {(f"{PREFIX}internal_errors_total", "0"): 5, (f"{PREFIX}internal_errors_total", "1"): 2}
        left = {sample.labels["request"]: sample.value for sample in found["clients_left"].samples}
        assert left["rollout"] == 5
    finally:
        for process in opened:
            process.communicate()


def test_a_file_that_another_process_has_just_made_counts_nothing(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "counter_1.db").touch()  # prometheus_client gives it a size in its next call
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    counter = Counter("errors", "", registry=CollectorRegistry())
    EngineTotals().read([Reading(counter, {}, 3.0)])
    assert counter._value.get() == 3


def test_a_new_engine_counts_on() -> None:
    registry = CollectorRegistry()
    counter, totals = Counter("errors", "", ["rank"], registry=registry), EngineTotals()
    said: list[float | None] = []
    for total in (2, 5, None, 0, 1, 7):
        if total is None:
            totals.engine_replaced()
        else:
            totals.read([Reading(counter, {"rank": "0"}, total)])
        said.append(registry.get_sample_value("errors_total", {"rank": "0"}))
    assert said == [2, 5, 5, 5, 6, 12]


def test_what_parts_share_is_made_once():
    make, made = MetricMaker(CollectorRegistry()), []

    def kind() -> list[object]:
        made.append([])
        return made[-1]

    assert make.shared(kind) is make.shared(kind) is made[0]
    assert len(made) == 1
