"""The order of a step: one test per rule, then whole runs in random order of events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel.rules.group_steps import Run
from tests.support.steps import group_steps, group_terms, said
from vllm_rollout.kernel.rules.step import NO_VERDICTS, LaunchRefused
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.rules.types import CandidateId, Confidence
from vllm_rollout.parts.pruning.rules.judge import Judge
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey, Observation, PruningPlan
from vllm_rollout.parts.pruning.rules.step import PRUNING, PruningStep

PLAN = PruningPlan(4, keep_ratio=0.5, min_labels=8)
SCORING = Scoring("rollout", "q", 7)


def seen(score: float) -> Observation:
    return Observation(Confidence(score, score, score))


def warm_judge() -> Judge:
    """A judge for which high confidence succeeds."""
    judge = Judge()
    entries = judge.learning_of(HeadKey(PLAN.detection_length)).calibrators["confidence"]
    for number in range(200):
        entries.observe(number % 10)
        entries.add(number % 10, number % 10 > 4)
    return judge


def test_races_are_settled_before_scores_are_judged():
    run = Run(warm_judge())
    run.launch("a", [4, 9, 9], group_terms(1, 3, pruning=PLAN), SCORING)
    for _ in range(3):
        run.step()
    verdicts = run.step({CandidateId("a", index): seen(1) for index in range(3)})
    assert set(verdicts.stop.values()) == {"surplus"}


def test_who_ended_in_a_step_in_which_nobody_was_pruned_keeps_its_place():
    steps, terms = group_steps(Judge()), group_terms(2, 4, pruning=PLAN)
    launched = [steps.launch("a", terms, index, said=said(SCORING)) for index in range(4)]
    ids, group = [id for id, _ in launched], launched[0][1]
    steps.ended(ids[0], group, "stop", 50)
    assert steps.close_step({PRUNING: {ids[3]: seen(1)}}, lambda id: 4).stop == {}
    steps.ended(ids[1], group, "stop", 30)
    steps.ended(ids[2], group, "stop", 40)
    assert steps.close_step({}, lambda id: 5).lost_ties == {ids[2]}
    assert [group.state(id.index) for id in ids] == ["finished", "finished", "surplus", "surplus"]


def test_pruning_settles_the_race_again():
    """The candidates left by pruning cannot reach group_size by themselves: the truncated one counts now."""
    plan = PruningPlan(4, keep_ratio=0.05, allow_fewer=True, min_labels=8, min_survival=0.05)
    judge = warm_judge()
    run = Run(judge)
    run.launch("a", [9, 9, 9, 9], group_terms(1, 4, pruning=plan), Scoring("r", "q", 1))
    for _ in range(3):
        run.step()
    verdicts = run.step({CandidateId("a", index): seen(0) for index in range(4)})
    assert set(verdicts.stop.values()) == {"pruned"}
    assert 1 <= len(run.running) < 4


def test_what_is_too_long_is_given_up_in_the_step_that_reaches_the_cap():
    run = Run()
    run.launch("a", [2, 2, 9], GroupTerms(2, 3, early_stop=False, patience=2.0))
    assert [run.step().stop for _ in range(3)] == [{}, {}, {}]
    assert run.step().stop == {CandidateId("a", 2): "surplus"}
    assert not run.steps.has_events


def test_a_group_that_waits_costs_no_step_and_gives_up_who_comes_late_and_is_too_long():
    steps, terms = group_steps(Judge()), GroupTerms(1, 3, early_stop=False, patience=2.0)
    first, group = steps.launch("a", terms)
    steps.ended(first, group, "stop", 3)
    steps.close_step({}, {}.__getitem__, now_s=0.0)
    assert group.length_cap == 6
    assert not steps.has_events
    late, _ = steps.launch("a", terms)
    assert steps.close_step({}, {late: 5}.__getitem__, now_s=1.0).stop == {}
    assert steps.close_step({}, {late: 6}.__getitem__, now_s=2.0).stop == {late: "surplus"}
    assert steps.forget_waiting(10_000.0) == ["a"]
    assert not steps.has_events


def test_a_cancelled_group_defers_what_runs_and_keeps_what_has_finished():
    run = Run()
    run.launch("a", [2, 9, 9], GroupTerms(3, 3))
    run.step()
    assert run.steps.cancel("a")
    verdicts = run.step()
    assert verdicts.stop == {CandidateId("a", 1): "deferred", CandidateId("a", 2): "deferred"}
    assert run.groups["a"].state(0) == "finished"
    assert verdicts.over == ("a",)
    assert not run.steps.cancel("a")


def test_candidates_that_nobody_needs_stop_as_surplus_and_their_siblings_go_on():
    run = Run()
    run.launch("a", [2, 9, 9, 3], GroupTerms(4, 4, early_stop=False))
    run.step()
    run.steps.give_up("unknown", [0])
    run.steps.give_up("a", [0])
    run.steps.give_up("a", [1, 7])
    assert run.step().stop == {CandidateId("a", 1): "surplus"}
    assert [run.groups["a"].state(index) for index in range(4)] == ["finished", "surplus", "running", "running"]


@pytest.mark.parametrize(("length", "cancelled", "state"), [(9, True, "deferred"), (1, False, "surplus")])
def test_a_sibling_that_comes_after_the_end_or_the_cancellation_is_stopped_by_the_next_step(length, cancelled, state):
    run, terms = Run(), GroupTerms(1, 3)
    run.launch("a", [length], terms)
    assert run.steps.cancel("a") if cancelled else run.steps.close_step({}, len) is NO_VERDICTS
    run.step()
    id, _ = run.steps.launch("a", terms)
    run.lengths[id], run.running[id] = 9, 0
    assert run.step().stop == {id: state}


def test_a_group_that_completes_in_the_step_of_its_cancellation_is_complete():
    run = Run()
    run.launch("a", [1, 9], GroupTerms(1, 2))
    run.steps.cancel("a")
    assert run.step().stop == {CandidateId("a", 1): "surplus"}


def test_the_ledger_knows_every_end_and_forgets_nothing_that_may_be_rewarded():
    judge = warm_judge()
    run = Run(judge)
    run.launch("a", [6, 9, 2], group_terms(2, 3, early_stop=False, patience=1.0, pruning=PLAN), SCORING)
    for _ in range(3):
        run.step()
    run.step({CandidateId("a", index): seen(9) for index in range(2)})
    while run.running:
        run.step()
    rollout = judge.ledger._rollouts["rollout"]
    for (_, index), entry in rollout.items():
        assert (entry.state, entry.num_tokens) == (run.groups["a"].state(index), run.ends[CandidateId("a", index)][1])
    assert run.steps.part(PruningStep)._scored == {}


def test_a_candidate_that_names_other_terms_or_a_taken_index_is_refused_and_changes_nothing():
    run = Run()
    run.launch("a", [3, 3], GroupTerms(1, 3))
    with pytest.raises(LaunchRefused, match=r"num_candidates of this group is 3, as its first candidate said, got 4"):
        run.steps.launch("a", GroupTerms(1, 4))
    with pytest.raises(LaunchRefused, match="index 1 of this group is taken"):
        run.steps.launch("a", GroupTerms(1, 3), 1)
    assert run.groups["a"].num_running == 2
    assert run.steps.launch("a", GroupTerms(1, 3))[0] == CandidateId("a", 2)


def test_a_refused_candidate_does_not_keep_an_idle_group_from_being_forgotten():
    run = Run(max_idle=1)
    for group_id in "ab":
        run.launch(group_id, [1], GroupTerms(1, 2, early_stop=False))
        run.step()
        with pytest.raises(LaunchRefused):
            run.steps.launch(group_id, GroupTerms(2, 2))
    assert len(run.steps) == 1


races = st.lists(
    st.tuples(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 6), st.booleans(), st.booleans()),
    min_size=1,
    max_size=5,
)


@pytest.mark.thorough
@settings(max_examples=200)
@given(
    races,
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 4), st.booleans()), max_size=3),
    st.randoms(use_true_random=False),
)
def test_every_candidate_has_one_end_whatever_happens(groups, cancels, chance):
    run = Run(warm_judge())
    for number, (lengths, size, early_stop, pruned) in enumerate(groups):
        size = min(size, len(lengths))
        plan = PruningPlan(3, allow_fewer=True, min_labels=8) if pruned else None
        terms = group_terms(size, len(lengths), early_stop, None if early_stop else 1.5, plan)
        run.launch(str(number), lengths, terms, plan and Scoring("r", str(number), number))
    over = []
    for step in range(1, 14):
        for at, number, some in cancels:
            if at == step:
                run.steps.give_up(str(number), [0, 2]) if some else run.steps.cancel(str(number))
        due = {id: seen(chance.uniform(0, 9)) for id, tokens in run.running.items() if tokens == 2}
        over += run.step(due).over
    assert set(run.ends) == set(run.lengths)
    assert sorted(over) == sorted(run.groups)
    assert len(run.steps) == 0
    assert not run.steps.has_events
    assert run.steps.part(PruningStep)._scored == {}
    for (group_id, index), (end, _) in run.ends.items():
        state = run.groups[group_id].state(index)
        assert state == end if end != "stop" else state in ("finished", "surplus")
