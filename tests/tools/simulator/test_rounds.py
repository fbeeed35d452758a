import json
import random

import pytest

from tests.tools.simulator.traces import DETAILED, FLAT, LINEAR, future, traced
from vllm_rollout.parts.rounds.rules.rounds import RunTerms
from vllm_rollout.parts.rounds.with_shaping.simulated.data import (
    DataPrompt,
    GeneratedDataSet,
    RunConditions,
    TracedDataSet,
)
from vllm_rollout.parts.rounds.with_shaping.simulated.outcome import fairness_of, rank_correlation
from vllm_rollout.parts.rounds.with_shaping.simulated.run_replay import _RunReplay, replay_run, sweep_rounds
from vllm_rollout.parts.rounds.with_shaping.simulated.settings import (
    RoundSetting,
    default_rounds,
    parse_rounds,
    synchronous,
    with_baselines,
)
from vllm_rollout.simulator.generate import LengthDistribution
from vllm_rollout.simulator.machine import Machine

SMALL = LengthDistribution(prompts=24, median=40, prompt_sigma=0.8, sigma=0.8, max_tokens=400, prompt_tokens=5)


class Written:
    """A data set whose lengths are written down: by prompt, attempt by attempt, the last for all later ones."""

    def __init__(self, **lengths):
        self.prompts = [DataPrompt(number, id, 0, None) for number, id in enumerate(lengths)]
        self._lengths = lengths

    def candidates(self, prompt, epoch, attempt, count):
        attempts = self._lengths[prompt.id]
        return [future(n) for n in attempts[min(attempt, len(attempts) - 1)][:count]]


def conditions(data, cost=FLAT, epochs=1, num_ranks=1, message_s=0.0, **machine):
    return RunConditions(data, Machine(cost, num_ranks, **machine), epochs, message_s=message_s)


def run(data, text, **its):
    group_size = its.pop("group_size", 1)
    return replay_run(conditions(data, **its), parse_rounds(text, group_size))


def told(outcome):
    return [(its.kind, its.seconds, sorted(prompt.prompt_id for prompt in its.returned)) for its in outcome.rounds]


def test_the_first_prompts_to_complete_are_returned_and_the_others_run_in_a_long_round():
    data = Written(a=[[3]], b=[[50], [40]], c=[[5]], d=[[60], [70]], e=[[6]], f=[[7]])
    outcome = run(data, "prompts_per_round=2,prompt_speculation=1.5,response_speculation=1")
    assert sorted(prompt.prompt_id for prompt in outcome.returned) == list("abcdef")
    assert [its.kind for its in outcome.rounds][:2] == ["short", "short"]
    assert all(its.max_tokens <= 7 for its in outcome.rounds if its.kind == "short")
    assert {prompt.lengths for prompt in outcome.returned if prompt.prompt_id in "bd"} == {(40,), (70,)}


def test_a_run_without_a_whole_period_counts_the_rounds_that_end_it():
    data = Written(a=[[3]], b=[[50], [40]], c=[[5]], d=[[6]])
    outcome = run(data, "prompts_per_round=3,prompt_speculation=1.3,response_speculation=1")
    assert [(its.kind, its.is_last, its.seconds) for its in outcome.rounds] == [("short", False, 6), ("long", True, 40)]
    assert (outcome.round_s, outcome.has_full_period) == (23, False)


def test_without_speculation_rounds_wait_for_everybody():
    outcome = run(Written(a=[[3]], b=[[9]]), "prompts_per_round=2,prompt_speculation=1,response_speculation=1")
    assert told(outcome) == [("short", 9, ["a", "b"])]


@pytest.mark.parametrize("whole_epochs", [False, True])
def test_whole_epochs_keep_nothing_waiting_over_the_border(whole_epochs):
    its = RunConditions(GeneratedDataSet(SMALL), Machine(FLAT), 3, whole_epochs=whole_epochs)
    outcome = replay_run(its, parse_rounds("prompts_per_round=5,prompt_speculation=1.4", 2))
    epochs = [prompt.epoch for prompt in outcome.returned]
    assert sorted(epochs) == [0] * 24 + [1] * 24 + [2] * 24
    assert (epochs == sorted(epochs)) is whole_epochs
    assert (outcome.full_rounds == outcome.rounds) is whole_epochs
    assert fairness_of(outcome).least_returns == 3


