"""Drafts in the simulator: the closed form, settings, and the command."""

from random import Random

import pytest

from tests.parts.shaping.profiles import facts, point, profile_of
from tests.tools.simulator.traces import FLAT, pool, run_rank
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.drafts.acceptance import DraftSettings, share_factor
from vllm_rollout.parts.drafts.rules import PLAIN_INTERVAL_STEPS
from vllm_rollout.parts.drafts.with_shaping.simulated import drafted, drafted_step, gains
from vllm_rollout.parts.rounds.with_shaping.simulated.settings import parse_rounds
from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve
from vllm_rollout.profiling.measure import with_point
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.race import Race
from vllm_rollout.simulator.settings import Setting, parse_setting

TWO = DraftSettings.model_validate(
    {"kinds": [{"share": 0.5, "accepted": [0.9, 0.4]}, {"share": 0.25, "accepted": [0.6]}]}
)


def linear(fixed_s: float, row_s: float, context_s: float = 0.0) -> CostModel:
    curves = [
        (context, PTLCurve((1.0, 1000.0), tuple(fixed_s + n * (row_s + context * context_s) for n in (1, 1000))))
        for context in (0.0, 1000.0)
    ]
    return CostModel(tuple(curves))


def test_where_drafts_are_free_all_are_verified_but_in_one_step_of_32():
    step = drafted_step(FLAT, TWO, 1.0, 1000, 0.0)
    drafts, tokens = 0.5 * 2 + 0.25, 1 + 0.5 * (0.9 + 0.4) + 0.25 * 0.6
    assert step.drafts == pytest.approx(drafts * 31 / 32)
    assert step.tokens == pytest.approx((31 * tokens + 1) / 32)
    assert step.seconds == pytest.approx(FLAT.ptl(1, 0))


def test_the_likeliest_are_taken_as_long_as_tokens_per_second_grow():
    rows = 1000
    for row_s, drafts, tokens in ((0.0002, 1.25, 1.8), (0.0006, 0.75, 1.6), (0.01, 0.0, 1.0)):
        cost = linear(1.0, row_s)
        step = drafted_step(cost, TWO, 1.0, rows, 0.0)
        part = 31 / 32 if drafts else 1.0
        assert step.drafts == pytest.approx(part * drafts)
        assert step.tokens == pytest.approx(part * tokens + 1 - part)
        with_drafts, without = cost.ptl(rows * (1 + drafts), 0), cost.ptl(rows, 0)
        assert step.seconds == pytest.approx(part * with_drafts + (1 - part) * without)


def test_a_gain_of_less_than_two_percent_is_left():
    one = DraftSettings.model_validate({"kinds": [{"share": 0.5, "accepted": [0.5]}]})
    for more, drafts in ((1.22, True), (1.24, False)):  # of 1.25 tokens
        cost = CostModel(((0.0, PTLCurve((1000.0, 1500.0), (1.0, more))),))
        assert (drafted_step(cost, one, 1.0, 1000, 0.0).drafts > 0) is drafts


def test_a_few_rows_have_steps_without_drafts_by_themselves():
    alone = drafted_step(FLAT, TWO, 1.0, 1, 0.0)
    assert alone.tokens == pytest.approx(1.8, abs=1e-3)  # 0.75 of its steps have some, hardly ever 31 in a row
    assert alone.tokens > drafted_step(FLAT, TWO, 1.0, 64, 0.0).tokens


def test_a_plain_step_is_forced_as_often_as_by_the_rule():
    chance, since, forced, num_steps = Random(3), 0, 0, 200_000
    for _ in range(num_steps):
        is_forced = since == PLAIN_INTERVAL_STEPS - 1
        forced += is_forced
        since = since + 1 if not is_forced and chance.random() < 0.9 else 0
    settings = DraftSettings.model_validate({"kinds": [{"share": 0.9, "accepted": [1.0]}]})
    step = drafted_step(FLAT, settings, 1.0, 1, 0.0)
    assert 1 - (step.tokens - 1) / 0.9 == pytest.approx(forced / num_steps, rel=0.08)


