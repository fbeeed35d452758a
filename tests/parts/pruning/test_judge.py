"""Judge: scores in, verdicts out; rewards in, labels out."""

import json
import random
from dataclasses import replace
from math import exp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel.rules.group_steps import end_step
from tests.parts.pruning.steps import group_terms
from vllm_rollout.config import MAX_ADAPTERS
from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.rules.rewards import Reward
from vllm_rollout.kernel.rules.types import CandidateId
from vllm_rollout.parts.pruning.rules.assessment import Assessment, Confidence
from vllm_rollout.parts.pruning.rules.judge import Judge, JudgedGroup
from vllm_rollout.parts.pruning.rules.learning import Learning
from vllm_rollout.parts.pruning.rules.ledger import LedgerEntry, Scoring
from vllm_rollout.parts.pruning.rules.memory import MAX_DETECTION_LENGTHS, PruningMemory
from vllm_rollout.parts.pruning.rules.pruning_plan import WHOLE, Observation, PruningPlan
from vllm_rollout.parts.pruning.rules.success import MAX_LABEL_WEIGHT

LENGTH = 8
PLAN = PruningPlan(LENGTH, min_labels=4, allow_fewer=True)
SHADOW = replace(PLAN, mode="shadow")


def observation(logit: float | None) -> Observation:
    return Observation(Confidence(2.0, 1.0, 1.5), logit, 0 if logit is None else 1)


def taught_learning() -> Learning:
    """Warm: a higher logit is a better chance."""
    learning, rng = Learning(LENGTH), random.Random(3)
    for i in range(64):
        seen = observation(rng.gauss(1 if i % 2 else -1, 1))
        kept = Assessment("head", seen.logit, None, 1.0, True, 1, seen.confidence, cold=True)
        learning.reward(seen, kept, 20, bool(i % 2), str(i), False)
        learning.calibrators["head"].observe(seen.logit)
    return learning


STATE = taught_learning().to_state()


def taught_judge() -> Judge:
    judge = Judge()
    judge.memory.learnings[LENGTH] = Learning.from_state(STATE)
    return judge


class Siblings:
    """One group under a judge."""

    def __init__(self, judge: Judge, plan: PruningPlan = PLAN, group_size: int = 1, num: int = 8, **scoring) -> None:
        self.judge = judge
        self.scoring = Scoring(
            scoring.get("rollout_id", "r"),
            scoring.get("prompt_id", "p"),
            scoring.get("seed", 7),
            prompt_key=scoring.get("prompt_key", ""),
            adapter=scoring.get("adapter", ""),
            num_resumed=scoring.get("num_resumed", 0),
            survival_before=scoring.get("survival_before", 1.0),
        )
        self.judged = JudgedGroup(Group(group_terms(group_size, num, pruning=plan)), plan)
        self.group = self.judged.group
        self.entries: dict[int, LedgerEntry] = {}
        for index in range(num):
            self.group.launch()
            self.entries[index] = judge.ledger.open(self.scoring, CandidateId("", index), f"request-{index}", plan)

    def due(self, logits: dict[int, float | None]) -> list[int]:
        """Judge what is due in one step."""
        self.group.settle()
        seen = {index: (self.entries[index], observation(logit)) for index, logit in logits.items()}
        if pruned := self.judge.judge(self.judged, self.scoring, seen):
            self.group.rule_out(pruned, "pruned")
        self.group.settle()
        return pruned

    def finish(self, *indices: int) -> None:
        for index in indices:
            self.entries[index].state, self.entries[index].num_tokens = "finished", 30

    def assessments(self) -> dict[int, Assessment | None]:
        return {index: entry.assessment for index, entry in self.entries.items()}


LOGITS = {index: (index - 3.5) / 2 for index in range(8)}


def test_pruned_candidates_are_those_not_kept_and_the_group_knows():
    siblings = Siblings(taught_judge())
    pruned = siblings.due(LOGITS)
    assert 0 < len(pruned) < 8
    for index, assessment in siblings.assessments().items():
        assert assessment.keep == (index not in pruned)
        assert siblings.group.state(index) == ("running" if assessment.keep else "pruned")
    assert siblings.judged.assessments == siblings.assessments()
    assert all(entry.observation == observation(LOGITS[i]) for i, entry in siblings.entries.items())