def test_a_trace_gives_every_epoch_what_was_recorded_of_it():
    data = TracedDataSet(traced({"a": [5, 6], "b": [7, 8]}, {"a": [9, 10]}))
    a, b = data.prompts
    assert [c.num_tokens for c in data.candidates(a, 0, 0, 2)] == [5, 6]
    assert [c.num_tokens for c in data.candidates(a, 1, 0, 2)] == [9, 10]
    assert [c.num_tokens for c in data.candidates(b, 0, 0, 2)] == [7, 8]
    assert {c.num_tokens for c in data.candidates(a, 0, 1, 9)} == {5, 6}


def test_generated_attempts_differ_and_begin_alike():
    data = GeneratedDataSet(SMALL, seed=3)
    prompt = data.prompts[4]
    assert data.candidates(prompt, 1, 0, 9)[:4] == data.candidates(prompt, 1, 0, 4)
    assert data.candidates(prompt, 1, 0, 4) != data.candidates(prompt, 1, 1, 4)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_run_returns_every_prompt_once_per_epoch_and_loses_no_token(num_ranks):
    for setting in with_baselines(default_rounds(4, 2)):
        outcome = replay_run(conditions(GeneratedDataSet(SMALL), DETAILED, 3, num_ranks, 0.5), setting)
        fair = fairness_of(outcome)
        assert (fair.least_returns, fair.most_returns) == (3, 3)
        assert len({(prompt.prompt_id, prompt.epoch) for prompt in outcome.returned}) == 24 * 3
        assert outcome.generated_tokens >= outcome.returned_tokens > 0
        assert all(len(prompt.lengths) == 2 for prompt in outcome.returned)
        again = replay_run(conditions(GeneratedDataSet(SMALL), DETAILED, 3, num_ranks, 0.5), setting)
        assert outcome.rounds == again.rounds


def test_deferring_shortens_answers_only_where_a_prompt_is_not_always_as_long():
    """A prompt whose answers became long by chance is drawn again; one that is always long comes back as long."""
    for sigma, is_shorter in ((0.0, False), (0.8, True)):
        its = conditions(GeneratedDataSet(LengthDistribution(prompts=160, prompt_sigma=0.8, sigma=sigma)), epochs=2)
        sweep = sweep_rounds(its, with_baselines([parse_rounds("prompts_per_round=16,response_speculation=1", 4)]))
        bias = sweep.length_bias(sweep.outcomes[-1])
        assert (bias < -0.02) is is_shorter
        assert is_shorter or bias == 0


@pytest.mark.parametrize(
    "groups",
    [
        "redundancy=auto",
        "redundancy=2,selection=shortest,early_stop=false",
        "redundancy=2,selection=dual_end,patience=1.5",
        "redundancy=3,detection_length=5,min_labels=1,keep_ratio=0.5",
    ],
)
def test_groups_of_short_rounds_may_run_as_those_of_rollouts_do(groups):
    its = conditions(GeneratedDataSet(SMALL), LINEAR, 3, 2)
    outcome = replay_run(its, parse_rounds(f"prompts_per_round=4,prompt_speculation=1.5,{groups}", 3))
    fair = fairness_of(outcome)
    assert (fair.least_returns, fair.most_returns) == (3, 3)
    assert all(len(prompt.lengths) == 3 for prompt in outcome.returned)
    assert outcome.of("long")


def test_what_waits_for_a_place_when_the_round_is_cut_is_the_first_of_the_next():
    data = Written(**{f"p{number}": [[20]] for number in range(11)})
    outcome = run(data, "prompts_per_round=2,prompt_speculation=3,response_speculation=1", max_num_seqs=2)
    first = outcome.rounds[0]
    assert (first.num_started, first.num_deferred, first.generated_tokens) == (4, 2, 2 * 20)
    assert sorted(prompt.prompt_id for prompt in outcome.returned) == sorted(prompt.id for prompt in data.prompts)


def test_a_data_set_that_cannot_fill_a_round_is_an_error():
    with pytest.raises(ValueError, match="runs 3 different prompts, and there are 2"):
        run(Written(a=[[1]], b=[[2]]), "prompts_per_round=2,prompt_speculation=1.5")


