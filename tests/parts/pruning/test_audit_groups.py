"""Audit groups whose candidates come one by one: who has a place in them, who is stopped, what is learned of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.rules.group_steps import ENDS, Run, states
from tests.parts.pruning.reports import report_of
from tests.parts.pruning.steps import group_terms, judged, said, steps_of
from tests.parts.pruning.test_step import PLAN, SCORING, seen, warm_judge
from vllm_rollout.kernel.rules.lifecycle import Group, Settlement
from vllm_rollout.kernel.rules.step import LaunchRefused
from vllm_rollout.kernel.rules.types import CandidateId
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey
from vllm_rollout.parts.pruning.rules.step import PRUNING, PruningStep

F, S, X, R = "finished", "surplus", "failed", "running"
FOUR = "launch, launch, launch, launch"
NOBODY = NOTHING = Settlement()


@pytest.mark.parametrize(
    ("group_size", "steps", "decided", "ends"),
    [
        pytest.param(
            2,
            [FOUR, "1 stop 5", "0 stop 500"],
            [Settlement((2, 3)), NOTHING, NOBODY],
            [F, F, S, S],
            id="first come",
        ),
        pytest.param(
            2,
            ["launch, launch, 0 stop 5", "launch", "1 stop 9", "launch"],
            [NOTHING, Settlement((2,)), NOBODY, Settlement((3,))],
            [F, F, S, S],
            id="all places are taken",
        ),
        pytest.param(
            1, ["launch, launch, 1 stop 1"], [Settlement((), (1,))], [R, S], id="without a place, and ends at once"
        ),
        pytest.param(
            2,
            ["launch, launch, launch, 0 fail 3", "launch, 1 stop 5, 3 stop 9"],
            [Settlement((2,)), NOBODY],
            [X, F, S, F],
            id="a lost one leaves its place",
        ),
        pytest.param(
            2, [FOUR, "0 cut 8, 1 stop 3"], [Settlement((2, 3)), NOBODY], [F, F, S, S], id="truncated ones keep theirs"
        ),
    ],
)
def test_those_that_come_first_run_to_their_ends_and_the_others_not_at_all(group_size, steps, decided, ends):
    group, play = audited(group_size, 4 if group_size == 2 else 2)
    assert play(steps) == decided
    assert states(group) == ends
    assert group.complete == group.over == (R not in ends)


def test_without_early_stop_everybody_has_a_place():
    group, play = audited(2, 4, early_stop=False)
    assert play([FOUR, "0 stop 5, 1 stop 6, 2 stop 7, 3 stop 8"]) == [Settlement(), Settlement()]
    assert states(group) == [F] * 4


def audited(*terms: Any, **others: Any) -> tuple[Group, Callable[[list[str]], list[Settlement]]]:
    """An audit group without a candidate, and a function that plays steps as `play_steps` does."""
    steps, group_id = steps_of(warm_judge()), "a"
    its_terms = group_terms(*terms, **others, pruning=PLAN, audit_ratio=1.0)
    group = Group(its_terms)
    steps._table.put(group_id, group)

    def launch() -> None:
        steps.launch(group_id, its_terms, said=said(SCORING))

    def play(lines: list[str]) -> list[Settlement]:
        played = []
        for line in lines:
            for event in line.split(", "):
                if event == "launch":
                    launch()
                    continue
                index, end, num_tokens = event.split()
                steps.ended(CandidateId(group_id, int(index)), group, ENDS[end], int(num_tokens))
            verdicts = steps.close_step({}, lambda _: 1)
            ids = (tuple(sorted(id.index for id in ids)) for ids in (verdicts.stop, verdicts.lost_ties))
            played.append(Settlement(*ids))
        return played

    return group, play


@given(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 3))
def test_whatever_the_lengths_the_first_that_come_are_those_that_finish(group_size, lengths, pause):
    """Siblings come one by one, `pause` steps apart."""
    run = Run()
    terms = group_terms(group_size, len(lengths), pruning=PLAN, audit_ratio=1.0)
    for index, length in enumerate(lengths):
        id, run.groups["a"] = run.steps.launch("a", terms, index, said=said(SCORING))
        run.lengths[id], run.running[id] = length, 0
        for _ in range(pause):
            run.step()
    while run.running:
        verdicts = run.step()
        assert not verdicts.stop.keys() & verdicts.lost_ties
    states = [run.groups["a"].state(index) for index in range(len(lengths))]
    assert states == ["finished" if index < group_size else "surplus" for index in range(len(lengths))]


def test_the_first_candidate_s_seed_draws_and_all_of_the_group_agree():
    run = Run()
    terms = group_terms(2, 4, pruning=PLAN, audit_ratio=0.3)
    drawn = []
    for number in range(200):
        group_id = f"g{number}"
        for seed in range(4):
            scoring = Scoring(group_id, "q", 10 * number + seed)
            _, group = run.steps.launch(group_id, terms, said=said(scoring))
        plans = {run.steps.part(PruningStep)._scored[CandidateId(group_id, index)].entry.plan for index in range(4)}
        assert plans == {PLAN.audited(races=True) if judged(group).audit else PLAN}
        drawn.append(judged(group).audit)
    assert 30 < sum(drawn) < 90, "60 are expected; by the seeds, always as many"
    again = Run()
    for number in range(200):
        again.steps.launch(f"g{number}", terms, said=said(Scoring(f"g{number}", "q", 10 * number)))
    assert [judged(again.steps._table.find(f"g{number}")).audit for number in range(200)] == drawn


def test_siblings_say_the_same_share():
    run = Run()
    run.steps.launch("a", group_terms(2, 4, pruning=PLAN, audit_ratio=0.05), said=said(SCORING))
    with pytest.raises(LaunchRefused, match=r"audit_ratio of this group is 0.05, as its first candidate said, got 0.5"):
        run.steps.launch("a", group_terms(2, 4, pruning=PLAN, audit_ratio=0.5), said=said(SCORING))


@pytest.mark.parametrize(
    ("num_spare", "ratio", "origin"), [(3, 0.0, "race"), (3, 1.0, "audit"), (0, 0.0, "plain"), (0, 1.0, "plain_audit")]
)
def test_nobody_is_pruned_in_an_audit_group_and_its_labels_say_so(num_spare, ratio, origin):
    """In a group without spare candidates nobody races, and shadow mode prunes nobody."""
    judge = warm_judge()
    run = Run(steps_of(judge))
    plan = PLAN if num_spare else replace(PLAN, mode="shadow")
    terms = group_terms(4 - num_spare, 4, pruning=plan, early_stop=False, audit_ratio=ratio)
    run.launch("a", [9, 9, 9, 9], terms, said(SCORING))
    for _ in range(PLAN.detection_length - 1):
        run.step()
    due = {CandidateId("a", index): seen(score) for index, score in enumerate((0.0, 1.0, 8.0, 9.0))}
    run.step({PRUNING: due})
    assert (len(run.running) == 4) == (origin != "race")
    while run.running:
        run.step()
    learning = judge.learning_of(HeadKey(PLAN.detection_length))
    before = report_of(learning).audit
    kept = [index for index in range(4) if run.ends[CandidateId("a", index)][0] == "stop"]
    _, statuses, labels = judge.reward("rollout", [("q", index, 1.0, True) for index in kept])
    assert set(statuses) == {"accepted"}
    assert {(label.origin, label.active) for label in labels} == {(origin, origin == "race")}
    after = report_of(learning).audit
    assert after.num_labels - before.num_labels == pytest.approx(4 if ratio else 0, rel=1e-3)
    assert num_spare or after.offset == 0