def test_a_candidate_is_judged_once():
    siblings = Siblings(taught_judge())
    pruned = siblings.due(LOGITS)
    before = siblings.assessments()
    state = siblings.judge.memory.learnings[LENGTH].to_state()
    kept = [index for index in LOGITS if index not in pruned]
    assert siblings.due(dict.fromkeys(kept, -9.0)) == []
    assert siblings.assessments() == before
    assert siblings.judge.memory.learnings[LENGTH].to_state() == state


@pytest.mark.parametrize("seed", range(8))
def test_shadow_mode_decides_as_active_mode_and_stops_nobody(seed):
    active = Siblings(taught_judge(), replace(PLAN, allow_fewer=False), group_size=3, seed=seed)
    shadow = Siblings(taught_judge(), replace(SHADOW, allow_fewer=False), group_size=3, seed=seed)
    for part in ({0, 1, 2}, {3, 4}, {5, 6, 7}):
        due = {index: LOGITS[index] for index in part}
        active.due(due)
        assert shadow.due(due) == []
    assert shadow.group.num_running == 8
    assert shadow.assessments() == active.assessments()
    assert active.group.num_running >= 3


@settings(max_examples=40, deadline=None, database=None)
@given(
    st.integers(1, 8),
    st.permutations(range(8)),
    st.integers(1, 8),
    st.sampled_from([0.05, 0.5, 1.0]),
    st.sampled_from(["paper", "balance"]),
    st.booleans(),
    st.integers(0, 2**62),
)
def test_the_floor_holds_in_whatever_batches_siblings_are_due(
    group_size, order, batch, keep_ratio, rule, allow_fewer, seed
):
    plan = replace(PLAN, keep_ratio=keep_ratio, rule=rule, allow_fewer=allow_fewer)
    siblings = Siblings(taught_judge(), plan, group_size, seed=seed)
    for start in range(0, 8, batch):
        siblings.due({index: LOGITS[index] for index in order[start : start + batch]})
    assert siblings.group.num_running >= (1 if allow_fewer else group_size)
    if keep_ratio == 1:
        assert siblings.group.num_running == 8
        assert all(assessment.survival_probability == 1.0 for assessment in siblings.assessments().values())


@settings(max_examples=12, deadline=None, database=None)
@given(st.permutations(range(8)), st.integers(0, 2**62), st.integers(1, 8))
def test_the_order_of_scores_in_a_step_does_not_matter(order, seed, group_size):
    plan = replace(PLAN, allow_fewer=False)
    one, other = (Siblings(taught_judge(), plan, group_size, seed=seed) for _ in range(2))
    assert sorted(one.due(LOGITS)) == sorted(other.due({index: LOGITS[index] for index in order}))
    assert one.assessments() == other.assessments()
    assert one.judge.memory.learnings[LENGTH].to_state() == other.judge.memory.learnings[LENGTH].to_state()


def test_the_same_seed_and_prompt_id_give_the_same_verdicts_in_every_rollout():
    verdicts = {
        (seed, prompt_id): [
            tuple(sorted(Siblings(taught_judge(), rollout_id=rollout, prompt_id=prompt_id, seed=seed).due(LOGITS)))
            for rollout in ("r1", "r2")
        ]
        for seed in (1, 2, 3)
        for prompt_id in ("p", "q")
    }
    assert all(one == other for one, other in verdicts.values())
    assert len({one for one, _ in verdicts.values()}) > 1


def test_each_reward_has_its_status_and_each_accepted_one_a_label():
    judge = taught_judge()
    siblings = Siblings(judge, SHADOW)
    siblings.due({index: LOGITS[index] for index in range(6)})
    siblings.finish(0, 1, 2, 7)
    siblings.entries[3].state = "surplus"
    rewards = [(0, 1.0), (0, 1.0), (0, 0.0), (1, 0.0), (3, 1.0), (4, 1.0), (7, 1.0), (99, 1.0)]
    length, statuses, labels = judge.reward("r", [("p", i, reward, reward > 0.5) for i, reward in rewards])
    assert length == LENGTH
    assert statuses == [
        "accepted", "duplicate", "conflict", "accepted", "unfinished", "unfinished", "unscored", "unknown",
    ]  # fmt: skip
    assert [(label.request_id, label.positive) for label in labels] == [("request-0", True), ("request-1", False)]
    assert all(label.num_tokens == 30 and label.prompt_id == "r/p" for label in labels)
    assert judge.reward("nothing", [("p", 0, 1.0, True)]) is None
    state = judge.memory.learnings[LENGTH].to_state()
    assert judge.reward("r", [("p", 0, 1.0, True)]) == (LENGTH, ["duplicate"], [])
    assert judge.memory.learnings[LENGTH].to_state() == state, "posting again teaches nothing"


