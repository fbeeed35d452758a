import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.parts.shaping.profiles import facts, point, profile_of
from tests.support.waiting import WAIT_S
from tests.tools.simulator.traces import DETAILED, FLAT, LINEAR, traced
from vllm_rollout.parts.shaping.rules.trace import Trace, TracedCandidate, TracedPrompt, TracedRollout
from vllm_rollout.profiling.measure import with_point
from vllm_rollout.simulator.generate import LengthDistribution, generate
from vllm_rollout.simulator.machine import Machine, duration
from vllm_rollout.simulator.race import Pools
from vllm_rollout.simulator.replay import sweep
from vllm_rollout.simulator.report import notes, recommendation
from vllm_rollout.simulator.settings import Setting, default_sweep

REPOSITORY = Path(__file__).parents[3]
RECORDED = REPOSITORY / "benchmarks" / "traces" / "smollm2_math500.jsonl"
SMALL = "prompts=4,candidates=4,steps=2,median=20,max_tokens=60"


@pytest.fixture
def profile(tmp_path):
    """Writes a profile of these tensor-parallel sizes: a step takes 10 ms and 1 ms per candidate, divided by them."""

    def write(*sizes, model="SmolLM2-135M-Instruct", max_num_seqs=64, batch_sizes=(1, 64)):
        room = {"max_num_seqs": max_num_seqs, "kv_capacity_tokens": 100_000, "kv_bytes_per_token": 1.0}
        made = profile_of(model, engines=tuple(facts(size, **room) for size in sizes))
        for size in sizes:
            for context in (128, 2048):
                for batch_size in batch_sizes:
                    made = with_point(made, point(batch_size, context, (0.010 + 0.001 * batch_size) / size, size))
        made.write(tmp_path / "ptl.json")
        return tmp_path / "ptl.json"

    return write


def swept(trace, *settings, cost=LINEAR, **fields):
    return sweep(Pools(trace), settings, Machine(cost, **fields))


