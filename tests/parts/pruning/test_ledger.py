"""Ledger: every posted reward is accounted for once, and what is remembered is bounded."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.kernel.rules.prompt_key import MAX_KEPT_BYTES, num_bytes
from vllm_rollout.kernel.rules.rewards import NamedReward, Reward
from vllm_rollout.kernel.rules.types import CandidateId
from vllm_rollout.parts.pruning.rules.assessment import Assessment, Confidence
from vllm_rollout.parts.pruning.rules.ledger import EntryKey, Ledger, LedgerEntry, Scoring
from vllm_rollout.parts.pruning.rules.pruning_plan import PruningPlan

PLAN = PruningPlan(detection_length=8)
ASSESSMENT = Assessment("head", 0.3, 0.6, 0.5, True, 2, Confidence(1.0, 0.5, 0.7))


def opened(ledger: Ledger, rollout: str, prompt: str, index: int, plan: PruningPlan = PLAN) -> LedgerEntry:
    return ledger.open(Scoring(rollout, prompt, 7), CandidateId("", index), f"{rollout}-{prompt}-{index}", plan)


def finished(ledger: Ledger, rollout: str, prompt: str, index: int, plan: PruningPlan = PLAN) -> LedgerEntry:
    entry = opened(ledger, rollout, prompt, index, plan)
    entry.state, entry.assessment = "finished", ASSESSMENT
    return entry


def status(ledger: Ledger, rollout: str, prompt: str, index: int, reward: float) -> str:
    return ledger.reward(rollout, prompt, index, reward)[0]


@pytest.mark.parametrize(
    ("state", "is_scored", "expected"),
    [("finished", True, "accepted"), ("finished", False, "unscored")]
    + [(state, True, "unfinished") for state in ("running", "pruned", "surplus", "failed")],
)
def test_a_reward_is_accepted_with_its_entry_of_what_is_scored_and_has_finished(state, is_scored, expected):
    ledger = Ledger()
    entry = (finished if is_scored else opened)(ledger, "r", "p", 3)
    entry.state = state
    counts = expected != "unfinished"
    assert ledger.reward("r", "p", 3, 0.25) == (expected, entry if counts else None)
    assert (entry.reward, entry.request_id) == (0.25 if counts else None, "r-p-3")
    if expected == "unscored":
        assert ledger.reward("r", "p", 3, 0.25) == ("unscored", None)
    entry.state = "finished"
    assert status(ledger, "r", "p", 3, 0.0) == {"accepted": "conflict", "unfinished": "accepted"}.get(
        expected, expected
    )


def test_the_oldest_candidates_are_forgotten_first():
    ledger = Ledger(max_candidates=5)
    for rollout in ("a", "b"):
        for index in range(2):
            finished(ledger, rollout, "p", index)
    finished(ledger, "c", "p", 0)
    assert len(ledger) == 5
    finished(ledger, "c", "p", 1)
    assert len(ledger) == 5
    assert [status(ledger, "a", "p", index, 1.0) for index in range(2)] == ["unknown", "accepted"]
    finished(ledger, "c", "p", 2)
    assert ledger.detection_length("a") is None
    assert [status(ledger, rollout, "p", 1, 1.0) for rollout in "abc"] == ["unknown", "accepted", "accepted"]
    assert status(ledger, "b", "p", -1, 1.0) == "unknown"


def test_the_newest_candidates_of_a_long_rollout_outlive_older_ones_of_others():
    ledger = Ledger(max_candidates=4)
    for rollout, index in (("long", 0), ("b", 0), ("c", 0), ("long", 1), ("d", 0), ("d", 1)):
        finished(ledger, rollout, "p", index)
    places = [("long", 0), ("b", 0), ("c", 0), ("long", 1), ("d", 0), ("d", 1)]
    statuses = [status(ledger, rollout, "p", index, 1.0) for rollout, index in places]
    assert statuses == ["unknown"] * 2 + ["accepted"] * 4


def test_the_bound_holds_within_one_rollout():
    ledger = Ledger(max_candidates=3)
    for index in range(10):
        finished(ledger, "large", "p", index)
        assert len(ledger) == min(index + 1, 3)
    assert ledger.num_awaiting() == {8: 3}
    assert [status(ledger, "large", "p", index, 1.0) for index in range(10)] == ["unknown"] * 7 + ["accepted"] * 3


def test_a_rollout_id_that_is_used_again_does_not_push_others_out():
    ledger = Ledger(max_candidates=4)
    finished(ledger, "other", "p", 0)
    for use in range(10):
        finished(ledger, "again", "p", 0)
        assert len(ledger) == 2
        assert status(ledger, "again", "p", 0, float(use)) == "accepted"
    assert status(ledger, "other", "p", 0, 1.0) == "accepted"


def test_an_entry_of_a_forgotten_rollout_can_still_be_written():
    ledger = Ledger(max_candidates=1)
    entry = opened(ledger, "old", "p", 0)
    finished(ledger, "new", "p", 0)
    entry.state = "finished"
    entry.assessment = ASSESSMENT
    assert status(ledger, "old", "p", 0, 1.0) == "unknown"
    assert ledger.num_awaiting() == {8: 1}
    assert not ledger.awaits(9)


def test_rewards_are_awaited_for_what_is_scored_and_runs_or_has_finished():
    """Running candidates are awaited, but not counted yet."""
    ledger = Ledger()
    entry = opened(ledger, "r", "p", 0)
    opened(ledger, "r", "p", 1).state = "finished"
    finished(ledger, "r", "p", 2).state = "surplus"
    finished(ledger, "s", "p", 0, PruningPlan(detection_length=16))
    assert (ledger.awaits(8), ledger.num_awaiting()) == (False, {16: 1})
    entry.assessment = ASSESSMENT
    assert (ledger.awaits(8), ledger.num_awaiting()) == (True, {16: 1})
    entry.state = "finished"
    assert (ledger.awaits(8), ledger.num_awaiting()) == (True, {8: 1, 16: 1})
    ledger.reward("r", "p", 0, 0.0)
    assert (ledger.awaits(8), ledger.num_awaiting()) == (False, {16: 1})
    assert [ledger.detection_length(rollout) for rollout in "rsx"] == [8, 16, None]


posts = st.lists(st.tuples(st.sampled_from("rs"), st.sampled_from("pq"), st.integers(0, 2), st.integers(0, 1)))


@settings(max_examples=60, deadline=None, database=None)
@given(posts, st.sets(st.tuples(st.sampled_from("rs"), st.sampled_from("pq"), st.integers(0, 2))))
def test_whatever_is_posted_in_any_order_each_candidate_is_accepted_once(posted, launched):
    ledger = Ledger()
    for key in launched:
        finished(ledger, *key)
    first: dict[tuple, int] = {}
    seen: Counter[str] = Counter()
    for *name, reward in posted:
        key = tuple(name)
        expected = "unknown" if key not in launched else "accepted"
        if key in first:
            expected = "duplicate" if first[key] == reward else "conflict"
        elif key in launched:
            first[key] = reward
        assert status(ledger, *key, reward) == expected
        seen[expected] += 1
    assert seen["accepted"] == len(first)
    assert sum(ledger.num_awaiting().values()) == len(launched) - len(first)


def named(by: str, id: str, index: int = 0, prompt: str = "") -> NamedReward:
    return NamedReward(by, id, Reward(prompt, index, 1.0, True))


def test_a_candidate_is_found_by_its_rollout_its_group_and_the_request_it_answers():
    ledger = Ledger()
    ledger.open(Scoring("r", "p", 7), CandidateId("r-0", 3), "x", PLAN)
    ledger.name("cmpl-1", "r-0", {0: 3, 1: 4})
    place = EntryKey("r", "p", 3)
    assert ledger.find(named("rollout", "r", 3, "p")) == place
    assert ledger.find(named("group", "r-0", 3)) == place
    assert ledger.find(named("request", "cmpl-1")) == place
    assert ledger.find(named("request", "cmpl-1", 1)) is None, "that one is not here"
    for by, id in (("group", "r"), ("group", "cmpl-1"), ("request", "r-0"), ("rollout", "r-0")):
        assert ledger.find(named(by, id)) is None


def test_large_names_find_their_candidate_and_are_not_kept():
    ledger, prompt, name = Ledger(), "漢" * 256, "x" * 2**20
    entry = ledger.open(Scoring("r", prompt, 7), CandidateId("r-0", 0), "x", PLAN)
    ledger.name(name, "r-0", {0: 0})
    place = ledger.find(named("request", name))
    assert place == ledger.find(named("group", "r-0"))
    assert ledger.find(named("rollout", "r", 0, prompt)) is not None
    entry.state = "finished"
    assert status(ledger, *place, 1.0) == status(ledger, "r", prompt, 0, 1.0) == "unscored"
    assert all(num_bytes(kept) <= MAX_KEPT_BYTES for kept in (entry.prompt_id, *(kept for kept, _ in entry.names)))
    assert ledger.take("r", prompt, 0) is entry


def test_a_request_s_own_name_comes_before_what_may_be_one_of_its_choices():
    ledger = Ledger()
    for index in range(3):
        ledger.open(Scoring("r", "p", 7), CandidateId("r", index), str(index), PLAN)
    ledger.name("a", "r", {0: 0})
    ledger.name("a", "r", {0: 1, 1: 1}, unless_taken=True)
    assert [ledger.find(named("request", "a", choice)).index for choice in (0, 1)] == [0, 1]
    ledger.name("a", "r", {1: 2})
    assert ledger.find(named("request", "a", 1)).index == 2


def test_a_name_that_is_used_again_is_the_newest_ones():
    ledger = Ledger(max_candidates=2)
    for group in "ab":
        ledger.open(Scoring(group, "p", 7), CandidateId(group, 0), group, PLAN)
        ledger.name("cmpl-1", group, {0: 0})
    assert ledger.find(named("request", "cmpl-1")) == EntryKey("b", "p", 0)
    ledger.open(
        Scoring("c", "p", 7), CandidateId("c", 0), "c", PLAN
    )  # the first is forgotten, and its name stays the second's
    assert ledger.find(named("request", "cmpl-1")) == EntryKey("b", "p", 0)
    ledger.name("late", "a", {0: 0})
    assert ledger.find(named("request", "late")) is None


operations = st.lists(
    st.tuples(
        st.sampled_from(["open", "name", "take"]), st.sampled_from("abc"), st.integers(0, 2), st.sampled_from("xyz")
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(operations)
def test_no_name_outlives_what_it_names(steps):
    ledger = Ledger(max_candidates=4)
    remembered: set[tuple[str, int]] = set()
    for operation, group, index, name in steps:
        if operation == "open":
            ledger.open(Scoring(group, "p", 7), CandidateId(group, index), f"{group}{index}", PLAN)
        elif operation == "name":
            ledger.name(name, group, {0: index, 1: 0})
        else:
            ledger.take(group, "p", index)
        remembered = {(group, index) for group in "abc" for _, index in ledger._rollouts.get(group, ())}
        assert len(ledger) == len(remembered) <= 4
        assert ledger._groups.keys() == {group for group, _ in remembered}
        known = {(entry.group_id, entry.index) for choices in ledger._requests.values() for entry in choices.values()}
        assert known <= remembered
        assert all(ledger._requests.values())
    for group, index in remembered:
        ledger.take(group, "p", index)
    assert (len(ledger), ledger._groups, ledger._requests) == (0, {}, {})


def test_awaited_rewards_are_counted_by_served_name():
    ledger = Ledger()
    entries = {}
    for adapter in ("", "a", "b"):
        entry = ledger.open(Scoring(f"r{adapter}", "p", 7, adapter=adapter), CandidateId(f"g{adapter}", 0), "x", PLAN)
        entry.assessment = ASSESSMENT
        entries[adapter] = entry
    assert ledger.adapter("ra") == "a"
    assert (ledger.adapter("r"), ledger.adapter("unknown")) == ("", "")
    entries["a"].state = "finished"
    assert (ledger.num_awaiting(), ledger.num_awaiting("a"), ledger.num_awaiting("b")) == ({}, {8: 1}, {})
    assert all(ledger.awaits(8, adapter) and ledger.awaits_any(adapter) for adapter in entries)
    assert not ledger.awaits_any("c")
    ledger.reward("ra", "p", 0, 1.0)
    entries[""].state = "surplus"
    assert not ledger.awaits(8, "a")
    assert not ledger.awaits_any("a")
    assert not ledger.awaits(8)
    assert ledger.awaits(8, "b")


def test_names_that_nobody_awaits_rewards_for_leave_nothing_behind():
    ledger = Ledger(max_candidates=4)
    for number in range(20):
        scoring = Scoring(f"r{number}", "p", 7, adapter=f"step {number}")
        entry = ledger.open(scoring, CandidateId(f"g{number}", 0), "x", PLAN)
        entry.state, entry.assessment = "finished", ASSESSMENT
    assert sum(len(counts) for counts in ledger._scored.values()) == 4
    assert [ledger.awaits_any(f"step {number}") for number in (15, 16, 19)] == [False, True, True]