@pytest.mark.parametrize(
    ("mode", "survival", "weight"),
    [("active", 0.25, 4.0), ("active", 1.0, 1.0), ("active", 0.001, MAX_LABEL_WEIGHT), ("shadow", 0.25, 1.0)],
)
def test_labels_of_survivors_weigh_by_their_survival_and_those_of_shadow_mode_by_one(mode, survival, weight):
    judge = Judge()
    siblings = Siblings(judge, replace(PLAN, mode=mode))
    siblings.due({0: 1.0})
    siblings.finish(0)
    siblings.entries[0].assessment = replace(siblings.entries[0].assessment, survival_probability=survival)
    _, _, (label,) = judge.reward("r", [("p", 0, 1.0, True)])
    assert label.weight == weight
    assert label.active == (mode == "active")


def test_rewards_teach_the_success_of_their_prompt():
    """By its key, one for each candidate that a survivor stands for; without a key nothing is remembered."""
    judge = taught_judge()
    for key, rollout_id in (("id:p", "r"), ("", "s")):
        siblings = Siblings(judge, rollout_id=rollout_id, prompt_key=key)
        siblings.due(LOGITS)
        siblings.finish(*range(8))
        kept = [index for index, assessment in siblings.assessments().items() if assessment.keep]
        judge.reward(rollout_id, [Reward("p", index, 1.0, positive=index == kept[0]) for index in kept])
    assert len(judge.memory.successes) == 1
    weights = [1 / siblings.assessments()[index].survival_probability for index in kept]
    known = judge.memory.successes.of("id:p")
    assert known.num_rewarded == pytest.approx(sum(weights), rel=0.25)  # the first ones decay meanwhile
    assert 0 < known.num_successful <= weights[0]


def test_answers_shorter_than_the_detection_length_count_in_the_success_of_their_prompt_once():
    """Right ones are short here. They are no labels of scores, and take no place of a detection length."""
    judge = Judge()
    siblings = Siblings(judge, replace(SHADOW, trial_lengths=(LENGTH + 8,)), prompt_key="id:p", survival_before=0.5)
    siblings.finish(*range(4))
    rewards = [Reward("p", index, 1.0, positive=True) for index in range(4)]
    for _ in range(2):
        assert judge.reward("r", rewards)[1] == ["unscored"] * 4
    assert judge.memory.successes.of("id:p").rate == 1.0
    assert judge.memory.successes.of("id:p").num_rewarded == pytest.approx(4 * 2, rel=0.25)
    assert (judge.memory.learnings, list(judge.memory.tried)) == ({}, [])


def test_right_answers_of_races_count_less_where_audits_say_so_whether_they_were_scored_or_not():
    judge = Judge()
    learning = judge.memory.learning(LENGTH, lambda length: True)
    for calibrator in learning.calibrators.values():
        calibrator.intercept.value, calibrator.rate_intercept.precision = -1.2, 5.0
    siblings = Siblings(judge, SHADOW, prompt_key="id:p")
    siblings.finish(*range(4))
    for index in range(4):
        siblings.entries[index].origin = "race"
    judge.reward("r", [Reward("p", index, 1.0, positive=True) for index in range(4)])
    assert judge.memory.successes.of("id:p").num_rewarded == pytest.approx(4 * exp(-1.2), rel=0.25)


def test_a_prompt_that_never_succeeded_is_steered_more():
    """The siblings have the same scores, half of which promise success, under the gradient rule."""
    strengths = []
    for past in (0, 60):
        judge = taught_judge()
        for _ in range(past):
            judge.memory.successes.observe("id:p", False)
        siblings = Siblings(judge, replace(PLAN, rule="gradient"), prompt_key="id:p")
        siblings.due(LOGITS)
        survival = [siblings.assessments()[index].survival_probability for index in LOGITS]
        strengths.append(survival[-1] - survival[0])
    assert strengths[1] > strengths[0] + 0.1


