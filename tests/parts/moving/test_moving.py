"""Groups that move between two schedulers: every token once, every candidate one end."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from tests.kernel.core.scheduler_runs import add_group, assert_nothing_left
from tests.parts.moving.moving_runs import assert_both_end, assert_each_once, ids_and_lengths


def test_a_group_goes_on_elsewhere_as_if_nothing_had_happened(new_ranks):
    ranks, lengths = new_ranks(), [50, 200, 90, 120]
    ids = add_group(ranks.runs[0], "g", lengths, group_size=3)
    ranks.until("g-0", 20)
    assert ranks.move("g") == "released"
    assert not ranks.runs[0].scheduler.requests
    ranks.run()
    run = ranks.runs[0]
    assert [run.state(id) for id in ids] == ["finished", "surplus", "finished", "finished"]
    assert [run.num_tokens(id) for id in ids] == [50, 120, 90, 120]
    assert_each_once(ranks, ids_and_lengths(ids, lengths))
    assert sorted(ranks.cores[1].known) == ids
    assert ranks.cores[1].known["g-0"].generator == b"g-0"


def test_held_tokens_log_probabilities_and_versions_travel(new_ranks):
    ranks = new_ranks()
    (id,) = add_group(ranks.runs[0], "g", [100], group_size=1, logprobs=0)
    ranks.until(id, 30)
    assert ranks.runs[0].num_tokens(id) == 1  # the others are held
    candidate = ranks.runs[0].scheduler.candidates_of("g")[0]
    candidate.weights = [(0, 5), (17, 6)]
    ranks.move("g")
    ranks.run()
    outputs = ranks.runs[0].outputs[id]
    positions = [p for output in outputs for p in output.new_logprobs.sampled_token_ranks.tolist()]
    assert positions == list(range(1, 101))
    *came, (start, here) = ranks.runs[0].note(id).weights
    assert came == [(0, "5"), (17, "6")]
    assert start >= 30
    assert here == "default"


def test_winners_are_ordered_by_the_groups_own_step(new_ranks):
    ranks = new_ranks()
    add_group(ranks.runs[1], "other", [300], group_size=1)
    for _ in range(100):
        ranks.runs[1].step()
    ids = add_group(ranks.runs[0], "g", [20, 60, 60, 70], group_size=2)
    ranks.until("g-1", 40)
    ranks.move("g")
    ranks.run()
    run = ranks.runs[0]
    assert [run.state(id) for id in ids] == ["finished", "finished", "surplus", "surplus"]  # a tie of two
    assert run.note("g-1").end_step == run.note("g-0").end_step + 1


def test_waiting_preempted_and_running_candidates_move(new_ranks):
    ranks = new_ranks(num_blocks=30, max_num_seqs=3)
    lengths = [150, 180, 170, 160, 30]
    ids = add_group(ranks.runs[0], "g", lengths, group_size=5)
    statuses = set()
    while RequestStatus.PREEMPTED not in statuses:
        ranks.step()
        statuses = {ranks.runs[0].requests[id].status for id in ids}
    assert {RequestStatus.RUNNING, RequestStatus.WAITING} <= statuses
    ranks.move("g")
    ranks.run()
    assert [ranks.runs[0].state(id) for id in ids] == ["finished"] * 5
    assert_each_once(ranks, ids_and_lengths(ids, lengths))


def test_a_candidate_that_is_aborted_while_its_group_stops(two):
    two.cores[0].release("g")
    two.runs[0].scheduler.finish_requests(["g-0"], RequestStatus.FINISHED_ABORTED)
    if two.runs[0]._depth == 1:  # it was released in one call, and an abort of what is not there is nothing
        return
    assert two.cores[0].release("g").outcome == "busy"
    two.move("g")
    two.run()
    assert [two.runs[0].state(id) for id in ("g-0", "g-1")] == ["failed", "finished"]
    assert_each_once(two, {"g-0": 50, "g-1": 70})


def test_a_stop_string_across_the_move_is_found(new_ranks):
    ranks = new_ranks()
    run = ranks.runs[0]
    (id,) = add_group(run, "g", [40], group_size=1, stop=["ab"], detokenize=True)
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(run.scheduler.vllm_config.model_config)
    a, b = (tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "ab")
    run.scripts[id] = [b] * 10 + [a] + [b] * 10
    ranks.until(id, 11)
    ranks.move("g")
    ranks.run()
    assert run.state(id) == "finished"
    assert run.num_tokens(id) == 12
    for each in ranks.runs:
        assert_nothing_left(each)


def test_patience_goes_on(new_ranks):
    ranks = new_ranks()
    lengths = [20, 30, 200, 300]
    ids = add_group(ranks.runs[0], "g", lengths, group_size=2, early_stop=False, patience=2.0)
    ranks.until("g-2", 40)
    ranks.move("g")
    ranks.run()
    assert [ranks.runs[0].num_tokens(id) for id in ids] == [20, 30, 60, 60]
    assert_each_once(ranks, ids_and_lengths(ids, lengths))


def test_a_group_that_waits_for_candidates_waits_elsewhere(new_ranks):
    ranks = new_ranks()
    add_group(ranks.runs[0], "g", [40], group_size=2, num_candidates=3)
    ranks.until("g-0", 10)
    assert ranks.move("g") == "released"
    ranks.run()
    assert ranks.runs[1].scheduler.group_steps.group_counts.num_idle == 1
    assert ranks.move("g", source=1, epoch=2) == "released"  # nothing of it runs
    assert ranks.runs[0].scheduler.group_steps.group_counts.num_idle == 1
    assert ranks.cores[1].release("g", 3).outcome == "over"


def test_a_group_with_a_grammar_stays_and_says_why(new_ranks):
    ranks = new_ranks()
    (id,) = add_group(ranks.runs[0], "g", [40], group_size=1)
    ranks.until(id, 10)
    ranks.runs[0].requests[id].structured_output_request = object()
    released = ranks.cores[0].release("g")
    assert (released.outcome, released.reason) == ("refused", "its grammar has a state of its own")
    ranks.runs[0].requests[id].structured_output_request = None
    ranks.run()
    assert ranks.runs[0].num_tokens(id) == 40


@pytest.mark.parametrize("released", [False, True])
def test_a_group_that_was_to_leave_goes_on_where_it_was(two, released):
    two.cores[0].release("g")
    if released:
        two.release("g", 0)
        assert not two.runs[0].scheduler.requests
    two.cores[0].keep("g")
    two.cores[0].keep("g")
    assert_both_end(two)


def test_calls_that_are_repeated_change_nothing(two):
    released = two.release("g", 0)
    assert two.cores[0].release("g") == released
    assert two.cores[0].release("g", epoch=2).outcome == "busy"
    for _ in range(2):
        two.cores[1].adopt("g", released.parcel)
    for _ in range(2):
        two.cores[0].confirm("g")
    two.cores[0].keep("g")  # too late
    assert_both_end(two)


GROUP = st.integers(0, 2)
ACTIONS = st.lists(
    st.tuples(
        st.tuples(st.integers(0, 6), st.integers(0, 6)),
        st.one_of(
            st.tuples(st.just("release"), GROUP, st.integers(0, 3)),
            st.tuples(st.sampled_from(["adopt", "confirm"]), GROUP, st.integers(1, 2)),
            st.tuples(st.just("keep"), GROUP, st.just(0)),
            st.tuples(st.just("abort"), GROUP, st.integers(0, 3)),
        ),
    ),
    min_size=5,
    max_size=60,
)
"""Steps of each rank, then what is done to a group."""


@pytest.mark.thorough
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=ACTIONS,
    lengths=st.lists(st.lists(st.integers(5, 80), min_size=2, max_size=4), min_size=3, max_size=3),
    num_blocks=st.sampled_from([40, 2000]),
)
def test_any_interleaving_gives_every_candidate_one_end_and_every_token_once(new_ranks, actions, lengths, num_blocks):
    ranks = new_ranks(num_blocks=num_blocks)
    wanted: dict[str, int] = {}
    for position, of_group in enumerate(lengths):
        ids = add_group(ranks.runs[position % 2], f"g{position}", of_group, group_size=1)
        wanted |= ids_and_lengths(ids, of_group)
    where = {f"g{position}": position % 2 for position in range(3)}
    epoch = dict.fromkeys(where, 0)
    parcels: dict[str, bytes] = {}
    arrived: set[str] = set()
    for steps, (action, number, detail) in actions:
        for run, num_steps in zip(ranks.runs, steps, strict=True):
            for _ in range(num_steps):
                run.step()
        group_id = f"g{number}"
        if action == "release" and group_id not in parcels:
            epoch[group_id] += 1
            released = ranks.cores[where[group_id]].release(group_id, epoch[group_id])
            if released.outcome == "released":
                parcels[group_id] = released.parcel
                arrived.discard(group_id)
            elif not detail:
                ranks.cores[where[group_id]].keep(group_id, epoch[group_id])
        elif action == "keep" and group_id not in arrived:
            ranks.cores[where[group_id]].keep(group_id, epoch[group_id])
            parcels.pop(group_id, None)
        elif action == "adopt" and group_id in parcels:
            for _ in range(detail):
                ranks.cores[1 - where[group_id]].adopt(group_id, parcels[group_id], epoch[group_id])
            arrived.add(group_id)
        elif action == "confirm" and group_id in arrived and group_id in parcels:
            for _ in range(detail):
                ranks.cores[where[group_id]].confirm(group_id, epoch[group_id])
            del parcels[group_id]
            where[group_id] = 1 - where[group_id]
        elif action == "abort" and group_id not in parcels:
            id = f"{group_id}-{detail}"
            ranks.runs[where[group_id]].scheduler.finish_requests([id], RequestStatus.FINISHED_ABORTED)
    for group_id in where:
        if group_id in arrived and group_id in parcels:
            ranks.cores[where[group_id]].confirm(group_id, epoch[group_id])
        elif group_id not in arrived or group_id not in parcels:
            ranks.cores[where[group_id]].keep(group_id, epoch[group_id])
    ranks.run()
    assert_each_once(ranks, wanted)
    for position, of_group in enumerate(lengths):
        states = [ranks.runs[0].state(f"g{position}-{index}") for index in range(len(of_group))]
        assert states.count("finished") <= 1
