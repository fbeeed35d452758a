from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.parts.rounds.rules.round_progress import GroupEnd, RoundProgress
from vllm_rollout.parts.rounds.rules.rounds import EntryOutcome, FreshPrompt, RoundError, Run, RunTerms, speculated
from vllm_rollout.parts.rounds.rules.rounds_state import run_from_state, run_to_state

TERMS = RunTerms(group_size=2, prompts_per_round=4, prompt_speculation=1.5)


def prompts(*ids: str, epoch: int | None = None) -> list[FreshPrompt]:
    return [FreshPrompt(id, epoch, f"content of {id}") for id in ids]


def numbered(first: int, count: int) -> list[FreshPrompt]:
    return prompts(*(f"q{i}" for i in range(first, first + count)))


def begin(run: Run, fresh: list[FreshPrompt], key: str = "k", **more: object) -> None:
    run.begin(run.plan(key, fresh, **more))


def close(run: Run, *deferred: str, filtered: tuple[str, ...] = (), unstarted: tuple[str, ...] = ()) -> None:
    """Everything else is returned, with 10 tokens."""
    outcomes = {}
    for entry in run.open.all_entries:
        id = entry.prompt_id
        fate = (
            "deferred" if id in deferred else "filtered" if id in filtered else "unstarted" if id in unstarted else None
        )
        outcomes[entry.number] = EntryOutcome(fate or "returned", 0 if fate else 10)
    run.close(outcomes, 1.0, 100, 50)


def queued(run: Run) -> list[str]:
    return [entry.prompt_id for entry in run.queue]


@pytest.mark.parametrize(("count", "factor", "num"), [(10, 1.1, 11), (8, 1.25, 10), (3, 1.25, 4)])
def test_factors_are_read_in_decimals(count: int, factor: float, num: int) -> None:
    assert speculated(count, factor) == num


def test_a_short_round_defers_what_a_long_round_then_runs() -> None:
    run = Run(TERMS)
    assert (run.next_kind, run.num_fresh) == ("short", 6)
    begin(run, numbered(0, 6))
    close(run, "q1", "q4")
    assert queued(run) == ["q1", "q4"]
    assert run.next_kind == "short"
    begin(run, numbered(6, 6))
    close(run, "q6", "q11")
    assert (run.next_kind, run.num_fresh) == ("long", 0)
    begin(run, [])
    assert [entry.prompt_id for entry in run.open.entries] == ["q1", "q4", "q6", "q11"]
    assert run.open.num_wanted == 4
    close(run)
    assert (run.queue, run.num_returned, run.num_deferred, run.num_rounds) == ([], 12, 4, 3)


def test_prompts_that_did_not_begin_are_the_first_of_the_next_short_round() -> None:
    run = Run(TERMS)
    begin(run, numbered(0, 6))
    assert run.num_fresh == 6
    run.give_up()
    assert (run.num_fresh, len(run.carried), run.num_handed_in) == (0, 6, 6)
    run = Run(TERMS)
    begin(run, numbered(0, 6), reserve=numbered(20, 1))
    close(run, "q0", filtered=("q2",), unstarted=("q5", "q20"))
    assert (run.num_fresh, run.num_filtered, queued(run)) == (4, 1, ["q0"])
    begin(run, numbered(6, 4))
    assert [entry.prompt_id for entry in run.open.entries] == ["q5", "q20", "q6", "q7", "q8", "q9"]


def test_the_end_of_an_epoch_runs_what_is_left_without_speculation() -> None:
    run = Run(TERMS)
    begin(run, numbered(0, 6))
    close(run, "q1", "q4")
    begin(run, numbered(6, 1), kind="long")
    assert [entry.prompt_id for entry in run.open.entries] == ["q1", "q4", "q6"]
    assert run.open.num_wanted == 3
    close(run)
    with pytest.raises(RoundError, match="the queue is empty"):
        run.plan("k", [], kind="long")


def full_queue() -> Run:
    run = Run(TERMS)
    for first in (0, 6):
        begin(run, numbered(first, 6))
        close(run, f"q{first}", f"q{first + 1}")
    return run


def test_a_round_that_is_given_up_leaves_everything_where_it_was() -> None:
    run = full_queue()
    before = run_to_state(run)
    begin(run, [], key="lost")
    run.give_up()
    assert run_to_state(run) == before


def deferred(epoch: int | None = None) -> Run:
    """A run in which q0 and q1 wait."""
    run = Run(TERMS)
    begin(run, prompts("q0", "q1", "q2", "q3", "q4", "q5", epoch=epoch))
    close(run, "q0", "q1")
    return run


