"""Simulated rollouts as rows of a recording: readers of traces find the groups, lengths and ends of the replay."""

import json
from dataclasses import replace as changed
from itertools import groupby, pairwise

import pytest

from tests.tools.simulator.test_command import RECORDED, profile  # noqa: F401  # a fixture
from tests.tools.simulator.traces import FLAT, LINEAR, traced
from vllm_rollout.parts.page.recording.file import parse_row, read_trace
from vllm_rollout.parts.page.simulated import Recording
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan
from vllm_rollout.parts.sessions.with_shaping.simulated import SessionTerms
from vllm_rollout.parts.shaping.rules.trace import Trace, TracedCandidate, TracedPrompt, TracedRollout
from vllm_rollout.simulator.generate import LengthDistribution, generate
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.race import Pools
from vllm_rollout.simulator.replay import replay, sweep
from vllm_rollout.simulator.settings import Setting, default_sweep

SMALL = LengthDistribution(prompts=5, candidates=8, steps=3, median=40, max_tokens=120, prompt_tokens=10)


@pytest.fixture
def recorded(tmp_path):
    """The rows of what these settings do on this machine, and their outcomes; every row could be read as a trace's."""

    def record(trace, *settings, machine, in_steps=False, **more):
        recording, path = Recording(trace, in_steps=in_steps), tmp_path / "whatif.jsonl"
        swept = sweep(Pools(trace), settings, machine, recording=recording, **more)
        recording.write(path)
        read_trace(path)
        return [parse_row(line) for line in path.read_text().splitlines()], swept.outcomes

    return record


def test_a_race_is_a_row_with_lengths_ends_and_times(recorded):
    trace = traced({"a": [4, 6, 9], "b": [3, 10, 10]}, max_tokens=10)
    (alone, raced), _ = recorded(trace, Setting(2), Setting(2, 1), machine=Machine(FLAT))
    assert [row.rollout_id for row in (alone, raced)] == ["uniform n=2/step-0", "1.5x first/step-0"]
    assert (alone.setting, raced.setting) == ("uniform n=2", "1.5x first")
    assert (alone.seconds, raced.seconds) == (10.0, 10.0)
    assert (raced.group_size, raced.max_tokens, raced.num_prompts, raced.num_candidates) == (2, 10, 2, 6)
    a, b = raced.prompts
    assert (a.id, a.lengths, a.ends, a.ended_s) == ("a", [4, 6, 6], ["stop", "stop", "surplus"], [4.0, 6.0, 6.0])
    assert (b.id, b.lengths, b.ends, b.ended_s) == ("b", [3, 10, 10], ["stop", "length", "surplus"], [3.0, 10.0, 10.0])
    assert (a.selected, b.selected, a.status) == ([0, 1], [0, 1], "complete")
    assert (a.started_s, a.over_s, b.over_s, a.rank, a.moves) == (0.0, 6.0, 10.0, 0, None)


def test_every_setting_of_a_sweep_is_there_with_its_outcome(recorded):
    trace = generate(SMALL, 3)
    settings = default_sweep(4, 16)
    rows, outcomes = recorded(trace, *settings, machine=Machine(LINEAR, num_ranks=2), epochs=2)
    assert len({row.rollout_id for row in rows}) == len(rows) == len(settings) * 3 * 2
    names = [setting.name for setting in settings]
    assert [row.setting for row in rows] == names * 6, "those of one rollout stand beside each other"
    for outcome in outcomes:
        own = [row for row in rows if row.setting == outcome.setting.name]
        prompts = [prompt for row in own for prompt in row.prompts]
        assert sum(row.seconds for row in own) == pytest.approx(outcome.seconds)
        assert sum(sum(prompt.lengths) for prompt in prompts) == outcome.generated_tokens
        returned = [prompt.lengths[index] for prompt in prompts for index in prompt.selected]
        assert returned == outcome.returned_lengths
        for row in own:
            assert row.seconds == max(prompt.over_s for prompt in row.prompts)
            assert {prompt.rank for prompt in row.prompts} == {0, 1}
        for prompt in prompts:
            assert max(prompt.ended_s) == prompt.over_s
            stopped = {at for at, end in zip(prompt.ended_s, prompt.ends, strict=True) if end == "surplus"}
            assert outcome.setting.selection != "first" or stopped <= {prompt.over_s}


def test_what_is_recorded_changes_nothing():
    trace = generate(SMALL, 1)
    recording = Recording(trace, in_steps=True)
    recorded = replay(Pools(trace), Setting(4, 4), Machine(FLAT), recording=recording)
    assert recorded == replay(Pools(trace), Setting(4, 4), Machine(FLAT))


