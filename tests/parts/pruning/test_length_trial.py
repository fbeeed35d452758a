"""Choice of the best detection length: against brute force, and with known answers."""

import json
import random
from itertools import product
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.kernel.rules.rows import PlanError
from vllm_rollout.parts.pruning.rules.length_trial import (
    MIN_OF_EACH,
    TRIAL_WINDOW,
    TriedCandidate,
    chosen,
    length_trial_report,
    tried_from_state,
)
from vllm_rollout.parts.pruning.rules.memory import PruningMemory
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan, make_pruning_plan

LENGTHS = (16, 48, 128)


def candidates(gaps, *, num=400, tokens=lambda rng: rng.randint(130, 400), seed=0, signal="head", rate=0.4):
    """Scores at `LENGTHS` whose means differ by so much between right and wrong answers."""
    rng = random.Random(seed)
    made = []
    for number in range(num):
        positive, num_tokens = rng.random() < rate, tokens(rng)
        scores = tuple(
            {signal: rng.gauss(gap if positive else 0.0, 1.0)} if num_tokens >= length else {}
            for length, gap in zip(LENGTHS, gaps, strict=True)
        )
        made.append(TriedCandidate(LENGTHS, scores, positive, num_tokens, f"p{number // 8}"))
    return made


def brute_auc(tried, place, signal="head"):
    rights = [c.scores[place][signal] for c in tried if signal in c.scores[place] and c.positive]
    wrongs = [c.scores[place][signal] for c in tried if signal in c.scores[place] and not c.positive]
    return sum((r > w) + (r == w) / 2 for r, w in product(rights, wrongs)) / (len(rights) * len(wrongs))


def test_each_length_has_the_auc_cost_and_saving_of_its_definition():
    tried = candidates((0.5, 1.0, 1.5), tokens=lambda rng: rng.randint(5, 300))
    report = length_trial_report(tried, keep_ratio=0.25)
    total = sum(c.num_tokens for c in tried)
    assert [row.detection_length for row in report.lengths] == list(LENGTHS)
    for place, row in enumerate(report.lengths):
        length = LENGTHS[place]
        assert row.auc == pytest.approx(brute_auc(tried, place))
        assert row.cost_ratio == pytest.approx(sum(min(c.num_tokens, length) for c in tried) / total)
        saved = sum(0.75 * (c.num_tokens - length) for c in tried if c.num_tokens > length)
        assert row.saving_ratio == pytest.approx(saved / total)
        assert row.value == pytest.approx(row.saving_ratio * (2 * row.auc - 1))
        assert row.num_positive + row.num_negative == sum(c.num_tokens >= length for c in tried)


def of_prompts(seed, *, num_prompts=64, siblings=8, gap=0.0):
    """Half of what success and scores vary by is the prompt's, which tells the one nothing of the other."""
    rng, made = random.Random(seed), []
    for prompt in range(num_prompts):
        rate, shared = rng.choice((0.1, 0.9)), rng.gauss(0.0, 1.0)
        for _ in range(siblings):
            positive = rng.random() < rate
            score = gap * positive + shared + rng.gauss(0.0, 1.0)
            made.append(TriedCandidate(LENGTHS, ({"head": score},) * 3, positive, 400, f"p{prompt}"))
    return made


@pytest.mark.thorough
def test_the_standard_error_is_that_of_as_many_prompts():
    rows = [length_trial_report(of_prompts(seed)).lengths[0] for seed in range(150)]
    assert fmean(row.auc_error for row in rows) == pytest.approx(stdev(row.auc for row in rows), rel=0.2)


@pytest.mark.thorough
def test_siblings_that_resemble_each_other_recommend_no_length_by_chance():
    """At two errors of independent answers 10 of these 60 looks do."""
    assert [length_trial_report(of_prompts(seed)).recommended for seed in range(60)].count(None) >= 59
    assert {length_trial_report(of_prompts(seed, gap=1.5)).recommended for seed in range(20)} == {16}


@pytest.mark.parametrize(
    ("gaps", "tokens", "recommended"),
    [
        pytest.param((1.0, 1.0, 1.0), (130, 400), 16, id="all know the same"),
        pytest.param((0.1, 1.5, 1.6), (1000, 3000), 48, id="knows much more and costs little"),
        pytest.param((0.8, 0.9, 1.0), (130, 150), 16, id="answers end soon after"),
    ],
)
def test_the_shortest_of_those_worth_most_is_recommended(gaps, tokens, recommended):
    report = length_trial_report(candidates(gaps, num=2000, tokens=lambda rng: rng.randint(*tokens)))
    assert report.recommended == recommended


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_not_recommended(seed):
    report = length_trial_report(candidates((0.0, 0.0, 0.0), num=300, seed=seed))
    assert report.recommended is None
    assert "better than chance" in report.reason


def test_too_few_labels_recommend_nothing_and_say_how_many_there_are():
    tried = candidates((2.0, 2.0, 2.0), num=2 * MIN_OF_EACH)
    report = length_trial_report(tried)
    assert report.recommended is None
    num_right = sum(c.positive for c in tried)
    assert f"{num_right} right" in report.reason
    assert f"{MIN_OF_EACH} of each" in report.reason
    assert length_trial_report([]).recommended is None