def opened() -> Run:
    run = Run(TERMS)
    begin(run, numbered(0, 6), key="a")
    return run


@pytest.mark.parametrize(("run", "fresh", "more", "conflict", "text"), [
    (Run(TERMS), numbered(0, 5), {}, False, "wants 6 fresh prompts .* got 5"),
    (Run(TERMS), numbered(0, 7), {}, False, "wants 6 fresh prompts .* got 7"),
    (Run(TERMS), numbered(0, 5), {"kind": "long"}, False, "at most 4 prompts, got 5"),
    (Run(TERMS), numbered(0, 6), {"reserve": numbered(6, 16_379)}, False, r"with 6, got 16379 in .* at most 16378"),
    (Run(TERMS), numbered(0, 6), {"reserve": numbered(6, 65_537)}, False, "65536 prompts may wait .* and 0 do, got"),
    (Run(TERMS), prompts("a", "b", "c", "d", "e", "a"), {}, False, "'a' is used twice"),
    (Run(TERMS), numbered(0, 6), {"reserve": numbered(5, 1)}, False, "'q5' is used twice"),
    (full_queue(), numbered(12, 1), {}, False, "wants 0 fresh prompts, because the queue holds 4, got 1"),
    (full_queue(), numbered(12, 6), {"kind": "short"}, True, "must be long now, got 'short'"),
    (opened(), numbered(6, 6), {}, True, "round 0 of this run is open under the key 'a', got 'k'"),
    (deferred(), [FreshPrompt("q0"), *numbered(6, 5)], {}, True, "'q0' waits in this run with another content"),
    (deferred(1), [*prompts("q0", epoch=1), *numbered(6, 5)], {}, True, "'q0' of epoch 1 waits in this run already"),
])  # fmt: skip
def test_a_round_that_cannot_be_opened_says_why(run: Run, fresh, more, conflict: bool, text: str) -> None:
    before = run_to_state(run)
    with pytest.raises(RoundError, match=text) as error:
        run.plan("k", fresh, **more)
    assert error.value.conflict is conflict
    assert run_to_state(run) == before


def test_a_prompt_of_another_epoch_and_the_largest_reserve_are_taken() -> None:
    deferred(1).plan("k", [*prompts("q0", epoch=2), *numbered(6, 5)])
    Run(TERMS).plan("k", numbered(0, 6), numbered(6, 16_378))


def test_a_prompt_may_come_again_while_it_waits() -> None:
    """In another round of its own: an answer names prompts by their ids."""
    run = Run(TERMS)
    begin(run, numbered(0, 6))
    close(run, "q0", "q1")
    begin(run, [*prompts("q0", "q1"), *numbered(6, 4)])
    close(run, "q0", "q1")
    assert queued(run) == ["q0", "q1", "q0", "q1"]
    assert run.next_kind == "long"
    begin(run, [])
    assert [entry.prompt_id for entry in run.open.entries] == ["q0", "q1"]
    assert run.open.num_wanted == 2
    close(run)
    begin(run, [], kind="long")
    close(run)
    assert (run.queue, run.num_returned, run.num_handed_in) == ([], 12, 12)


@pytest.mark.parametrize(("terms", "num_candidates", "field"), [
    (RunTerms(1, 13_107, 1.25), 1, None), (RunTerms(1, 13_108, 1.25), 1, "prompts_per_round"),
    (RunTerms(16, 16_384, 1.0), 16, None), (RunTerms(16, 16_384, 1.0), 17, "prompts_per_round"),
    (RunTerms(4096, 1, 1.0, 2.0), 8192, None), (RunTerms(4095, 1, 1.0, 2.1), 8600, "response_speculation"),
])  # fmt: skip
def test_terms_of_which_no_round_could_ever_run_are_refused(terms: RunTerms, num_candidates: int, field: str) -> None:
    if field is None:
        terms.check(num_candidates)
        return
    with pytest.raises(RoundError) as error:
        terms.check(num_candidates)
    assert error.value.field == field


@pytest.mark.parametrize(("order", "first"), [("first_in", "q0"), ("shortest", "q6"), ("longest", "q7")])
def test_a_long_round_takes_from_its_queue_in_order(order: str, first: str) -> None:
    run = Run(RunTerms(2, 3, 2.0, queue_order=order))
    begin(run, numbered(0, 6))
    close(run, "q0", "q1")
    begin(run, numbered(6, 6))
    close(run, "q6", "q7", "q8")
    run.begin(run.plan("k", [], predicted={"q0": 50, "q1": 60, "q6": 40, "q7": 90, "q8": 70}))
    assert run.open.entries[0].prompt_id == first
    assert len(run.open.entries) == 3