def test_without_a_profile_there_are_no_times(recorded):
    rows, _ = recorded(generate(SMALL, 1), Setting(4, 4), machine=Machine(), in_steps=True)
    for row in rows:
        assert row.seconds is None
        for prompt in row.prompts:
            assert (prompt.started_s, prompt.over_s, prompt.ended_s) == (None, None, None)


def test_candidates_that_wait_have_times_too(recorded):
    (row,), _ = recorded(traced({"a": [5, 8], "b": [2, 9]}), Setting(2), machine=Machine(FLAT, max_num_seqs=2))
    assert [(prompt.started_s, prompt.ended_s) for prompt in row.prompts] == [(0.0, [5.0, 8.0]), (5.0, [7.0, 16.0])]


def test_a_group_that_moves_says_where_it_was(recorded):
    trace = generate(changed(SMALL, prompts=12, steps=1, sigma=1.2), 2)
    machine = Machine(FLAT, num_ranks=4, migration="consolidate", max_num_seqs=64, kv_capacity_tokens=10_000)
    (row,), (outcome,) = recorded(trace, Setting(4, 4), machine=machine)
    moved = [prompt for prompt in row.prompts if prompt.moves]
    assert sum(len(prompt.moves) - 1 for prompt in moved) == outcome.num_moves > 0
    for prompt in moved:
        seconds, ranks = zip(*prompt.moves, strict=True)
        assert list(seconds) == sorted(seconds)
        assert all(before != after for before, after in pairwise(ranks))
        assert (seconds[0], prompt.rank) == (prompt.started_s, ranks[-1])


def test_scores_and_rewards_are_those_that_a_trainer_would_have(recorded):
    each = [TracedCandidate(10 * (i + 1), "stop", i / 8, float(i % 2)) for i in range(8)]
    trace = Trace((TracedRollout((TracedPrompt("q", tuple(each)),), "rollout-7"),), models=("m",))
    pruning = PruningPlan(20, mode="shadow")
    (row,), _ = recorded(trace, Setting(4, 4, pruning=pruning), machine=Machine(FLAT))
    (prompt,) = row.prompts
    assert (row.model, row.detection_length, row.rollout_id) == ("m", 20, "2x first pruned at 20 mode shadow/rollout-7")
    assert prompt.lengths == [10, 20, 30, 40, 40, 40, 40, 40]
    assert prompt.rewards == [0.0, 1.0, 0.0, 1.0, None, None, None, None]
    assert prompt.scores[:4] == [None, 1 / 8, 2 / 8, 3 / 8]


def test_sessions_are_rows_too(recorded):
    terms = SessionTerms(turns=3, tool_seconds=5, tool_failures=0.1)
    rows, (outcome,) = recorded(generate(SMALL, 5), Setting(4, 4), machine=Machine(FLAT), sessions=terms)
    prompts = [prompt for row in rows for prompt in row.prompts]
    assert sum(sum(prompt.lengths) for prompt in prompts) == outcome.generated_tokens
    ends = [end for prompt in prompts for end in prompt.ends]
    assert ends.count("failed") == outcome.num_void > 0
    assert ends.count("surplus") > 0
    for prompt in prompts:
        assert min(prompt.ended_s) > 0
        assert max(prompt.ended_s) <= prompt.over_s


def test_settings_of_one_name_have_ids_of_their_own(recorded):
    trace = traced({"a": [4, 6, 9, 10]})
    rows, _ = recorded(
        trace, Setting(2, label="x" * 256), Setting(2, 1, label="x" * 256), machine=Machine(FLAT)
    )  # fmt: skip
    assert len({row.rollout_id for row in rows}) == 2


def test_the_command_writes_what_it_simulated_beside_the_trace(run, numbers, profile, tmp_path):  # noqa: F811
    path = tmp_path / "whatif.jsonl"
    result = run(RECORDED, "--profile", profile(1), "--output-trace", path, "--setting", "redundancy=4")
    assert result.exit_code == 0, result.output
    assert f"vllm-rollout watch {RECORDED}" in result.output.replace("\n", " ")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    own = {setting: list(rows) for setting, rows in groupby(rows, lambda row: row["setting"])}
    told = {each["setting"]["name"]: each for each in numbers()["settings"]}
    assert own.keys() == told.keys()
    for name, rows in own.items():
        assert sum(row["seconds"] for row in rows) == pytest.approx(told[name]["time"])
        tokens = sum(sum(prompt["lengths"]) for row in rows for prompt in row["prompts"])
        assert tokens == told[name]["generated_tokens"]


def test_the_command_says_that_steps_have_no_times(run, tmp_path):
    result = run("--generate", "prompts=3,steps=1", "--output-trace", tmp_path / "whatif.jsonl")
    assert "has no times" in result.output