def test_speed_ups_are_per_returned_prompt():
    data = Written(a=[[3]], b=[[50], [40]], c=[[5]], d=[[6]])
    rounds = parse_rounds("prompts_per_round=3,prompt_speculation=1.3,response_speculation=1", 1)
    sweep = sweep_rounds(conditions(data), with_baselines([rounds]))
    synchronous, deferring = sweep.outcomes
    assert [(its.seconds, len(its.returned)) for its in deferring.rounds] == [(6, 3), (40, 1)]
    assert deferring.prompt_s == 46 / 4
    first = synchronous.rounds[0]
    assert sweep.speed_up(deferring) == first.seconds / 3 / (46 / 4)


def test_rounds_take_the_detection_length_that_is_said_for_all_and_no_audits():
    pruned = parse_rounds("prompts_per_round=4,keep_ratio=0.5", 4, {"detection_length": 16})
    assert pruned.group.pruning.detection_length == 16
    with pytest.raises(ValueError, match="'audit_ratio' is not a field"):
        parse_rounds("prompts_per_round=4,audit_ratio=0.5", 4)


def test_names_say_what_is_speculated_on():
    names = [setting.name for setting in with_baselines(default_rounds(128, 8))]
    assert names == ["synchronous", "responses 1.25x", "prompts 1.25x", "both 1.25x"]
    assert parse_rounds("prompts_per_round=4,queue_order=shortest,response_speculation=2", 8).name == (
        "prompts 1.25x responses 2x shortest first"
    )
    dual = parse_rounds("prompts_per_round=4,redundancy=4,selection=dual_end", 8)
    assert dual.name == "prompts 1.25x, 1.5x dual-end 7+1"
    assert synchronous(dual.terms) == RoundSetting.of(RunTerms(8, 4, 1.0, 1.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x=1", "'x' is not a field; allowed: prompts_per_round"),
        ("prompt_speculation=2", "prompts_per_round is missing"),
        ("prompts_per_round=2,prompts_per_round=3", "prompts_per_round is given twice"),
        ("prompts_per_round=0", "prompts_per_round: must be an integer from 1 to 16384, got 0"),
        ("prompts_per_round=2,prompt_speculation=0.5", r"prompt_speculation: must be a number in \[1, 16\], got 0.5"),
        ("prompts_per_round=2,prompt_speculation=nan", "prompt_speculation: must be a number in"),
        ("prompts_per_round=2,queue_order=last", "queue_order: must be one of first_in, shortest, longest, got 'last'"),
        ("prompts_per_round=2,redundancy=2,response_speculation=1.5", "leave one out"),
        ("prompts_per_round=2,group_size=2", "'group_size' is not a field"),
        ("prompts_per_round=2,order=prompts", "'order' is not a field"),
    ],
)
def test_rounds_that_make_no_sense_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse_rounds(text, 8)


def test_rank_correlation_is_spearmans():
    assert rank_correlation([1, 2, 3, 9], [2, 4, 8, 9]) == pytest.approx(1)
    assert rank_correlation([1, 2, 2, 3], [4, 3, 3, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1], [1, 2]) == 0
    chance = random.Random(0)
    assert abs(rank_correlation(*([chance.random() for _ in range(4000)] for _ in range(2)))) < 0.05


def test_tail_batching_brings_long_prompts_back_later():
    its = conditions(GeneratedDataSet(LengthDistribution(prompts=200, prompt_sigma=0.8, median=40)), epochs=2)
    sweep = sweep_rounds(its, with_baselines(default_rounds(16, 4)))
    fair = [fairness_of(outcome) for outcome in sweep.outcomes]
    assert sweep.fastest is sweep.outcomes[-1]
    assert fair[0].max_wait == fair[1].max_wait == 0
    assert abs(fair[0].order_correlation) < 0.15 < fair[-1].order_correlation
    assert fair[-1].short_departure < 0 < fair[-1].long_departure