def test_savings_are_the_longest_of_each_synchronous_round_over_ours() -> None:
    run = Run(RunTerms(1, 2, 1.5))
    lengths = [10, 100, 20, 30, 80, 15]
    for fresh, deferred in ((numbered(0, 3), 1), (numbered(3, 3), 4), ([], None)):
        begin(run, fresh)
        numbers = [entry.number for entry in run.open.entries]
        outcomes = {n: EntryOutcome("returned", lengths[n]) for n in numbers}
        run.close(outcomes | ({} if deferred is None else {deferred: EntryOutcome("deferred")}), 1.0, 1, 1)
    assert run.savings.round_tokens == 20 + 30 + 100
    assert run.savings.synchronous_tokens == 100 + 30 + 80
    assert run.savings.ratio == pytest.approx(210 / 150)


# -- a round on its way


def progress(kind: str = "short", reserve: int = 0, filters: bool = False) -> RoundProgress:
    run = full_queue() if kind == "long" else Run(TERMS)
    fresh = [] if kind == "long" else numbered(0, 6)
    return RoundProgress(run.plan("k", fresh, numbered(100, reserve)), filters)


def start_all(round: RoundProgress) -> list[int]:
    started = []
    while (position := round.start()) is not None:
        started.append(position)
    return started


COMPLETE, STOPPED, LOST = GroupEnd(True, False, 10), GroupEnd(False, True, 0), GroupEnd(False, False, 3)


def test_a_round_starts_in_the_order_that_is_said_and_reserves_afterwards() -> None:
    round = progress("long", reserve=2, filters=True)
    assert round.opened.wants_all
    round.start_in([3, 5, 0, 2, 4, 1])
    assert start_all(round) == [3, 0, 2, 1]
    for position in range(4):
        round.group_over(position, COMPLETE)
    round.rewarded(2, [1.0, 1.0])
    assert start_all(round) == [4]
    assert not progress().opened.wants_all


def test_a_short_round_returns_as_many_as_are_wanted() -> None:
    round = progress()
    assert start_all(round) == [0, 1, 2, 3, 4, 5]
    for position in (5, 2, 0, 1):
        assert round.group_over(position, COMPLETE) == "returned"
    assert (round.is_cut, round.start()) == (True, None)
    assert not round.is_over
    assert round.group_over(3, STOPPED) == "deferred"
    assert round.group_over(4, COMPLETE) == "deferred"
    assert round.is_over
    assert round.reasons == {3: "cut", 4: "tie"}
    round = progress()
    for position in [round.start() for _ in range(5)][:4]:
        round.group_over(position, COMPLETE)
    round.withdraw(4)
    assert (round.start(), round.is_over) == (None, True)
    assert [round.outcomes()[number].fate for number in (4, 5)] == ["unstarted", "unstarted"]


def test_a_group_that_was_lost_is_deferred_in_a_short_round_and_returned_in_a_long_one() -> None:
    round = progress()
    start_all(round)
    assert round.group_over(0, LOST) == "deferred"
    assert round.reasons == {0: "incomplete"}
    round = progress("long")
    start_all(round)
    assert round.group_over(0, LOST) == "returned"


def test_filtered_groups_are_replaced_from_the_reserve() -> None:
    round = progress(reserve=2, filters=True)
    start_all(round)
    round.group_over(0, COMPLETE)
    assert round.rewarded(0, [1.0, 1.0])
    for position in (1, 2, 3):
        round.group_over(position, COMPLETE)
    assert not round.is_cut  # the filter has spoken early: the race is open
    assert round.group_over(4, COMPLETE) == "returned"
    assert round.group_over(5, STOPPED) == "deferred"
    assert (round.start(), round.is_over) == (None, False)  # rewards are to come
    assert not round.rewarded(1, [0.0, 1.0])
    assert round.rewarded(2, [1.0, 1.0])
    assert start_all(round) == [6, 7]
    round.group_over(6, COMPLETE)
    round.group_over(7, STOPPED)
    for position in (3, 4, 6):
        assert not round.is_over
        round.rewarded(position, [0.0, 1.0])
    assert round.is_over
    fates = Counter(outcome.fate for outcome in round.outcomes().values())
    assert fates == {"returned": 4, "filtered": 2, "deferred": 2}