def test_nothing_is_judged_at_one_detection_length_more_than_are_awaited_and_else_the_one_used_longest_ago_goes():
    judge = Judge()
    for length in range(1, MAX_DETECTION_LENGTHS + 1):
        siblings = Siblings(judge, replace(PLAN, detection_length=length), rollout_id=f"r{length}")
        siblings.due({0: 1.0})
        siblings.finish(0)
        assert siblings.entries[0].assessment is not None
    beyond = Siblings(judge, replace(PLAN, detection_length=100), rollout_id="beyond")
    assert beyond.due(LOGITS) == []
    beyond.finish(0)
    assert judge.reward("beyond", [("p", 0, 1.0, True)]) == (100, ["unscored"], [])
    for rewarded in (3, 2):
        judge.reward(f"r{rewarded}", [Reward("p", 0, 1.0, True)])
    beyond.due({1: 1.0})
    assert beyond.entries[1].assessment is not None
    assert judge.memory.forgotten == [3]
    assert list(judge.memory.learnings) == [1, 4, 5, 6, 7, 8, 2, 100]


def test_a_prompt_s_success_is_corrected_as_audits_say_and_survives_a_restart():
    """Audits that all succeed where half of the races fail: a race's success then stands for more than one."""
    judge = taught_judge()
    calibrator = judge.memory.learnings[LENGTH].calibrators["head"]
    for number in range(400):
        calibrator.add(0.0, number % 2 == 0, origin="race")
        calibrator.add(0.0, True, origin="audit")
    assert calibrator.offset > 1
    siblings = Siblings(judge, replace(PLAN, mode="active"), group_size=8, prompt_key="id:p")
    siblings.due(LOGITS)
    siblings.finish(*range(8))
    judge.reward("r", [Reward("p", index, 1.0, True) for index in range(8)])
    assert judge.memory.successes.of("id:p").num_rewarded > 8
    restored = PruningMemory.from_rows(json.loads(json.dumps(list(judge.memory.to_rows()))))
    assert restored.successes.of("id:p") == judge.memory.successes.of("id:p")
    assert restored.learnings[LENGTH].audit_report() == judge.memory.learnings[LENGTH].audit_report()


TRIAL = replace(SHADOW, trial_lengths=(16, 32), final_score=True)


def seen_at(length: int, logit: float | None) -> Observation:
    return replace(observation(logit), detection_length=length)


def test_a_trial_scores_at_each_length_stops_nobody_and_teaches_each_its_own():
    judge = taught_judge()
    siblings = Siblings(judge, TRIAL)
    for length in TRIAL.scored_lengths:
        due = {i: (siblings.entries[i], seen_at(length, logit)) for i, logit in LOGITS.items()}
        assert judge.judge(siblings.judged, siblings.scoring, due) == []
        assert judge.judge(siblings.judged, siblings.scoring, due) == [], "again, after a token was dropped"
    assert siblings.judged.assessments.keys() == LOGITS.keys()
    siblings.finish(*range(8))
    assert judge.ledger.num_awaiting() == {LENGTH: 8, 16: 8, 32: 8}
    assert all(judge.ledger.awaits(length) for length in TRIAL.scored_lengths)
    _, statuses, labels = judge.reward("r", [Reward("p", i, float(i % 2), bool(i % 2)) for i in range(8)])
    assert statuses == ["accepted"] * 8
    assert all(label.scores.keys() == set(TRIAL.scored_lengths) for label in labels)
    assert judge.ledger.num_awaiting() == {}
    for length in (16, 32):
        learning = judge.memory.learnings[length]
        scores = [outcome.scores["head"] for outcome in learning.outcomes()]
        assert scores == sorted(scores)
        assert len(scores) == 8
    tried = judge.memory.tried
    assert [candidate.lengths for candidate in tried] == [TRIAL.scored_lengths] * 8
    assert all(scores.keys() == {"head", "confidence"} for candidate in tried for scores in candidate.scores)