def test_the_command_runs_rounds(run, numbers, tmp_path):
    generated = ["--generate", "prompts=40,median=30,max_tokens=200", "--epochs", "2", "--group-size", "2"]
    result = run(*generated, "--rounds", "6")
    assert result.exit_code == 0, result.output
    assert "2 epochs of 40 prompts, 6 of 2 answers a round." in " ".join(result.output.split())
    told = numbers()
    names = [its["setting"]["name"] for its in told["settings"]]
    assert names == ["synchronous", "responses 1.25x", "prompts 1.25x", "both 1.25x"]
    for its in told["settings"]:
        assert its["generated_tokens"] == its["returned_tokens"] + its["wasted_tokens"]
        assert sum(its["rounds"]["num_returned"]) == 80
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_recorded_trace_is_a_data_set(run, numbers, tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [{"prompt_id": f"q{n}", "lengths": [3 + n, 4, 9], "ends": ["stop", "stop", "surplus"]} for n in range(9)]
    path.write_text("\n".join(map(json.dumps, rows)))
    rounds = "prompts_per_round=4,prompt_speculation=1.25|1.5"
    result = run(path, "--group-size", "2", "--rounds", rounds, "--epochs", "3")
    assert result.exit_code == 0, result.output
    output = " ".join(result.output.split())
    assert "trace.jsonl: 3 epochs of 9 prompts, 4 of 2 answers a round." in output
    assert "is drawn from its recorded lengths" in output
    assert "9 recorded candidates were stopped" in output
    told = numbers()
    assert [its["fairness"]["most_returns"] for its in told["settings"]] == [3] * 4


@pytest.mark.parametrize("message_s", [0.0, 2.5])
def test_long_rounds_free_ranks_and_return_the_same(message_s):
    data = GeneratedDataSet(SMALL)
    setting = parse_rounds("prompts_per_round=12,prompt_speculation=1,response_speculation=1", 4)
    stays, moves = (
        replay_run(conditions(data, epochs=2, num_ranks=3, message_s=message_s, **machine), setting)
        for machine in ({}, {"migration": "consolidate", "scale_down": "auto"})
    )
    assert (stays.num_moves, stays.freed_rank_s) == (0, 0)
    assert moves.num_moves > 0
    assert moves.freed_rank_s > 0
    assert [its.returned for its in moves.rounds] == [its.returned for its in stays.rounds]
    assert moves.generated_tokens == stays.generated_tokens


def test_a_group_that_moved_leaves_the_place_where_it_was_launched():
    its = conditions(GeneratedDataSet(SMALL), epochs=2, num_ranks=3, migration="consolidate", scale_down="auto")
    replayed = _RunReplay(its, parse_rounds("prompts_per_round=12,prompt_speculation=1,response_speculation=1", 4))
    assert replayed.run(lambda done: None).num_moves > 0
    assert replayed._places._placement.loads == [0, 0, 0]
    assert replayed._places._placement.num_candidates == [0, 0, 0]


@pytest.mark.parametrize("text", ["prompts_per_round=6", "prompts_per_round=6,selection=dual_end,patience=1.5"])
@pytest.mark.parametrize("cost", [FLAT, LINEAR, DETAILED])
def test_everything_comes_back_whatever_moves(text, cost):
    data = GeneratedDataSet(SMALL)
    machine = {"migration": "auto", "scale_down": "auto", "max_num_seqs": 20}
    outcome = replay_run(conditions(data, cost, epochs=2, num_ranks=3, message_s=1.5, **machine), parse_rounds(text, 4))
    returned = [(prompt.prompt_id, prompt.epoch) for prompt in outcome.returned]
    assert sorted(returned) == sorted((prompt.id, epoch) for prompt in data.prompts for epoch in range(2))
    assert outcome.num_moves > 0 or cost is not FLAT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "6", "--setting", "redundancy=2"], "--setting says how rollouts run, and --rounds runs none"),
        (["--rounds", "x"], "--rounds 'x': expected field=value, got 'x'"),
        (["--rounds", "4", "--rounds", "6"], "prompts_per_round must be the same in all settings, got 4, 6"),
        (["--message-delay", "1"], "--message-delay is for --rounds"),
        (["--whole-epochs"], "--whole-epochs is for --rounds"),
    ],
)
def test_flags_of_rounds_that_make_no_sense_exit_with_2(invoke, arguments, message):
    result = invoke("--generate", "prompts=8", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
