import json
import random
from dataclasses import replace

import pytest

from tests.parts.pruning.reports import report_of
from vllm_rollout.parts.pruning.rules.assessment import Assessment, Confidence
from vllm_rollout.parts.pruning.rules.learning import REPORT_WINDOW, Learning, Siblings, label_weight
from vllm_rollout.parts.pruning.rules.pruning_plan import Observation, PruningPlan
from vllm_rollout.parts.pruning.rules.success import MAX_LABEL_WEIGHT

PLAN = PruningPlan(detection_length=16, min_labels=8, allow_fewer=True)
SHADOW = replace(PLAN, mode="shadow")


def observation(logit: float | None, confidence: float = 10.0, version: int = 1) -> Observation:
    return Observation(Confidence(0.0, 0.0, confidence), logit, version if logit is not None else 0)


def observe_group(rng: random.Random, rate: float = 0.3, size: int = 16) -> tuple[list[bool], dict[int, Observation]]:
    """Labels, and scores that tell them apart: logits well, confidences badly."""
    positives = [rng.random() < rate for _ in range(size)]
    return positives, {
        i: observation(rng.gauss(1.7 * (y - 0.5), 1), 10 + rng.gauss(0.5 * y, 1)) for i, y in enumerate(positives)
    }


def assess(
    learning: Learning,
    observations: dict[int, Observation],
    plan: PruningPlan = PLAN,
    earlier: dict[int, Assessment] | None = None,
    at_least: int = 0,
    group: str = "g",
) -> dict[int, Assessment]:
    return learning.assess(plan, observations, Siblings(1, group, at_least, earlier or {}))


def taught(num_groups: int = 40, plan: PruningPlan = SHADOW, seed: int = 0) -> Learning:
    """A Learning that has seen groups and the rewards of all that were kept."""
    learning, rng = Learning(plan.detection_length), random.Random(seed)
    for g in range(num_groups):
        positives, observations = observe_group(rng)
        for i, assessment in assess(learning, observations, plan, group=str(g)).items():
            if assessment.keep or plan.mode == "shadow":
                learning.reward(observations[i], assessment, 50 + i, positives[i], str(g), plan.mode == "active")
    return learning


def test_cold_start_keeps_everything_and_says_so():
    learning = Learning(16)
    observations = {i: observation(float(i)) for i in range(4)}
    for assessment in assess(learning, observations).values():
        assert assessment.cold
        assert assessment.keep
        assert assessment.survival_probability == 1.0
        assert assessment.success_probability is None
        assert assessment.signal == "head"
    assert assess(learning, observations)[3].score == 3.0