def test_what_ended_between_two_lengths_is_in_the_trial_with_what_it_showed():
    judge = taught_judge()
    siblings = Siblings(judge, TRIAL, num=1)
    judge.judge(siblings.judged, siblings.scoring, {0: (siblings.entries[0], seen_at(LENGTH, 0.5))})
    siblings.entries[0].state, siblings.entries[0].num_tokens = "finished", 12
    judge.reward("r", [Reward("p", 0, 1.0, True)])
    (tried,) = judge.memory.tried
    assert [bool(scores) for scores in tried.scores] == [True, False, False]
    assert tried.num_tokens == 12


def test_a_final_score_teaches_also_of_what_ended_before_detection_and_decides_nothing():
    judge = taught_judge()
    siblings = Siblings(judge, replace(PLAN, final_score=True), num=2)
    siblings.due({0: 3.0})
    siblings.finish(0, 1)
    for index in range(2):
        assessment = judge.value(siblings.entries[index], seen_at(WHOLE, 2.0 + index))
        assert (assessment.score, assessment.keep, assessment.cold) == (2.0 + index, True, True)
    kept = siblings.entries[0].assessment.survival_probability
    assert 0 < kept < 1
    assert siblings.entries[0].trials[WHOLE].assessment.survival_probability == kept
    assert siblings.entries[1].trials[WHOLE].assessment.survival_probability == 1.0
    num_before = len(judge.memory.learnings[LENGTH].outcomes())
    _, statuses, labels = judge.reward("r", [Reward("p", 0, 1.0, True), Reward("p", 1, 0.0, False)])
    assert statuses == ["accepted"] * 2
    assert [label.weight for label in labels] == [pytest.approx(min(MAX_LABEL_WEIGHT, 1 / kept)), 1.0]
    assert len(judge.memory.learnings[WHOLE].outcomes()) == 2
    assert len(judge.memory.learnings[LENGTH].outcomes()) == num_before + 1
    assert not judge.memory.tried


def test_what_was_kept_in_an_earlier_round_stands_for_those_that_were_not():
    """In its long round nobody is pruned: it is there by the survival of the round before, with the tokens of it."""
    judge = taught_judge()
    plan = replace(SHADOW, final_score=True)
    siblings = Siblings(judge, plan, num=1, prompt_key="q", num_resumed=100, survival_before=0.25)
    siblings.finish(0)
    judge.value(siblings.entries[0], seen_at(WHOLE, 1.0))
    _, _, (label,) = judge.reward("r", [Reward("p", 0, 1.0, True)])
    assert (label.weight, label.num_tokens) == (4.0, 30)  # the worker knows it by the tokens of this round
    assert judge.memory.successes.of("q").num_rewarded == 4.0
    (outcome,) = judge.memory.learnings[WHOLE].outcomes()
    assert (outcome.weight, outcome.tokens_after) == (4.0, 130 - WHOLE)


def test_the_end_of_a_trajectory_is_calibrated_like_a_detection_length():
    judge = Judge()
    siblings = Siblings(judge, replace(SHADOW, final_score=True), num=400, group_size=400)
    rng = random.Random(5)
    for index, entry in siblings.entries.items():
        judge.value(entry, seen_at(WHOLE, rng.gauss(1.0 if index % 2 else -1.0, 1.0)))
    siblings.finish(*range(400))
    judge.reward("r", [Reward("p", index, float(index % 2), bool(index % 2)) for index in range(400)])
    others = Siblings(judge, replace(SHADOW, final_score=True), num=2, rollout_id="s")
    low, high = (judge.value(others.entries[i], seen_at(WHOLE, logit)) for i, logit in enumerate((-2.0, 2.0)))
    assert low.success_probability < 0.15 < 0.85 < high.success_probability


def rewarded(siblings: Siblings) -> None:
    """All are scored, finished and told whether they were right: those of a high logit were not."""
    siblings.due(LOGITS)
    siblings.finish(*LOGITS)
    rewards = [Reward("p", index, float(logit < 0), logit < 0) for index, logit in LOGITS.items()]
    _, statuses, labels = siblings.judge.reward(siblings.scoring.rollout_id, rewards)
    assert set(statuses) == {"accepted"}
    assert {label.key for label in labels} == {(LENGTH, siblings.scoring.adapter)}