def test_a_rank_takes_what_drafts_leave_of_each_token_while_its_batch_shrinks():
    race = Race("q", GroupPlan(4), pool(10, 20, 30, 40))
    seconds = run_rank(Machine(FLAT, drafts=TWO), [race]).seconds
    factor = round(share_factor(TWO, 3, 0), 2)
    parts = [drafted_step(FLAT, TWO, factor, size, 0.0).s_per_token for size in (4, 3, 2, 1)]
    assert seconds == pytest.approx(10 * sum(parts))


def test_drafts_read_no_context_of_their_own():
    step = drafted_step(linear(1.0, 0.0, 1e-6), TWO, 1.0, 100, 500.0)
    assert step.drafts == pytest.approx(1.25 * 31 / 32, rel=1e-3)
    assert step.seconds == pytest.approx(linear(1.0, 0.0, 1e-6).ptl(100, 500.0))


@pytest.mark.parametrize("context", [0.0, 300.0, 20_000.0])
@pytest.mark.parametrize("size", [1, 16, 256])
def test_drafted_costs_are_seconds_per_token_of_a_row(size: int, context: float):
    cost = linear(1.0, 0.0005, 1e-7)
    step = drafted_step(cost, TWO, 0.8, size, context)
    assert drafted(cost, TWO, 0.8).ptl(size, context) == pytest.approx(step.seconds / step.tokens, rel=0.01)
    (gain,) = gains(cost, TWO, 0.8, [size], context)
    assert gain == (size, step.drafts, step.tokens, pytest.approx(cost.ptl(size, context) * step.tokens / step.seconds))


def test_a_machine_drafts_where_its_setting_says_so():
    assert Machine().with_drafts(True).drafts == DraftSettings()
    known = Machine(drafts=TWO)
    assert (known.with_drafts(True).drafts, known.with_drafts(False).drafts) == (TWO, None)


def test_settings_say_drafts():
    setting = parse_setting("redundancy=2,drafts=true", 4)
    assert (setting.drafts, setting.name) == (True, "1.5x first drafts")
    assert Setting(4, 2).drafted == setting
    assert Setting(4, label="mine").drafted.name == "mine drafts"
    assert not setting.is_for_sessions
    rounds = parse_rounds("prompts_per_round=8,drafts=true", 4)
    assert rounds.name == "both 1.25x drafts"
    assert parse_rounds("prompts_per_round=8", 4).drafted == rounds


GENERATED = ("--generate", "prompts=4,candidates=8,steps=2,sigma=0.9", "--group-size", 8)


def by_name(numbers):
    """Outcomes of the last run, by name."""
    return {each["setting"]["name"]: each for each in numbers()["settings"]}


def test_every_setting_is_tried_with_drafts_and_what_they_bring_is_said_by_size_of_the_batch(run, numbers):
    done = run(*GENERATED, "--drafts", "--setting", "redundancy=0", "--setting", "redundancy=2")
    assert done.exit_code == 0, done.output
    assert "What drafts bring, with 8 candidates to a prompt" in done.output
    its = numbers()
    assert [each["setting"]["name"] for each in its["settings"]] == [
        "uniform n=8", "1.25x first", "uniform n=8 drafts", "1.25x first drafts"
    ]  # fmt: skip
    plain, faster = its["settings"][0], its["settings"][2]
    assert faster["time"] < 0.7 * plain["time"]
    assert faster["generated_tokens"] == plain["generated_tokens"]
    assert [row["batch_size"] for row in its["drafts"]][:3] == [1, 2, 4]
    assert all(1.4 < row["faster"] < 1.6 for row in its["drafts"])