def test_confidence_stands_in_for_an_untrained_head():
    learning, rng = Learning(16), random.Random(2)
    for _ in range(10):
        positives, observations = observe_group(rng)
        headless = {i: replace(o, logit=None, head_version=0) for i, o in observations.items()}
        for i, assessment in assess(learning, headless).items():
            learning.reward(headless[i], assessment, 30, positives[i], "g", True)
    judged = assess(learning, observations)[0]
    assert (judged.signal, judged.score) == ("confidence", observations[0].confidence.bottom_windows)
    assert not judged.cold
    assert assess(learning, {0: observation(None, 10.0)})[0].signal == "confidence"
    assert assess(learning, {0: observation(None, 10.0)})[0].head_version == 0
    asked = assess(taught(), {0: observation(0.4, 9.5)}, replace(PLAN, signal="confidence"))[0]
    assert (asked.signal, asked.score, asked.head_version) == ("confidence", 9.5, 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_leaves_its_siblings_theirs(bad):
    learning = taught()
    due = {0: observation(bad, 10.0), 1: observation(0.5), 2: observation(bad, bad), 3: observation(-0.5)}
    judged = assess(learning, due)
    assert [judged[i].signal for i in (0, 1, 3)] == ["confidence", "head", "head"]
    assert [judged[i].score for i in (0, 1, 3)] == [10.0, 0.5, -0.5]
    assert all(0 < judged[i].survival_probability < 1 for i in (0, 1, 3))
    lost = judged[2]
    assert (lost.keep, lost.survival_probability, lost.success_probability) == (True, 1.0, None)
    assert not lost.cold  # there are labels enough
    learning.reward(due[2], lost, 20, True, "g", True)
    assert not assess(learning, {0: observation(0.0)})[0].cold
    # It counts among those that have to be kept.
    plan = replace(PLAN, keep_ratio=0.05)
    for group in map(str, range(20)):
        judged = assess(learning, {i: due[2] if i == 0 else observation(i / 4) for i in range(8)}, plan, None, 3, group)
        assert sum(a.survival_probability for a in judged.values()) == pytest.approx(3.0)
        assert sum(a.keep for a in judged.values()) == 3


@pytest.mark.parametrize("rule", ["balance", "paper"])
@pytest.mark.parametrize("keep_ratio", [0.25, 0.5, 0.75])
def test_the_keep_ratio_is_kept(rule, keep_ratio):
    plan = replace(PLAN, rule=rule, keep_ratio=keep_ratio)
    learning, rng = taught(), random.Random(9)
    survival = [
        a.survival_probability
        for g in range(30)
        for a in assess(learning, observe_group(rng)[1], plan, group=str(g)).values()
    ]
    assert sum(survival) / len(survival) == pytest.approx(keep_ratio, abs=1e-6 if rule == "balance" else 0.02)


def test_balance_keeps_the_likely_and_paper_the_unlikely_where_success_is_rare():
    learning = taught()
    observations = {i: observation(logit) for i, logit in enumerate([-1.5, -1.0, -0.5, 0.0, 0.5, 1.0])}
    for rule, better in (("balance", 1), ("paper", -1)):
        judged = assess(learning, observations, replace(PLAN, rule=rule))
        assert judged[5].success_probability > judged[0].success_probability
        assert (judged[5].survival_probability - judged[0].survival_probability) * better > 0.2


def test_earlier_siblings_change_the_verdict():
    """A group that has kept likely ones already wants unlikely ones."""
    learning = taught()
    likely = assess(learning, {i: observation(4.0) for i in range(4)})
    likely = {i: replace(assessment, keep=i < 2) for i, assessment in likely.items()}
    later = {i: observation(logit) for i, logit in enumerate([-1.0, -0.5, 0.5, 1.0], 4)}
    alone, after = assess(learning, later), assess(learning, later, earlier=likely)
    assert alone[7].survival_probability > alone[4].survival_probability
    assert after[7].survival_probability < after[4].survival_probability


def test_labels_of_survivors_weigh_by_their_rarity():
    """Two labels at survival 1/4 and one at 1: 8 to 1. In shadow mode nobody was at stake: 2 to 1."""
    told = {}
    assert [label_weight(p) for p in (1.0, 0.25, 0.001)] == [1.0, 4.0, MAX_LABEL_WEIGHT]
    cold = assess(Learning(16), {0: observation(0.0)})[0]
    rare = replace(cold, survival_probability=0.25)
    for active, weight in ((True, 4.0), (False, 1.0)):
        learning = Learning(16)
        learning.reward(observation(0.0), rare, 20, True, "g", active)
        learning.reward(observation(0.0), rare, 20, True, "g", active)
        learning.reward(observation(0.0), cold, 20, False, "g", active)
        weights = [label[2] for label in learning.calibrators["head"].to_state()["labels"]]
        assert weights == [weight, weight, 1.0]
        told[active] = learning.calibrators["head"].success_probability(0.0, 1)
    assert told[True] > told[False] > 0.5


def test_report_of_a_signal_uses_what_was_said_before_the_reward():
    learning = taught(60)
    report = report_of(learning)
    head, confidence = report.signals["head"], report.signals["confidence"]
    assert head.num_positive + head.num_negative == 60 * 16
    assert head.auc == pytest.approx(0.885, abs=0.03)
    assert head.within_group_auc == pytest.approx(0.885, abs=0.04)
    assert 0.55 < confidence.auc < 0.70
    assert head.brier < confidence.brier < 0.25
    num_cold = 960 - sum(b.num_labels for b in head.bins)
    assert 16 <= num_cold <= 64


def test_shadow_report_shows_the_counterfactual():
    learning = Learning(16)
    for keep, tokens, positive in [(True, 40, True), (False, 100, False), (False, 10, True), (True, 30, False)]:
        judged = Assessment("head", 0.0, 0.4, 0.5, keep, 1, Confidence(0, 0, 0))
        learning.reward(observation(0.0), judged, tokens, positive, "g", False)
    learning.reward(observation(0.0), replace(judged, cold=True), 99, True, "g", False)
    shadow = report_of(learning).shadow
    assert (shadow.num_scored, shadow.num_pruned, shadow.tokens_saved) == (4, 2, 84)
    assert (shadow.positive_ratio, shadow.survivors_positive_ratio) == (0.5, 0.5)
    assert report_of(learning).active.num_scored == 0


def test_active_report_estimates_what_nobody_saw():
    """Survivors at 1/2 and 1/4 stand for 1 and 3 pruned ones: (1 * 84 + 3 * 4) / 4 tokens each; ratio (0 + 4) / 6."""
    learning = taught()
    judged = assess(learning, observe_group(random.Random(8))[1])
    num_pruned = sum(not a.keep for a in judged.values())
    survivor = replace(judged[0], keep=True)
    learning.reward(observation(0.0), replace(survivor, survival_probability=0.5), 100, False, "g", True)
    learning.reward(observation(0.0), replace(survivor, survival_probability=0.25), 20, True, "g", True)
    active = report_of(learning).active
    assert (active.num_scored, active.num_pruned) == (16, num_pruned)
    assert active.tokens_saved == num_pruned * 24
    assert active.positive_ratio == pytest.approx(4 / 6)
    assert active.survivors_positive_ratio == 0.5


@pytest.mark.parametrize("plan", [SHADOW, PLAN])
def test_restored_learning_decides_and_reports_as_the_saved_one(plan):
    saved = taught(40, plan)
    restored = Learning.from_state(json.loads(json.dumps(saved.to_state())))
    assert report_of(restored) == report_of(saved)
    rng = random.Random(7)
    for g in range(5):
        positives, observations = observe_group(rng)
        judged = assess(saved, observations, plan, group=str(g))
        assert assess(restored, observations, plan, group=str(g)) == judged
        for learning in (saved, restored):
            learning.reward(observations[0], judged[0], 40, positives[0], str(g), True)
    assert restored.to_state() == saved.to_state()


@pytest.mark.thorough
def test_memory_is_bounded():
    learning = taught(1)
    judged = assess(learning, {0: observation(0.0)})[0]
    for i in range(REPORT_WINDOW + 10):
        learning.reward(observation(0.0), judged, 20, i % 2 == 0, "g", True)
    assert len(learning.to_state()["outcomes"]) == REPORT_WINDOW
    for i in range(100):
        assess(learning, {0: observation(0.0)}, replace(PLAN, rule="paper", keep_ratio=0.3 + i / 1000))
    assert len(learning._solved) <= 64


@pytest.mark.parametrize(
    "change", [{"outcomes": [[1]]}, {"calibrators": [{"signal": "luck"}]}, {"detection_length": None}, {"verdicts": 3}]
)
def test_states_that_were_never_saved_are_refused(change):
    with pytest.raises(ValueError):  # noqa: PT011 - any message; the caller answers 400
        Learning.from_state({**taught(2).to_state(), **change})


def stream(weighted: bool, plan: PruningPlan, num_groups: int = 140) -> tuple[Learning, float]:
    """Prune by the head; prompts differ in difficulty, success has rate 0.3. Only survivors get rewards.

    The learning, and the success rate of all candidates.
    """
    learning, rng, num_positive = Learning(16), random.Random(11), 0
    for g in range(num_groups):
        positives, observations = observe_group(rng, rate=rng.betavariate(0.9, 2.1))
        num_positive += sum(positives)
        for i, assessment in assess(learning, observations, plan, group=str(g)).items():
            if assessment.keep:
                learning.reward(observations[i], assessment, 20, positives[i], str(g), active=weighted)
    return learning, num_positive / (16 * num_groups)


def confidence_bias(learning: Learning, rate: float) -> float:
    """Mean of q - truth by the signal that was not pruned by. Known truth: q averages to the success rate."""
    rng = random.Random(12)
    probes = [10 + rng.gauss(0.5 * (rng.random() < rate), 1) for _ in range(2000)]
    calibrator = learning.calibrators["confidence"]
    return sum(map(calibrator.success_probability, probes)) / len(probes) - rate


@pytest.mark.thorough
@pytest.mark.parametrize(("rule", "sign"), [("balance", 1), ("paper", -1)])
def test_weighted_labels_stay_right_where_survivors_alone_drift(rule, sign):
    plan = replace(PLAN, rule=rule)
    (drifted, rate), (right, same_rate) = stream(False, plan), stream(True, plan)
    assert rate == same_rate
    assert confidence_bias(drifted, rate) * sign > 0.06
    assert abs(confidence_bias(right, rate)) < 0.03
    assert (report_of(drifted).shadow.positive_ratio - rate) * sign > 0.06
    assert report_of(right).active.positive_ratio == pytest.approx(rate, abs=0.03)
    assert (report_of(right).active.survivors_positive_ratio - rate) * sign > 0.06


def test_a_head_that_was_put_begins_a_scale_of_its_own_under_a_number_that_was_there():
    learning, rng = taught(60), random.Random(14)
    learning.begin_head(1)
    for _ in range(20):
        _, observations = observe_group(rng)
        assess(learning, {i: replace(o, logit=2 * o.logit + 30) for i, o in observations.items()})
    low, high = (assess(learning, {0: observation(30 + 2 * x)})[0].success_probability for x in (-1.5, 1.5))
    assert low < 0.3 < 0.5 < high


@pytest.mark.thorough
def test_the_auc_of_a_report_over_several_versions_is_that_of_each():
    learning, rng = Learning(16), random.Random(15)
    for g in range(120):
        positives, observations = observe_group(rng)
        factor, shift, version = (1.0, 0.0, 1) if g < 60 else (0.1, 20.0, 2)
        moved = {i: replace(o, logit=factor * o.logit + shift, head_version=version) for i, o in observations.items()}
        for i, assessment in assess(learning, moved, SHADOW, group=str(g)).items():
            learning.reward(moved[i], assessment, 50, positives[i], str(g), False)
    assert report_of(learning).signals["head"].auc == pytest.approx(0.885, abs=0.04)


def test_verdicts_do_not_depend_on_the_unit_of_a_head_s_logits():
    """The gradient rule's population is of labels, whose scores are those of their version's scale."""

    def survivals(factor: float, shift: float) -> list[float]:
        learning, rng = Learning(PLAN.detection_length), random.Random(5)
        for g in range(60):
            positives, seen = observe_group(rng, rate=0.1)
            seen = {i: observation(factor * each.logit + shift) for i, each in seen.items()}
            for i, assessment in assess(learning, seen, SHADOW, group=str(g)).items():
                learning.reward(seen[i], assessment, 50, positives[i], str(g), False)
        _, seen = observe_group(rng, rate=0.1)
        seen = {i: observation(factor * each.logit + shift) for i, each in seen.items()}
        plan = replace(PLAN, rule="gradient", keep_ratio=0.5)
        return [each.survival_probability for each in assess(learning, seen, plan).values()]

    as_they_are = survivals(1.0, 0.0)
    assert max(as_they_are) - min(as_they_are) > 0.2, "it steers"
    assert survivals(10.0, 50.0) == pytest.approx(as_they_are, abs=0.05)