# -- whatever happens, no prompt is lost


@pytest.mark.thorough
@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_every_prompt_is_returned_once_or_still_waits(data: st.DataObject) -> None:
    draw = data.draw
    terms = RunTerms(
        1,
        draw(st.integers(1, 4)),
        draw(st.sampled_from([1.0, 1.25, 1.5, 3.0])),
        queue_order=draw(st.sampled_from(["first_in", "shortest", "longest"])),
    )
    run, next_prompt = Run(terms), 0
    handed_in, back = Counter[str](), Counter[str]()
    for key in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from([None, "long"]))
        num = run.num_fresh if kind is None else draw(st.integers(0, terms.prompts_per_round))
        num_reserve = draw(st.integers(0, 2))
        ids = [f"q{(next_prompt + i) % 23}" for i in range(num + num_reserve)]
        try:
            planned = run.plan(str(key), prompts(*ids[:num]), prompts(*ids[num:]), kind)
        except RoundError:
            continue
        next_prompt += len(ids)
        handed_in.update(ids)
        run.begin(planned)
        if draw(st.booleans()):
            run = run_from_state(json.loads(json.dumps(run_to_state(run))))
        if draw(st.integers(0, 3)) == 0:
            run.give_up()
            continue
        assert run.open is not None
        back.update(play(run, draw))
        assert len({entry.number for entry in (*run.queue, *run.carried)}) == run.num_waiting
        assert handed_in == back + Counter(entry.prompt_id for entry in (*run.queue, *run.carried))
        assert run.num_handed_in == run.num_returned + run.num_filtered + run.num_waiting
    assert run_to_state(run_from_state(run_to_state(run))) == run_to_state(run)


def play(run: Run, draw: object) -> list[str]:
    """A round in which everything happens in any order; returns the ids that left the run."""
    opened = run.open
    round = RoundProgress(opened, filters=draw(st.booleans()))
    round.start_in(draw(st.permutations(range(len(opened.all_entries)))))
    running: list[int] = []
    unrewarded: list[int] = []
    while not round.is_over:
        happenings = ["start"] * (round._next() is not None) + ["end"] * bool(running) + ["reward"] * bool(unrewarded)
        match draw(st.sampled_from(happenings)):
            case "start":
                running.append(round.start())
            case "end":
                position = running.pop(draw(st.integers(0, len(running) - 1)))
                if draw(st.integers(0, 9)) == 0 and round.is_cut:
                    round.withdraw(position)
                    continue
                end = GroupEnd(draw(st.booleans()), draw(st.booleans()), draw(st.integers(1, 50)))
                if round.group_over(position, end) == "returned" and end.complete:
                    unrewarded.append(position)
            case "reward":
                round.rewarded(unrewarded.pop(), draw(st.sampled_from([[], [1.0], [1.0, 1.0], [0.0, 1.0]])))
    outcomes = round.outcomes()
    num_returned = sum(outcome.fate == "returned" for outcome in outcomes.values())
    assert num_returned <= opened.num_wanted
    run.close(outcomes, 1.0, 2, 1)
    return [e.prompt_id for e in opened.all_entries if outcomes[e.number].fate in ("returned", "filtered")]


@pytest.mark.parametrize(("field", "value"), [
    ("format", 2), ("format", None), ("terms", [0, 4, 1.5, 1.25, "first_in"]), ("terms", [2, 4, 1.5, 1.25, "last_in"]),
    ("terms", [2, 4, float("nan"), 1.25, "first_in"]), ("counts", [1, 2, 3]), ("counts", [99, 2, 8, 0, 4]),
    ("queue", [[0, "q0", None, "c", 1], [0, "q1", None, "c", 1]]), ("queue", "q0"), ("open", [1]), ("history", [[1]]),
    ("savings", []), ("receipt", []), ("receipt", [1] * 14 + ["x"]), ("receipt", [None] * 15),
    ("carried", [[0, "", None, "c", 1]]),
    ("queue", [[number, f"q{number}", None, "c", 1] for number in (1, 6, 7, 12)]),  # the first is 0
])  # fmt: skip
def test_a_state_that_no_run_wrote_is_refused(field: str, value: object) -> None:
    state = json.loads(json.dumps(run_to_state(full_queue())))
    with pytest.raises(ValueError, match=r"run|round|entr|saving|receipt"):
        run_from_state({**state, field: value})
