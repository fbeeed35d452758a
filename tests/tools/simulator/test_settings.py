import re

import pytest

from vllm_rollout.kernel.rules.rows import PlanError
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan
from vllm_rollout.simulator.generate import LengthDistribution, generate, parse_distribution
from vllm_rollout.simulator.settings import Setting, default_sweep, parse_setting


def test_a_setting_is_read_from_fields_of_a_rollout_request():
    assert parse_setting("redundancy=4, selection=dual_end,num_longest=2,patience=1.5", 8) == Setting(
        8, 4, "dual_end", 2, 1.5
    )
    assert parse_setting("redundancy=auto,tradeoff=0.5,early_stop=auto,name=mine", 8) == Setting(
        8, "auto", early_stop="auto", tradeoff=0.5, label="mine"
    )
    assert parse_setting("group_size=4,early_stop=false", 8) == Setting(4, early_stop=False)
    assert parse_setting("redundancy=8,audit_ratio=0.05,audit_unit=group", 8) == Setting(
        8, 8, audit_ratio=0.05, audit_unit="group"
    )
    assert Setting(8, 8, audit_ratio=0.05).name == "2x first 5 % audited by rollout"
    assert parse_setting("", 8) == Setting(8)


def test_fields_of_pruning_make_a_pruning_plan():
    setting = parse_setting("redundancy=8,detection_length=64,keep_ratio=0.25,mode=shadow", 8)
    assert setting.pruning == PruningPlan(64, keep_ratio=0.25, mode="shadow")
    assert parse_setting("keep_ratio=0.25", 8, {"detection_length": 32}).pruning == PruningPlan(32, keep_ratio=0.25)
    assert parse_setting("redundancy=8", 8, {"detection_length": 32}).pruning is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("redundancy", "expected field=value, got 'redundancy'"),
        ("redundancy=", "expected field=value, got 'redundancy='"),
        ("redundance=4", "'redundance' is not a field; allowed: group_size, redundancy, "),
        ("redundancy=4,redundancy=5", "redundancy is given twice"),
        ("redundancy=four", "redundancy: must be an integer from 0 to 4096 or \"auto\", got 'four'"),
        ("redundancy=1.5", 'redundancy: must be an integer from 0 to 4096 or "auto", got 1.5'),
        ("redundancy=true", 'redundancy: must be an integer from 0 to 4096 or "auto", got True'),
        ("early_stop=maybe", 'early_stop: must be true or false or "auto", got'),
        ("tradeoff=0", "tradeoff: must be a number in (0, 1000], got 0"),
        ("tradeoff=nan", "tradeoff: must be a number in (0, 1000], got 'nan'"),
        ("audit_ratio=1.5", "audit_ratio: must be a number in [0, 1], got 1.5"),
        ("audit_unit=request", "audit_unit: must be one of group, rollout, got 'request'"),
        ("keep_ratio=0.5", "detection_length: is needed to prune"),
        ("detection_length=auto", "detection_length: must be an integer from 1 to 4096"),
        ("detection_length=8,keep_ratio=2", "keep_ratio: must be a number in (0, 1]"),
    ],
)
def test_a_setting_that_cannot_be_read_says_why(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_setting(text, 8)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (Setting(8, selection="longest"), "selection: must be one of first, shortest, dual_end"),
        (Setting(8, 4, patience=2), "patience: only applies to selection dual_end"),
        (Setting(8, 4, "dual_end", patience=0.5), "patience: must be a number in [1, 1000], got 0.5"),
        (Setting(8, -1), "redundancy: must be an integer from 0 to 4096, got -1"),
        (Setting(8, 40), "must be at most the server's max_num_seqs (32)"),
        (Setting(64, "auto"), "must be at most the server's max_num_seqs (32)"),
        (Setting(8, pruning=PruningPlan(4)), "nothing could ever be pruned"),
    ],
)
def test_a_setting_without_a_plan_says_why(setting, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        setting.plan(32)


def test_names_say_what_differs():
    names = [setting.name for setting in default_sweep(8, 4096, PruningPlan(64))]
    assert names == [
        "uniform n=8",
        "1.25x first",
        "1.5x first",
        "2x first",
        "1.5x dual-end 7+1",
        "1.5x dual-end 7+1 patience 1.5",
        "auto dual-end 7+1",
        "auto dual-end 7+1 patience 1.5",
        "1.5x first pruned at 64",
    ]
    assert Setting(7, 2, "shortest", early_stop=False).name == "7+2 shortest waits for all"
    assert Setting(8, "auto", tradeoff=2.0).name == "auto first tradeoff 2"
    pruned = parse_setting("redundancy=8,detection_length=64,keep_ratio=0.25,rule=paper,allow_fewer=true", 8)
    assert pruned.name == "2x first pruned at 64 rule paper keep_ratio 0.25 allow_fewer true"


@pytest.mark.parametrize("group_size", [1, 2, 3, 5, 8, 64])
def test_the_default_sweep_fits_the_engine(group_size):
    for max_candidates in (group_size, group_size + 1, 3 * group_size):
        settings = default_sweep(group_size, max_candidates, PruningPlan(4))
        assert settings[0] == Setting(group_size)
        assert len(set(settings)) == len(settings)
        for setting in settings:
            setting.plan(max_candidates)


def test_generated_lengths_have_the_stated_distribution():
    its = LengthDistribution(
        prompts=400, candidates=16, steps=2, median=500, prompt_sigma=0.4, sigma=0.8, max_tokens=4000
    )
    trace = generate(its, seed=1)
    assert [len(rollout.prompts) for rollout in trace.rollouts] == [400, 400]
    assert [p.id for p in trace.rollouts[0].prompts] == [p.id for p in trace.rollouts[1].prompts]
    candidates = sorted(c for prompt in trace.prompts for c in prompt.candidates)
    assert candidates[len(candidates) // 2].num_tokens == pytest.approx(500, rel=0.1)
    quarter, rest = (candidates[round(share * len(candidates))].num_tokens for share in (0.159, 0.841))
    assert rest / quarter == pytest.approx(2.718 ** (2 * (0.4**2 + 0.8**2) ** 0.5), rel=0.1)
    assert candidates[-1].num_tokens == 4000
    assert {c.end for c in candidates if c.num_tokens == 4000} == {"length"}
    assert {c.end for c in candidates if c.num_tokens < 4000} == {"stop"}
    assert generate(its, seed=1) == trace != generate(its, seed=2)


def test_a_distribution_is_read_from_its_fields():
    its = parse_distribution("prompts=3, sigma=0.5,median=7")
    assert its == LengthDistribution(prompts=3, sigma=0.5, median=7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompts", "expected field=value, got 'prompts'"),
        ("prompt=3", "'prompt' is not a field; allowed: prompts, candidates, steps, median"),
        ("prompts=1,prompts=2", "prompts is given twice"),
        ("prompts=2.5", "prompts: must be an integer from 1 to 10000000, got 2.5"),
        ("sigma=wide", "sigma: must be a number in [0, 5], got 'wide'"),
        ("sigma=-1", "sigma: must be a number in [0, 5], got -1"),
        ("sigma=nan", "sigma: must be a number in [0, 5], got 'nan'"),
        ("median=0", "median: must be a number in [1, "),
        ("prompts=0", "prompts: must be an integer from 1 to "),
        ("prompts=1000000,candidates=100", "prompts * candidates * steps must be at most 10000000, got 400000000"),
    ],
)
def test_a_distribution_that_makes_no_sense_says_why(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_distribution(text)