def test_an_adapter_learns_and_is_judged_by_itself():
    judge = taught_judge()
    before = judge.memory.learnings[LENGTH].to_state()
    other = Siblings(judge, adapter="b", rollout_id="b")
    assert other.due(LOGITS) == []
    assert all(assessment.cold for assessment in other.assessments().values()), "what the base model learned is its own"
    state_of_b = judge.known("b").learnings[LENGTH].to_state()
    for number in range(3):
        rewarded(Siblings(judge, SHADOW, adapter="a", rollout_id=f"a{number}", prompt_key="id:p"))
    assert judge.memory.learnings[LENGTH].to_state() == before
    assert judge.known("b").learnings[LENGTH].to_state() == state_of_b
    assert judge.known("a").learnings[LENGTH].calibrators["head"].num_positive == 12
    assert [len(memory.successes) for memory in judge.all().values()] == [0, 0, 1]
    of_base, of_a = Siblings(judge, SHADOW, rollout_id="r1"), Siblings(judge, SHADOW, rollout_id="a9", adapter="a")
    for siblings in (of_base, of_a):
        siblings.due(LOGITS)
    successes = [[siblings.assessments()[i].success_probability for i in (0, 7)] for siblings in (of_base, of_a)]
    assert successes[0][0] < successes[0][1]
    assert successes[1][0] > successes[1][1]


def test_of_more_adapters_than_there_is_room_for_none_is_judged_while_rewards_are_awaited():
    judge = Judge()
    for number in range(MAX_ADAPTERS):
        Siblings(judge, SHADOW, adapter=f"{number}", rollout_id=f"{number}").due(LOGITS)
    late = Siblings(judge, SHADOW, adapter="late", rollout_id="late")
    assert late.due(LOGITS) == []
    assert not late.judged.assessments
    base = Siblings(judge, SHADOW, rollout_id="base")
    base.due(LOGITS)
    assert base.judged.assessments
    for index in LOGITS:
        judge.ledger.take("3", "p", index)
    late.due(LOGITS)
    assert late.judged.assessments
    assert judge.known("3") is None
    assert judge.take_forgotten() == [(LENGTH, "3")]


def judged_group(group_size: int, num: int, num_launched: int | None = None) -> JudgedGroup:
    group = Group(group_terms(group_size, num, pruning=PLAN))
    for _ in range(num if num_launched is None else num_launched):
        group.launch()
    return JudgedGroup(group, PLAN)


@pytest.mark.parametrize(
    ("num_due", "at_least", "num_needed"), [(4, 2, 0), (6, 2, 2), (6, 1, 1), (5, 2, 1), (6, 6, 6), (1, 6, 1), (0, 6, 0)]
)
def test_due_candidates_are_needed_as_far_as_the_others_are_too_few(num_due, at_least, num_needed):
    assert judged_group(2, 6).num_needed(num_due, at_least) == num_needed


def test_finished_and_expected_siblings_are_able_to_finish_while_failed_and_pruned_ones_are_not():
    judged = judged_group(2, 6, num_launched=5)
    group = judged.group
    assert judged.num_needed(5, 2) == 1  # the sixth is expected
    end_step(group, (0, "stop", 3))
    assert judged.num_needed(4, 2) == 0
    end_step(group, (1, "failed", 3))
    assert judged.num_needed(3, 2) == 0
    group.launch()
    assert judged.num_needed(4, 2) == 1
    group.rule_out([2, 3], "pruned")
    assert [judged.num_needed(num_due, 2) for num_due in (2, 1)] == [1, 0]


def test_in_shadow_mode_marked_candidates_do_not_count_as_able_to_finish():
    judged = judged_group(2, 4)
    group = judged.group
    marked, kept = (Assessment("head", 0.0, 0.5, 0.5, keep, 1, Confidence(1.0, 1.0, 1.0)) for keep in (False, True))
    judged.assessments.update({0: marked, 1: marked})
    assert judged.num_needed(2, 2) == 2
    end_step(group, (0, "stop", 20))
    assert judged.num_needed(2, 2) == 2
    judged.assessments[1] = kept
    assert judged.num_needed(2, 2) == 1