@pytest.mark.parametrize(
    ("rate", "tokens", "recommended"),
    [
        pytest.param(0.4, (20, 120), 16, id="none reaches the longest length"),
        pytest.param(0.02, (200, 2000), 48, id="few are right"),
        pytest.param(0.98, (200, 2000), 48, id="few are wrong"),
        pytest.param(0.0, (200, 2000), None, id="none is right"),
    ],
)
def test_a_full_window_recommends_a_length_that_enough_answers_reached(rate, tokens, recommended):
    gaps = (1.5, 1.5, 1.5) if recommended == 16 else (0.3, 2.5, 2.5)
    tried = candidates(gaps, num=TRIAL_WINDOW, tokens=lambda rng: rng.randint(*tokens), rate=rate)
    assert length_trial_report(tried).recommended == recommended
    assert length_trial_report(tried[1:]).recommended is None, "more may come until the window is full"


def test_answers_to_one_prompt_recommend_nothing() -> None:
    tried = [candidate._replace(group="q") for candidate in candidates((1, 1, 1))]
    report = length_trial_report(tried)
    assert (report.recommended, "of one prompt" in report.reason) == (None, True)


def test_confidence_stands_in_until_the_head_has_scored_enough():
    confident = candidates((0.5, 0.6, 0.7), signal="confidence")
    few = [c._replace(scores=tuple({**s, "head": 1.0} for s in c.scores)) for c in confident[:30]]
    report = length_trial_report([*few, *confident[30:]])
    assert report.signal == "confidence"
    assert report.lengths[0].num_positive + report.lengths[0].num_negative == len(confident)
    both = [c._replace(scores=tuple({**s, "head": float(c.positive)} for s in c.scores)) for c in confident]
    assert length_trial_report(both).signal == "head"
    assert length_trial_report(both).lengths[0].auc == 1.0


def test_candidates_of_another_trial_are_left_out():
    others = [c._replace(lengths=(8, 9, 10)) for c in candidates((3.0, 3.0, 3.0), num=100)]
    mine = candidates((1.0, 1.0, 1.0))
    assert length_trial_report([*others, *mine]) == length_trial_report(mine)


def test_a_trial_remembers_the_newest_and_its_state_is_that_of_a_memory():
    memory = PruningMemory()
    for candidate in candidates((1.0, 1.0, 1.0), num=TRIAL_WINDOW + 10):
        memory.tried.append(candidate)
    rows = json.loads(json.dumps(list(memory.to_rows())))
    restored = PruningMemory.from_rows(rows).tried
    assert restored == memory.tried
    assert len(restored) == TRIAL_WINDOW
    assert list(PruningMemory.from_rows(rows).to_rows()) == list(memory.to_rows())


GOOD = [[16, 48], [{"head": 1.0}, {}], True, 20, "p"]


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, [48, 16]), (0, [16]), (0, [0, 16]), (0, "ab"), (1, [{"head": "x"}, {}]), (1, [{"tail": 1.0}, {}]),
     (1, [{"head": 1e400}, {}]), (2, 2), (3, -1), (3, True), (4, 7)],
)  # fmt: skip
def test_what_no_tried_candidate_can_have_been_is_refused(place, value):
    assert tried_from_state(GOOD).scores == ({"head": 1.0}, {})
    with pytest.raises(ValueError, match=r"\w"):
        tried_from_state([*GOOD[:place], value, *GOOD[place + 1 :]])


@given(st.lists(st.integers(1, 4096), min_size=2, max_size=6, unique=True))
def test_a_list_makes_a_plan_that_stops_nobody(lengths):
    plan = make_pruning_plan({"detection_length": lengths})
    assert plan.scored_lengths == tuple(sorted(lengths))
    assert plan.mode == "shadow"
    assert make_pruning_plan({"detection_length": lengths[:1], "mode": "active"}) == PruningPlan(lengths[0])


@pytest.mark.parametrize(
    "lengths", [[], [4, 4], [0, 1], [1, 4097], [1, 2.0], [True, 2], list(range(1, 8)), "Auto", None]
)
def test_what_is_no_detection_length_is_refused(lengths):
    with pytest.raises(PlanError, match="must be an integer from 1 to 4096, a list"):
        make_pruning_plan({"detection_length": lengths})


def test_several_lengths_and_active_pruning_contradict_each_other():
    with pytest.raises(PlanError, match=r"several lengths .* got \[8, 4\] and mode 'active'"):
        make_pruning_plan({"detection_length": [8, 4], "mode": "active"})


def test_auto_compares_until_it_knows_and_then_prunes():
    plan = make_pruning_plan({"detection_length": "auto", "keep_ratio": 0.25})
    assert (plan.auto, plan.mode) == (True, "active")
    trying, pruning = chosen(plan, None), chosen(plan, 48)
    assert (trying.mode, trying.scored_lengths, trying.auto) == ("shadow", LENGTHS, False)
    assert pruning == PruningPlan(48, keep_ratio=0.25, trial_lengths=(16, 128))
    assert pruning.scored_lengths == (48,)
    assert pruning.audited(races=True).scored_lengths == LENGTHS, "so that the choice can be another one later"