def test_the_recorded_trace_is_simulated(run, numbers, tmp_path):
    result = run(RECORDED, "--group-size", "4")
    assert result.exit_code == 0, result.output
    assert "smollm2_math500.jsonl: 32 groups of 4 in 1 rollout, at most 1,024 tokens." in result.output
    assert "No --profile: every step takes the same time" in result.output
    told = numbers()
    assert told["time_unit"] == "steps"
    assert told["baseline"] == told["settings"][0]["setting"]["name"] == "uniform n=4"
    for outcome in told["settings"]:
        assert outcome["generated_tokens"] == outcome["returned_tokens"] + outcome["wasted_tokens"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_gives_the_same_numbers(run, tmp_path):
    told = []
    for seed in (1, 1, 2):
        assert run("--generate", SMALL, "--seed", seed, "--epochs", 2).exit_code == 0
        told.append((tmp_path / "a.json").read_text())
    assert told[0] == told[1] != told[2]


def test_steps_of_fewer_candidates_than_were_measured_are_said_to_be_extrapolated(run, profile):
    result = run("--generate", SMALL, "--profile", profile(1, batch_sizes=(16, 64)))
    assert result.exit_code == 0, result.output
    assert "the profile was measured from 16 candidates on: times of fewer" in " ".join(result.output.split())


def test_a_profile_gives_seconds(run, profile, numbers):
    result = run(RECORDED, "--profile", profile(1))
    assert result.exit_code == 0, result.output
    assert "SmolLM2-135M-Instruct on 1 x abacus with 2 CPUs, 64 candidates at once." in " ".join(result.output.split())
    told = numbers()
    assert (told["time_unit"], told["max_num_seqs"], told["kv_capacity_tokens"]) == ("seconds", 64, 100_000)
    assert "the trace was recorded with" not in result.output
    assert "extrapolated" not in result.output
    # 131,752 tokens at 1 ms each, and at least 2,059 steps of 10 ms, which 64 at once would take
    assert 131.8 + 20.6 < told["settings"][0]["time"] < 131.8 + 31
    run(RECORDED, "--profile", profile(2), "--data-parallel-size", 2)
    assert numbers()["settings"][0]["time"] < 45


def test_a_profile_of_another_model_or_a_smaller_engine_is_a_warning(run, profile):
    path = profile(1, model="org/Other-7B", max_num_seqs=128)
    output = " ".join(run(RECORDED, "--profile", path).output.split())
    assert f"the trace was recorded with SmolLM2-135M-Instruct, but {path} is a profile of org/Other-7B" in output
    assert "up to 128 candidates run at once, the profile was measured up to 64" in output
    long = run("--generate", "prompts=2,candidates=8,median=4000,max_tokens=8000,prompt_tokens=10", "--profile", path)
    assert "contexts go up to" in long.output


def test_a_tensor_parallel_size_that_was_not_profiled_is_an_error(run, profile, tmp_path):
    result = run(RECORDED, "--profile", profile(1, 4), "--tensor-parallel-size", 2)
    assert result.exit_code == 1
    assert "has no tensor-parallel size 2; measured: 1, 4" in result.output
    undecided = run(RECORDED, "--profile", profile(1, 4))
    assert undecided.exit_code == 2
    assert "--tensor-parallel-size must say which" in undecided.output
    assert run(RECORDED, "--profile", profile(1, 4), "--tensor-parallel-size", 4).exit_code == 0
    nothing = run(RECORDED, "--profile", tmp_path / "none.json")
    assert nothing.exit_code == 1
    assert "cannot read the profile" in nothing.output


def test_kv_comes_along_with_a_profile_unless_told_otherwise(run, profile):
    flags = ["--data-parallel-size", 2, "--setting", "redundancy=0", "--migration", "consolidate"]

    def says_so(*more):
        result = run(RECORDED, *flags, *more)
        assert result.exit_code == 0, result.output
        return "migration consolidate, scale-down off, KV along." in " ".join(result.output.split())

    assert says_so("--profile", profile(1))
    assert not says_so("--profile", profile(1), "--move-kv", "off")
    assert not says_so()


def test_groups_that_move_stand_beside_groups_that_stay(run, numbers):
    flags = ["--data-parallel-size", 4, "--setting", "redundancy=2"]
    result = run(RECORDED, *flags, "--migration", "consolidate", "--scale-down", "auto")
    assert result.exit_code == 0, result.output
    output = " ".join(result.output.split())
    assert "4 engines, all candidates at once, migration consolidate, scale-down auto." in output
    assert "Time of all engines" in output
    assert "If groups stayed on their engines, uniform n=8 would take" in output
    moved = numbers()
    assert (moved["migration"], moved["scale_down"]) == ("consolidate", "auto")
    assert all(outcome["freed_rank_s"] > 0 for outcome in moved["settings"])
    run(RECORDED, *flags)
    stayed = numbers()
    assert (stayed["migration"], stayed["without_moves"]) == ("off", None)
    assert stayed["settings"][0]["time"] == moved["without_moves"]["time"]
    assert stayed["settings"][0]["returned_tokens"] == moved["settings"][0]["returned_tokens"]
    assert stayed["settings"][0]["num_moves"] == 0 < moved["settings"][0]["num_moves"]


def test_settings_take_the_place_of_the_default_sweep(run, numbers):
    result = run("--generate", SMALL, "--group-size", 2, "--setting", "redundancy=1|2,selection=first|shortest")
    assert result.exit_code == 0, result.output
    names = [outcome["setting"]["name"] for outcome in numbers()["settings"]]
    assert names == ["uniform n=2", "1.5x first", "1.5x shortest", "2x first", "2x shortest"]


def test_a_name_with_markup_is_shown_as_it_is(run):
    result = run("--generate", SMALL, "--group-size", 2, "--setting", "name=[/x],redundancy=1")
    assert result.exit_code == 0, result.output
    assert "[/x]" in result.output


def test_settings_that_differ_have_names_that_differ(run, numbers):
    written = ("group_size=1|2|4,redundancy=2", "redundancy=2,detection_length=8,keep_ratio=0.25|0.75")
    result = run("--generate", SMALL, "--group-size", 2, *(each for text in written for each in ("--setting", text)))
    assert result.exit_code == 0, result.output
    names = [outcome["setting"]["name"] for outcome in numbers()["settings"]]
    assert names[1:4] == ["3x first of 1", "2x first", "1.5x first of 4"]
    assert names[4:] == [f"2x first pruned at 8 keep_ratio {ratio}" for ratio in (0.25, 0.75)]


def test_a_trace_with_scores_and_rewards_tries_pruning(run, tmp_path):
    path = tmp_path / "trace.jsonl"
    prompt = {"prompt_id": "q", "lengths": [9] * 4, "scores": [0.1, 0.2, 0.3, 0.4], "rewards": [0, 0, 1, 1]}
    path.write_text(json.dumps(prompt))
    result = run(path, "--group-size", 2, "--detection-length", 4)
    assert "1.5x first pruned at 4" in result.output
    assert "nobody was pruned. It takes scores, and rewards of earlier rollouts: at least 64" in result.output
    assert "pruned" not in run(path, "--group-size", 2).output


def test_broken_rows_stop_unless_they_are_skipped(run, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt_id": "q", "lengths": [3, 4]}\n{"prompt_id": "r", "lengths": [-3]}\n')
    result = run(path)
    assert result.exit_code == 1
    assert result.output.startswith(
        f"vllm-rollout simulate: {path}:2: lengths.0: input should be greater than or equal"
    )
    skipped = run(path, "--skip-broken")
    assert skipped.exit_code == 0
    assert "1 broken row was skipped" in skipped.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a trace file or --generate, got neither"),
        ([RECORDED, "--generate", SMALL], "give either a trace file or --generate, got both"),
        ([RECORDED, "--tensor-parallel-size", "2"], "--tensor-parallel-size chooses among the curves of a --profile"),
        (
            ["--generate", "prompts=none"],
            "--generate 'prompts=none': prompts: must be an integer from 1 to 10000000, got 'none'",
        ),
        ([RECORDED, "--setting", "patience=2"], "--setting 'patience=2': patience: only applies to selection dual_end"),
        ([RECORDED, "--setting", "x=2"], "--setting 'x=2': 'x' is not a field; allowed: group_size"),
        ([RECORDED, "--group-size", "0"], "--group-size"),
        (
            [RECORDED, "--migration", "auto"],
            "--migration auto moves groups between engines: say how many with --data-par",
        ),
        ([RECORDED, "--scale-down", "auto"], "--scale-down auto moves groups between engines"),
        (["--generate", SMALL, "--rounds", "2", "--message-delay", "inf"], "must be at most 1,000,000, got inf"),
        (["--generate", SMALL, "--rounds", "2", "--message-delay", "1e308"], "must be at most 1,000,000, got 1e+308"),
        ([RECORDED, "--output", "picture.txt"], "--output must end in .png, got picture.txt"),
        ([RECORDED, "--output", "nowhere/a.png"], "--output nowhere/a.png: there is no folder nowhere"),
        ([RECORDED, "--output-json", "nowhere/a.json"], "there is no folder nowhere"),
        ([RECORDED, "--output-trace", "nowhere/a.jsonl"], "--output-trace nowhere/a.jsonl: there is no folder nowhere"),
        ([RECORDED, "--output-trace", RECORDED], "is the trace that is read: name another file"),
        (["--generate", SMALL, "--rounds", "2", "--output-trace", "a.jsonl"], "not of --rounds"),
    ],
)
def test_flags_that_make_no_sense_exit_with_2(invoke, arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.jsonl"], "vllm-rollout simulate: nothing.jsonl: No such file or directory"),
        ([RECORDED, "--max-num-seqs", "4"], "must be at most the server's max_num_seqs (4), got 8"),
        ([RECORDED, "--kv-capacity-tokens", "900"], "tokens of KV cache, but one rank has 900"),
    ],
)
def test_what_cannot_be_simulated_exits_with_1(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 1
    assert message in result.output


def test_the_recommendation_names_the_fastest_and_what_it_costs():
    trace = traced({"a": [4, 8, 16, 32], "b": [5, 9, 18, 50]})
    its = swept(trace, Setting(2), Setting(2, 2), Setting(2, 2, "dual_end"), cost=FLAT)
    assert its.fastest is its.baseline
    assert recommendation(its) == (
        "Nothing that was tried is faster than uniform n=2: here the steps that early stop saves do not make up for "
        "those that spare candidates make longer. Of those that keep long answers: 2x dual-end 1+1, 0.18x, 6 -> 23 "
        "tokens long on average (+250%), P99 9 -> 49."
    )
    late = traced({"a": [4, 50, 8, 10], "b": [5, 9, 18, 50]})
    its = swept(late, Setting(2), Setting(2, 2), Setting(2, 2, "dual_end", patience=2.0), cost=FLAT)
    assert recommendation(its).startswith("Fastest: 2x first, 5.56x; answers are 17 -> 6 tokens long on average (-62%)")
    assert "Of those that keep long answers: 2x dual-end 1+1 patience 2, 2.78x" in recommendation(its)


def test_smaller_groups_are_not_recommended():
    trace = traced({"a": [4, 8, 16, 32]})
    its = swept(trace, Setting(4), Setting(2), cost=FLAT)
    assert its.fastest is its.outcomes[1]
    fewer = replace(its.outcomes[1], num_incomplete=1)
    assert replace(its, outcomes=(its.baseline, fewer)).fastest is its.baseline


def test_notes_say_what_the_numbers_rest_on():
    stopped = TracedPrompt("q", (TracedCandidate(3), TracedCandidate(3, "surplus")), max_tokens=20)
    trace = Trace((TracedRollout((stopped,)),), num_failed=2, skipped=("t:1: broken",))
    its = swept(trace, Setting(2), Setting(2, 2), Setting(2, "auto"))
    said = " ".join(notes(its, trace))
    assert "1 broken row was skipped: t:1: broken." in said
    assert "2 candidates that failed are left out." in said
    assert "1 of 2 recorded candidates were stopped" in said
    assert "Record with early_stop false and without pruning" in said
    assert "2 of 3 settings want more candidates than the trace has" in said
    assert "up to 50% of a setting's" in said
    assert "auto first: nothing was known of 1 of 1 prompts" in said
    assert "No --profile" not in said
    tight = traced({"q": [40, 40]})
    (said,) = notes(swept(tight, Setting(2), kv_capacity_tokens=60), tight)
    assert said == "The KV cache was too small for what ran; most preemptions in a setting: 1."
    complete = generate(LengthDistribution(prompts=2, steps=1))
    assert notes(swept(complete, *default_sweep(8, 64)[:3], cost=DETAILED), complete) == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0123, "12 ms"), (1.26, "1.3 s"), (99.94, "99.9 s"), (1234.5, "1,234 s")]
)
def test_durations_are_short(seconds, text):
    assert duration(seconds, in_steps=False) == text


def test_the_command_is_light_and_the_simulator_needs_no_engine():
    def imported(code):
        code += "; import sys; print(*sys.modules)"
        return set(
            subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=WAIT_S
            ).stdout.split()
        )

    light = imported("import vllm_rollout.simulator.command")
    assert {"numpy", "pydantic", "matplotlib"}.isdisjoint(light)
    assert {"torch", "vllm"}.isdisjoint(imported("import vllm_rollout.simulator.simulation"))
    assert {"numpy", "matplotlib"}.isdisjoint(imported("import vllm_rollout.parts.page.recording.file"))
