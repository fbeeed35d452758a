"""Judge: scores in, verdicts out; rewards in, labels out."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.config import MAX_DETECTION_LENGTHS, MAX_LABEL_WEIGHT
from vllm_rollout.group.judge import Judge, Scoring
from vllm_rollout.group.learning import Learning
from vllm_rollout.group.ledger import LedgerEntry, Reward
from vllm_rollout.group.lifecycle import Group, GroupTerms
from vllm_rollout.group.pruning_plan import PruningPlan
from vllm_rollout.group.types import Assessment, Confidence, Observation

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
    """One group in a judge's hands."""

    def __init__(self, judge: Judge, plan: PruningPlan = PLAN, group_size: int = 1, num: int = 8, **scoring) -> None:
        self.judge = judge
        self.scoring = Scoring(
            scoring.get("rollout_id", "r"), scoring.get("prompt_id", "p"), scoring.get("seed", 7), plan
        )
        self.group = Group(GroupTerms(group_size, num))
        self.entries: dict[int, LedgerEntry] = {}
        for index in range(num):
            self.group.launch()
            self.entries[index] = judge.ledger.open(
                self.scoring.rollout_id, self.scoring.prompt_id, index, f"request-{index}", plan
            )

    def due(self, logits: dict[int, float | None]) -> list[int]:
        """Judge what is due in one step."""
        self.group.settle()
        seen = {index: (self.entries[index], observation(logit)) for index, logit in logits.items()}
        pruned = self.judge.judge(self.group, self.scoring, seen)
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
    assert siblings.group.assessments == siblings.assessments()
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


def test_nothing_is_pruned_during_a_cold_start():
    siblings = Siblings(Judge())
    assert siblings.due(LOGITS) == []
    assert all(assessment.cold for assessment in siblings.assessments().values())
    assert siblings.group.num_running == 8


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


def test_two_rollouts_with_the_same_prompt_ids_in_one_judge_are_two_groups():
    judge = taught_judge()
    one, other = Siblings(judge, rollout_id="r1"), Siblings(judge, rollout_id="r2")
    one.due(LOGITS)
    other.due({})
    assert all(assessment is None for assessment in other.assessments().values())
    one.finish(0)
    assert judge.reward("r2", [("p", 0, 1.0, True)])[1] == ["unfinished"]
    assert judge.reward("r1", [("p", 0, 1.0, True)])[1] == ["accepted"]


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


def test_posting_rewards_again_teaches_nothing():
    judge = taught_judge()
    siblings = Siblings(judge, SHADOW)
    siblings.due(LOGITS)
    siblings.finish(*range(8))
    rewards = [("p", index, float(index % 2), bool(index % 2)) for index in range(8)]
    assert len(judge.reward("r", rewards)[2]) == 8
    state = judge.memory.learnings[LENGTH].to_state()
    assert judge.reward("r", rewards) == (LENGTH, ["duplicate"] * 8, [])
    assert judge.memory.learnings[LENGTH].to_state() == state


def test_a_reward_teaches_calibration_at_once():
    judge = Judge()
    siblings = Siblings(judge)
    siblings.due(LOGITS)
    siblings.finish(*range(8))
    judge.reward("r", [("p", index, 1.0, True) for index in range(5)])
    judge.reward("r", [("p", index, 0.0, False) for index in range(5, 8)])
    for calibrator in judge.memory.learnings[LENGTH].calibrators.values():
        assert (calibrator.num_positive, calibrator.num_negative) == (5, 3)


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


def test_nothing_is_judged_at_one_detection_length_more_than_are_awaited():
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
    assert len(judge.memory.learnings) == MAX_DETECTION_LENGTHS


def test_the_detection_length_used_longest_ago_gives_way_when_nobody_awaits_rewards_for_it():
    judge = Judge()
    for length in range(1, MAX_DETECTION_LENGTHS + 1):
        siblings = Siblings(judge, replace(PLAN, detection_length=length), rollout_id=f"r{length}")
        siblings.due({0: 1.0})
        siblings.finish(0)
    for rewarded in (3, 2):
        judge.reward(f"r{rewarded}", [Reward("p", 0, 1.0, True)])
    beyond = Siblings(judge, replace(PLAN, detection_length=100), rollout_id="beyond")
    beyond.due({0: 1.0})
    assert beyond.entries[0].assessment is not None
    assert judge.memory.forgotten == [3]
    assert list(judge.memory.learnings) == [1, 4, 5, 6, 7, 8, 2, 100]


def test_a_candidate_whose_reward_has_no_door_is_judged_once_as_any_other():
    with_entries, without = Siblings(taught_judge()), Siblings(taught_judge())
    expected = with_entries.due(LOGITS)
    without.entries = dict.fromkeys(without.entries)
    assert without.due(LOGITS) == expected
    assert without.group.assessments == with_entries.group.assessments
    assert without.due(dict.fromkeys(set(LOGITS) - set(expected), -9.0)) == []