def test_prompts_that_come_again_have_more_drafts(run, numbers):
    seconds = []
    for epochs in (1, 2, 3):
        done = run(
            *GENERATED[:1], "prompts=4,candidates=8,steps=1,sigma=0", *GENERATED[2:], "--drafts", "--epochs", epochs
        )
        assert done.exit_code == 0, done.output
        seconds.append(by_name(numbers)["uniform n=8 drafts"]["time"])
    assert seconds[1] - seconds[0] < 0.95 * seconds[0]
    assert seconds[2] - seconds[1] < seconds[1] - seconds[0]


def test_rounds_have_drafts_in_both_kinds_of_rounds(run, numbers):
    data = ("--generate", "prompts=32,prompt_sigma=0.8,sigma=0.8", "--group-size", 4)
    done = run(*data, "--rounds", "prompts_per_round=8,prompt_speculation=1.5", "--drafts")
    assert done.exit_code == 0, done.output
    outcomes = by_name(numbers)
    assert len(outcomes) == 6
    for name in [name for name in outcomes if "drafts" not in name]:
        plain, with_drafts = outcomes[name], outcomes[f"{name} drafts"]
        assert with_drafts["time_per_prompt"] < 0.8 * plain["time_per_prompt"]
        assert with_drafts["short_rounds"]["mean_time"] < 0.75 * plain["short_rounds"]["mean_time"]
    plain, with_drafts = (its for its in outcomes.values() if its["long_rounds"]["number"])
    assert with_drafts["long_rounds"]["mean_time"] < 0.65 * plain["long_rounds"]["mean_time"]  # earlier answers


def test_rounds_and_rollouts_of_the_same_lengths_say_the_same_of_drafts(run, numbers, tmp_path):
    its = profile_of(engines=(facts(kv_capacity_tokens=1_000_000),))
    for context in (128, 8192):
        for batch_size in (1, 64):
            its = with_point(its, point(batch_size, context, 0.01 + batch_size * (1e-4 + 5e-8 * context)))
    its.write(tmp_path / "ptl.json")
    data = ("--generate", "prompts=8,candidates=8,steps=1,sigma=0", "--group-size", 8, "--drafts")
    said = []
    for ways in (("--setting", "redundancy=0"), ("--rounds", "prompts_per_round=4,redundancy=0")):
        done = run(*data, "--profile", tmp_path / "ptl.json", *ways)
        assert done.exit_code == 0, done.output
        said.append(numbers()["drafts"])
    assert said[0] == said[1]


def test_how_drafts_are_accepted_comes_from_a_file(run, numbers, tmp_path):
    file = tmp_path / "device.json"
    file.write_text('{"drafts": {"kinds": [{"share": 1.0, "accepted": [1.0]}], "alone": 1.0}}')
    done = run(*GENERATED, "--drafts", "--draft-acceptance", file)
    assert done.exit_code == 0, done.output
    assert numbers()["drafts"][3]["tokens"] == pytest.approx(1 + 31 / 32)
    file.write_text('{"drafts": {"kinds": 3}}')
    broken = run(*GENERATED, "--drafts", "--draft-acceptance", file)
    assert (broken.exit_code, "drafts.kinds" in broken.output) == (1, True)


@pytest.mark.parametrize("ways", [(), ("--setting", "redundancy=2"), ("--rounds", "2"), ("--sessions", "turns=3")])
def test_how_drafts_are_accepted_is_of_no_use_without_drafts(run, tmp_path, ways):
    file = tmp_path / "device.json"
    file.write_text("{}")
    refused = run(*GENERATED, *ways, "--draft-acceptance", file)
    assert (refused.exit_code, "no setting has any: add --drafts" in refused.output) == (2, True)
    assert run(*GENERATED, "--setting", "drafts=true", "--draft-acceptance", file).exit_code == 0


def test_conversations_have_no_simulated_drafts(run):
    refused = run(*GENERATED, "--drafts", "--sessions", "turns=3")
    assert (refused.exit_code, "--drafts is for answers" in refused.output) == (2, True)
