"""The shaping benchmark without a model: all of it on an engine whose candidates depend on prompt, seed and index only,
so that the simulator has to say exactly what that engine does.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from benchmarks.long_run import RunLog
from benchmarks.shaping import run as shaping
from benchmarks.shaping.measures import same_lengths_share
from benchmarks.shaping.picture import draw, tables
from benchmarks.shaping.records import GroupRecord, Run, traced_prompts
from benchmarks.shaping.run import begin, forget, summarize
from benchmarks.shaping.runs import Bench, measure
from benchmarks.shaping.setup import WAY_NAMES, WAYS, Sizes, check, order, prompts
from benchmarks.shaping.simulation import history_of, simulate
from tests.kernel.http.conftest import make_app, serving
from tests.kernel.http.fake_engine import FakeEngine
from tests.parts.shaping.fakes import FakeShaping
from vllm_rollout import AsyncRolloutClient
from vllm_rollout.parts.page.http.recorder import TraceRecorder
from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve
from vllm_rollout.simulator.machine import Machine

SIZES = Sizes(
    model="fake",
    prompts=5,
    group_size=4,
    max_tokens=36,
    temperature=1.0,
    num_longest=1,
    patience=1.5,
    tradeoff=1.0,
    epochs=2,
    repeats=2,
    seed=3,
)
COST = CostModel(((0.0, PTLCurve((1.0, 64.0), (1.0, 4.0))),), prefill_s_per_token=0.1, step_prefill_s=1.0)


def run_on(engine, folder, sizes=SIZES, progress=lambda done, total, what: None):
    """As the benchmark does with each server it starts; returns the log."""
    engine.max_num_seqs = sizes.max_num_seqs
    log = RunLog(folder / "runs.jsonl", Run)
    recorder = TraceRecorder(folder / "trace.jsonl")

    async def go(url):
        async with AsyncRolloutClient(url) as client:
            await measure(Bench(sizes, folder, client, url, progress, log))

    with serving(make_app(engine, recorder=recorder)) as url:
        asyncio.run(go(url))
    return log


def priced_engine():
    engine = FakeEngine()
    engine.part(FakeShaping).cost_model = COST
    return engine


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """All ways, and the folder they were logged in."""
    folder = tmp_path_factory.mktemp("shaping")
    return folder, run_on(priced_engine(), folder)


def state_of(folder):
    return (folder / "history.state").read_bytes()


def group(lengths, ends=None, selected=(0,), **fields):
    ends = tuple(ends or ["stop"] * len(lengths))
    values = {"complete": True, "selection": "first", "at_upper_bound": False, "weight": None, "std_tokens": None}
    return GroupRecord("q", 10, tuple(lengths), ends, selected, num_candidates=len(lengths), **{**values, **fields})


def run_of(way, repeat=0, groups=(), wall_s=1.0):
    return Run((way, repeat), 0.0, 0, 0.0, wall_s, 0, (), tuple(groups))


def test_every_way_runs_once_per_repeat_with_the_same_candidates(measured):
    _, log = measured
    assert {run.key for run in log if run.way != "history"} == {(way, r) for way in WAY_NAMES for r in range(2)}
    for repeat in range(2):
        pool = log["pool", repeat]
        for name in WAY_NAMES:
            assert same_lengths_share(log[name, repeat], pool) == 1
            assert all(group.complete for group in log[name, repeat].groups)
    assert log["pool", 0].groups[0].lengths != log["pool", 1].groups[0].lengths


def test_ways_without_tail_pruning_have_the_shares_of_auto(measured):
    _, log = measured
    for repeat in range(2):
        auto, without = log["auto", repeat].groups, log["auto_dual_end", repeat].groups
        assert [g.num_candidates for g in auto] == [g.num_candidates for g in without]
        assert {g.selection for g in without} == {"dual_end"}


def test_all_ways_decide_from_the_same_history(measured):
    folder, log = measured
    known = history_of(state_of(folder))
    assert [known.of(f"id:{prompt['id']}").num_groups for prompt in prompts(SIZES)] == [2] * 5
    stds = [[group.std_tokens for group in log["auto", repeat].groups] for repeat in range(2)]
    assert stds[0] == stds[1] == [known.of(f"id:{prompt['id']}").cut(SIZES.max_tokens).std for prompt in prompts(SIZES)]


def test_the_simulator_says_what_the_engine_does(measured):
    folder, log = measured
    machine = Machine(COST, max_num_seqs=SIZES.max_num_seqs)
    for repeat in range(2):
        told = simulate(SIZES, log["pool", repeat], machine, history_of(state_of(folder)))
        for name, way in told.items():
            run = log[name, repeat]
            assert way.shares == [group.num_candidates for group in run.groups], name
            assert way.generated_tokens == run.generated_tokens, name


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    class Cut(Exception):
        pass

    def cut(done, total, what):
        if done == 11:
            raise Cut

    with pytest.raises(Cut):
        run_on(priced_engine(), tmp_path, progress=cut)
    before = {run.key: run for run in RunLog(tmp_path / "runs.jsonl", Run)}
    state = state_of(tmp_path)
    log = run_on(priced_engine(), tmp_path)
    assert len([key for key in before if key[0] != "history"]) == 11
    assert all(log[key] == run for key, run in before.items())
    assert {run.server for run in log} == {0, 1}
    assert state_of(tmp_path) == state
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert len(lines) == 2 + 2 * len(WAY_NAMES)


def test_results_are_told_in_tables_and_a_picture(measured, tmp_path):
    folder, log = measured
    result = {"note": shaping.NOTE, "profile": None, **summarize(SIZES, log, None, state_of(folder))}
    assert json.loads(json.dumps(result))["ways"]["uniform"]["speed_up"] == 1
    text = tables(result)
    assert text.count("### ") == 1
    assert "training" in text
    draw(result, tmp_path / "shaping.png")
    assert (tmp_path / "shaping.png").read_bytes().startswith(b"\x89PNG")


def test_same_lengths_leave_stopped_candidates_out():
    pool = run_of("pool", groups=[group([5, 9, 7, 8])])
    stopped = run_of("early_stop", groups=[group([5, 3, 6], ["stop", "surplus", "stop"])])
    assert same_lengths_share(stopped, pool) == 0.5
    assert same_lengths_share(run_of("auto"), pool) is None


def test_a_pool_with_a_stopped_candidate_is_no_pool():
    with pytest.raises(ValueError, match=r"prompt 'q': a candidate of the pool is failed.*Measure this repeat again"):
        group([5, 3], ["stop", "failed"]).endings()


def test_a_rollout_that_was_not_recorded_is_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"rollout_id": "a", "prompts": [{"id": "q", "lengths": [3]}]}) + "\n")
    assert traced_prompts(path, ["a"])["q"].lengths == [3]
    with pytest.raises(ValueError, match="no row of b"):
        traced_prompts(path, ["a", "b"])


def test_who_begins_rotates_and_shares_are_known_in_time():
    orders = [order(repeat) for repeat in range(len(WAY_NAMES))]
    assert all(sorted(names) == sorted(WAY_NAMES) for names in orders)
    assert all(names.index("auto") < names.index("auto_dual_end") for names in orders)
    assert len({names[0] for names in orders}) == len(WAY_NAMES) - 1


def test_seeds_of_history_and_repeats_do_not_meet():
    epochs = {SIZES.epoch_seed(epoch) + i for epoch in range(9) for i in range(16)}
    repeats = {SIZES.repeat_seed(repeat) + i for repeat in range(99) for i in range(16)}
    assert not epochs & repeats
    assert not any(500 <= seed < 516 for seed in repeats), "the prompts were chosen with those"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompts", 17, "--prompts must be at most 16"),
        ("repeats", 0, "--repeats must be at least 1"),
        ("num_longest", 5, "num_longest"),
        ("patience", 0.5, "patience"),
    ],
)
def test_sizes_that_cannot_be_run_say_why(field, value, message):
    check(SIZES)
    with pytest.raises(ValueError, match=message):
        check(replace(SIZES, **{field: value}))


def test_runs_with_other_sizes_are_not_mixed(tmp_path):
    begun = begin(tmp_path, SIZES)
    assert begun["workload"]["ways"].keys() == WAYS.keys()
    assert begin(tmp_path, replace(SIZES, repeats=9))["date"] == begun["date"]
    with pytest.raises(ValueError, match=r"--max-tokens must be 36.*--again"):
        begin(tmp_path, replace(SIZES, max_tokens=99))
    forget(tmp_path)
    begin(tmp_path, replace(SIZES, max_tokens=99))


def test_a_missing_profile_says_how_to_make_one(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["shaping", "--profile", str(tmp_path / "no.json")])
    with pytest.raises(SystemExit, match=r"(?s)does not exist.*vllm-rollout profile smollm2.*--max-num-seqs 64"):
        shaping.main()
