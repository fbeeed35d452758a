"""Verdicts in vLLM's own scheduler: who stops, when, and that nothing is left behind."""

from functools import partial

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.kernel.core.scheduler_runs import TracedRun, add_group, assert_nothing_left
from tests.support.dry_run import EOS_TOKEN
from vllm_rollout.kernel.rules import types
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.wire import CandidateTag


def ending(run: TracedRun, request_id: str) -> tuple[str, FinishReason, int | str | None]:
    last = run.last(request_id)
    return run.state(request_id), last.finish_reason, last.stop_reason


WON = ("finished", FinishReason.STOP, None)
CUT = ("finished", FinishReason.LENGTH, None)
LOST = ("surplus", FinishReason.ABORT, "surplus")
ABORTED = ("failed", FinishReason.ABORT, None)


PATIENT = {"group_size": 2, "early_stop": False, "patience": 1.5}
GROUPS = {
    "a tie in one step": ({}, [25, 25, 25, 25, 25, 26], {"group_size": 3}, [WON] * 3 + [LOST] * 3, [25] * 6),
    "a freed place": ({"max_num_seqs": 2}, [10, 60, 15, 70], {"group_size": 2}, [WON, LOST, WON, LOST], None),
    "no redundancy": ({}, [10, 30, 20], {"group_size": 3}, [WON] * 3, [10, 30, 20]),
    "no early stop": ({}, [10, 30, 20], {"group_size": 1, "early_stop": False}, [WON] * 3, [10, 30, 20]),
    "nobody left": ({}, [100] * 3, {"group_size": 1, "max_tokens": 20}, [CUT, LOST, LOST], [20] * 3),
    "joined": ({}, [30, 20, 40], {"group_size": 1, "joined": True}, [LOST, WON, LOST], [20] * 3),
    "patience": ({}, [10, 20, 30, 31, 90], PATIENT, [WON] * 3 + [LOST] * 2, [10, 20, 30, 30, 30]),
    # The last two wait for a place: they get as many tokens as their siblings all the same.
    "patience counts tokens, not steps": (
        *({"max_num_seqs": 3}, [10, 20, 80, 25, 80], PATIENT),
        *([WON, WON, LOST, WON, LOST], [10, 20, 30, 25, 30]),
    ),
}
"""Scheduler settings, wanted lengths and fields of the group -> ends and tokens of its candidates."""


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_ends_as_its_terms_say_whatever_another_one_in_the_batch_does(new_run, name):
    engine, lengths, terms, wanted, num_tokens = GROUPS[name]
    run = new_run(**engine)
    ids = add_group(run, "g", lengths, **terms)
    other = add_group(run, "other", [6, 9], group_size=2, early_stop=False)
    run.run()
    assert [ending(run, id) for id in ids] == wanted
    assert num_tokens in (None, [run.num_tokens(id) for id in ids])
    assert [run.num_tokens(id) for id in other] == [6, 9]
    assert_nothing_left(run)


def abort(run: TracedRun, *request_ids: str) -> None:
    run.scheduler.finish_requests(list(request_ids), RequestStatus.FINISHED_ABORTED)


def run_until_completion(run: TracedRun) -> dict[str, RequestStatus]:
    """Step until a last output comes; returns the status each request had just before."""
    statuses: dict[str, RequestStatus] = {}

    def look() -> None:
        statuses.update({request_id: request.status for request_id, request in run.requests.items()})

    while not any(output.finished for outputs in run.outputs.values() for output in outputs):
        assert run.step(before_update=look)
    return statuses


def test_surplus_candidates_stop_in_the_step_the_group_completes(new_run):
    run = new_run()
    ids = add_group(run, "g", [50, 20, 60, 40, 70], group_size=2)
    run.run()
    assert [ending(run, id) for id in ids] == [LOST, WON, LOST, WON, LOST]
    assert [run.num_tokens(id) for id in ids] == [40, 20, 40, 40, 40]
    assert {run.note(id).end_step for id in ids if id != "g-1"} == {run.note("g-3").end_step}
    assert run.note("g-3").end_step == run.note("g-1").end_step + 1  # of the group, not of the engine
    assert_nothing_left(run)


def test_stopping_wastes_no_token_in_the_synchronous_loop_and_one_in_the_asynchronous(new_run, loop):
    run = new_run()
    ids = add_group(run, "g", [30, 80, 90, 100], group_size=1)
    run.run()
    assert [run.num_dropped(id) for id in ids[1:]] == [loop.depth - 1] * 3


def test_of_candidates_that_tie_the_shortest_wins_before_the_lowest_index(new_run, loop):
    run = new_run()
    add_group(run, "g", [31], group_size=1, num_candidates=2)
    run.step()
    run.add("g-1", 31 - loop.depth, extra_args=CandidateTag("g", 1, GroupTerms(1, 2), 64).to_extra_args())
    run.run()
    assert run.note("g-0").end_step == run.note("g-1").end_step
    assert [ending(run, "g-0"), ending(run, "g-1")] == [LOST, WON]
    assert run.num_tokens("g-0") == 31


def test_waiting_candidates_are_stopped_with_one_empty_last_output(new_run):
    run = new_run(max_num_seqs=3)
    ids = add_group(run, "g", [40, 20, 30, 10, 10, 10], group_size=1)
    statuses = run_until_completion(run)
    assert {id for id in ids if statuses[id] == RequestStatus.WAITING} == set(ids[3:])
    run.run()
    assert [ending(run, id) for id in ids] == [LOST, WON, LOST, LOST, LOST, LOST]
    assert [run.num_tokens(id) for id in ids] == [20, 20, 20, 0, 0, 0]
    assert [len(run.outputs[id]) for id in ids[3:]] == [1, 1, 1]
    assert_nothing_left(run)


def test_the_newest_group_is_preempted_first(new_run):
    run = new_run(num_blocks=30)
    old, new = (add_group(run, name, [200, 200], group_size=2) for name in ("old", "new"))
    run.run()
    assert [run.note(id).num_preemptions for id in old] == [0, 0]
    assert sum(run.note(id).num_preemptions for id in new) > 0


def test_a_candidate_goes_on_after_preemption_where_it_was(new_run):
    run = new_run(num_blocks=30)
    ids = add_group(run, "g", [150, 160, 170, 180], group_size=4)
    run.run()
    told = [run.note(id).num_preemptions for id in ids]
    assert told == [run.requests[id].num_preemptions for id in ids]
    assert sum(told) == run.scheduler.num_preemptions > 0
    assert [ending(run, id) for id in ids] == [WON] * 4
    for id, length in zip(ids, [150, 160, 170, 180], strict=True):
        assert run.tokens(id) == [*run.own_tokens(id, length - 1), EOS_TOKEN]
    assert_nothing_left(run)


def test_a_group_completes_without_a_sibling_its_client_aborted(new_run):
    run = new_run()
    ids = add_group(run, "g", [10, 40, 30, 50], group_size=2)
    for _ in range(5):
        run.step()
    abort(run, "g-0")
    run.run()
    assert [ending(run, id) for id in ids[1:]] == [WON, WON, LOST]
    assert ending(run, "g-0") == ABORTED
    assert run.num_tokens("g-0") == 5
    assert_nothing_left(run)


def test_aborting_the_whole_group_leaves_nothing_after_the_next_step(new_run):
    run = new_run(max_num_seqs=2)
    ids = add_group(run, "g", [100] * 4, group_size=2)
    for _ in range(5):
        run.step()
    abort(run, *ids)
    assert run.step()
    assert run.scheduler._candidates == {}
    run.run()
    assert [ending(run, id) for id in ids] == [ABORTED] * 4
    assert [run.num_tokens(id) for id in ids] == [5, 5, 0, 0]
    assert_nothing_left(run)


def test_candidates_that_are_aborted_by_name_say_so(new_run):
    run = new_run()
    ids = add_group(run, "rollout-a-0", [50] * 2, group_size=2)
    others = add_group(run, "rollout-b-0", [5] * 2, group_size=2)
    run.step()
    assert set(run.scheduler.abort_named(frozenset({"rollout-a"}))) == set(ids)
    run.run()
    assert {run.note(id).error for id in ids} == {types.ABORTED}
    assert {run.note(id).error for id in others} == {None}
    assert_nothing_left(run)


def test_an_abort_while_the_model_runs_is_obeyed_in_that_step(new_run):
    run = new_run()
    ids = add_group(run, "g", [10, 10, 40], group_size=1)
    for _ in range(9):
        run.step()
    run.step(before_update=lambda: abort(run, "g-0"))
    run.run()
    assert ending(run, "g-0") == ABORTED
    assert run.num_tokens("g-0") == 9  # the aborted step's token is dropped, what was held is delivered
    assert [ending(run, id) for id in ids[1:]] == [WON, LOST]
    assert_nothing_left(run)


def test_a_truncated_candidate_does_not_stop_those_that_may_end_by_themselves(new_run):
    run = new_run()
    run.add("g-0", 100, max_tokens=20, extra_args=CandidateTag("g", 0, GroupTerms(1, 3), 64).to_extra_args())
    run.add("g-1", 30, extra_args=CandidateTag("g", 1, GroupTerms(1, 3), 64).to_extra_args())
    run.add("g-2", 40, extra_args=CandidateTag("g", 2, GroupTerms(1, 3), 64).to_extra_args())
    run.run()
    assert ending(run, "g-0") == ("finished", FinishReason.LENGTH, None)
    assert ending(run, "g-1") == WON
    assert ending(run, "g-2") == LOST
    assert run.num_tokens("g-2") == 30
    assert_nothing_left(run)


def test_a_candidate_ended_by_a_stop_token_wins(new_run):
    run = new_run()
    run.scripts["g-1"] = [500, 501, 77]
    ids = add_group(run, "g", [50, 50], group_size=1, stop_token_ids=[77])
    run.run()
    assert ending(run, ids[1]) == ("finished", FinishReason.STOP, 77)
    assert ending(run, ids[0]) == LOST
    assert run.tokens(ids[1]) == [500, 501, 77]


def test_a_candidate_ended_by_an_error_counts_as_failed(new_run):
    run = new_run()
    ids = add_group(run, "g", [10, 30, 40], group_size=1)
    for _ in range(5):
        run.step()
    run.scheduler.finish_requests("g-0", RequestStatus.FINISHED_ERROR)
    run.run()
    assert [ending(run, id) for id in ids[1:]] == [WON, LOST]
    assert run.num_tokens("g-1") == 30
    assert_nothing_left(run)


def fail_grammar(scheduler, request_id: str) -> None:
    """As when the grammar of a waiting request does not compile."""
    if isinstance(scheduler.grammar_compile_error_reqs, dict):  # it says why since 0.33
        from vllm.outputs import RequestError

        scheduler.grammar_compile_error_reqs[request_id] = RequestError("validation_error", "a bad grammar")
    else:
        scheduler.grammar_compile_error_reqs.add(request_id)


def test_an_error_before_the_first_token_is_noted_on_its_output(new_run):
    run = new_run(max_num_seqs=2)
    ids = add_group(run, "g", [30, 40, 10], group_size=1)
    run.step()
    fail_grammar(run.scheduler, "g-2")
    run.run()
    assert [ending(run, id) for id in ids] == [WON, LOST, ("failed", FinishReason.ERROR, None)]
    assert run.num_tokens("g-2") == 0
    assert_nothing_left(run)


@pytest.mark.skipif(
    not hasattr(StructuredOutputManager, "accept_tokens"), reason="before 0.30 each grammar is asked by itself"
)
def test_an_error_while_running_is_noted_on_its_output_with_everything_held(new_run, monkeypatch):
    run = new_run()
    ids = add_group(run, "g", [10, 30], group_size=1)
    bad_token = run.first_token("g-0") + 6
    monkeypatch.setattr(
        run.scheduler.structured_output_manager, "accept_tokens", lambda request, tokens: bad_token not in tokens
    )
    run.run()
    assert [ending(run, id) for id in ids] == [("failed", FinishReason.ERROR, None), WON]
    assert run.tokens("g-0") == run.own_tokens("g-0", 7)
    assert_nothing_left(run)


@pytest.mark.parametrize(
    ("stop", "what", "state"),
    [("cancel_groups", ["g", "unknown"], "deferred"), ("give_up", {"g": [0, 1, 2], "unknown": [0]}, "surplus")],
)
def test_what_is_stopped_from_outside_keeps_all_its_tokens(new_run, stop, what, state):
    run = new_run(max_num_seqs=2)
    ids = add_group(run, "g", [10, 50, 50], 3)
    other = add_group(run, "h", [40], 1)
    for _ in range(20):
        run.step()
    getattr(run.scheduler, stop)(what)
    run.run()
    assert [run.state(id) for id in (*ids, *other)] == ["finished", state, state, "finished"]
    assert (run.last(ids[1]).finish_reason, run.last(ids[1]).stop_reason) == (FinishReason.ABORT, state)
    assert run.tokens(ids[1]) == run.own_tokens(ids[1], run.num_tokens(ids[1]))
    assert 18 <= run.num_tokens(ids[1]) <= 22
    assert_nothing_left(run)


def test_a_group_cancelled_while_it_waits_ends_without_a_token(new_run):
    run = new_run(max_num_seqs=1)
    first = add_group(run, "g", [30], 1)
    waiting = add_group(run, "h", [30, 30], 2)
    run.step()
    run.scheduler.cancel_groups(["h"])
    run.run()
    assert [run.state(id) for id in (*first, *waiting)] == ["finished", "deferred", "deferred"]
    assert [run.num_tokens(id) for id in waiting] == [0, 0]
    assert_nothing_left(run)


def test_a_sibling_that_arrives_after_the_end_is_stopped_at_once(new_run):
    run = new_run()
    add_group(run, "shared", [5, 50], group_size=1, joined=True, num_candidates=3)
    run.run()
    assert len(run.scheduler.group_steps) == 1
    tag = CandidateTag("shared", None, GroupTerms(1, 3), 64)
    run.add("late", 50, extra_args=tag.to_extra_args())
    run.run()
    assert ending(run, "late") == LOST
    assert run.num_tokens("late") <= 1
    assert_nothing_left(run)


def test_a_sibling_that_arrives_while_others_run_is_stopped_with_the_next_step(new_run, loop):
    run = new_run()
    run.add("other", 100)
    add_group(run, "shared", [5], group_size=1, joined=True, num_candidates=2)
    for _ in range(20):
        run.step()
    assert ending(run, "shared-0") == WON
    run.add("late", 50, extra_args=CandidateTag("shared", None, GroupTerms(1, 2), 64).to_extra_args())
    run.step()
    assert ending(run, "late") == LOST
    run.run()
    assert run.num_tokens("other") == 100
    assert_nothing_left(run)


def test_a_group_id_may_be_used_again_when_its_group_is_over(new_run):
    run = new_run()
    add_group(run, "shared", [5, 50], group_size=1, joined=True)
    run.run()
    tag = CandidateTag("shared", None, GroupTerms(1, 2), 64)
    run.add("again-0", 30, extra_args=tag.to_extra_args())
    run.add("again-1", 20, extra_args=tag.to_extra_args())
    run.run()
    assert ending(run, "again-0") == LOST
    assert ending(run, "again-1") == WON
    assert_nothing_left(run)


def test_a_group_with_siblings_still_to_come_is_forgotten_when_they_have_come_and_gone(new_run):
    run = new_run()
    add_group(run, "shared", [5], group_size=2, joined=True, num_candidates=2)
    run.run()
    assert len(run.scheduler.group_steps) == 1
    run.add("second", 5, extra_args=CandidateTag("shared", None, GroupTerms(2, 2), 64).to_extra_args())
    abort(run, "second")
    run.run()
    assert_nothing_left(run)


def delivered(run: TracedRun, request_id: str) -> list[tuple]:
    return [
        (output.new_token_ids, output.finish_reason, output.stop_reason, output.kv_transfer_params)
        for output in run.outputs[request_id]
    ]


def test_untagged_requests_beside_a_group_get_what_stock_vllm_gives(new_run, loop):
    stock = new_run(scheduler_cls=loop.stock_cls)
    mixed = new_run()
    for run in (stock, mixed):
        for index, length in enumerate([15, 33, 80]):
            run.add(f"plain-{index}", length)
        run.add("cut", 80, max_tokens=40)
    add_group(mixed, "g", [20, 60, 70], group_size=1)
    stock.run()
    mixed.run()
    for id in ("plain-0", "plain-1", "plain-2", "cut"):
        assert delivered(mixed, id) == delivered(stock, id)
        assert len(mixed.outputs[id]) == mixed.num_tokens(id)
        assert mixed.num_sampled[id] == stock.num_sampled[id]
    assert mixed.state("g-0") == "finished"
    assert_nothing_left(stock)
    assert_nothing_left(mixed)


def test_without_groups_every_step_is_stock_vllm_s(new_run, loop):
    runs = [new_run(scheduler_cls=cls, num_blocks=22, max_num_seqs=3) for cls in (loop.stock_cls, loop.scheduler_cls)]
    for run in runs:
        for index in range(5):
            run.add(f"plain-{index}", 100 + 10 * index)
        run.add("xargs", 50, extra_args={"top_secret": 1})
        run.run()
    stock, ours = runs
    assert any(request.num_preemptions for request in ours.requests.values())
    assert (ours.num_steps, ours.num_messages) == (stock.num_steps, stock.num_messages)
    assert {id: delivered(ours, id) for id in ours.outputs} == {id: delivered(stock, id) for id in stock.outputs}


def test_a_stopped_candidate_is_answered_to_the_client_that_sent_it(new_run):
    run = new_run(max_num_seqs=3)
    ids = add_group(run, "g", [10, 50, 50, 50, 50], group_size=1)
    for index, id in enumerate(ids):
        run.requests[id].client_index = index % 2
    steps = run.record_steps()
    run.run()
    clients = {
        output.request_id: client
        for step in steps
        for client, answer in step.items()
        for output in answer.outputs
        if output.finished
    }
    assert clients == {id: index % 2 for index, id in enumerate(ids)}


def test_the_set_of_finished_requests_names_the_stopped_ones_in_the_same_step(new_run, loop):
    run = new_run(scheduler_cls=partial(loop.scheduler_cls, include_finished_set=True), max_num_seqs=4)
    ids = add_group(run, "g", [30, 10, 50, 60, 50, 50], group_size=2)
    run.add("plain", 5)
    for index, id in enumerate(ids):
        run.requests[id].client_index = index % 2
    steps = run.record_steps()
    run.run()
    for step in steps:
        for answer in step.values():
            ended = {output.request_id for output in answer.outputs if output.finished}
            assert (answer.finished_requests or set()) == ended
    named = [id for step in steps for answer in step.values() for id in answer.finished_requests or ()]
    assert sorted(named) == sorted([*ids, "plain"])
    assert [run.state(id) for id in ids].count("surplus") == 4
    assert_nothing_left(run)


def test_the_set_of_finished_requests_names_what_a_client_aborted(new_run, loop):
    run = new_run(scheduler_cls=partial(loop.scheduler_cls, include_finished_set=True))
    add_group(run, "g", [30, 30], group_size=1)
    steps = run.record_steps()
    run.step()
    abort(run, "g-0", "g-1")
    run.run()
    named = [id for step in steps for answer in step.values() for id in answer.finished_requests or ()]
    assert sorted(named) == ["g-0", "g-1"]


def test_scheduler_statistics_come_every_step_and_end_at_zero(new_run):
    run = new_run(log_stats=True, max_num_seqs=3)
    ids = add_group(run, "g", [40, 30, 50, 60], group_size=1)
    steps = run.record_steps()
    run.run()
    stats = [[answer.scheduler_stats for answer in step.values() if answer.scheduler_stats] for step in steps]
    assert [len(per_step) for per_step in stats] == [1] * run.num_steps
    assert (stats[10][0].num_running_reqs, stats[10][0].num_waiting_reqs) == (3, 1)
    assert (stats[-1][0].num_running_reqs, stats[-1][0].num_waiting_reqs) == (0, 0)
    assert stats[-1][0].kv_cache_usage == 0
    assert [ending(run, id) for id in ids] == [LOST, WON, LOST, LOST]


def test_vllms_times_of_a_candidate_that_never_ran_are_not_negative(new_run):
    run = new_run(log_stats=True, max_num_seqs=3)
    ids = add_group(run, "g", [40, 20, 30, 10, 10, 10], group_size=1)
    steps = run.record_steps()
    run.run()
    for id in ids:
        told = [
            (step, each) for its in steps for step in its.values() for each in step.outputs if each.request_id == id
        ]
        events = [event for _, output in told for event in output.events or ()]
        assert [event.type.name for event in events[:2]] == ["QUEUED", "SCHEDULED"]
        times = [*(event.timestamp for event in events[:2]), *(step.timestamp for step, _ in told)]
        assert times == sorted(times)


def test_the_stats_of_the_step_that_stops_losers_do_not_count_them(new_run):
    run = new_run(log_stats=True)
    add_group(run, "g", [10, 40, 40], group_size=1)
    seen = []
    update = run.scheduler.update_from_output

    def watch(*args):
        outputs = update(*args)
        seen.extend(step.scheduler_stats.num_running_reqs for step in outputs.values() if step.scheduler_stats)
        return outputs

    run.scheduler.update_from_output = watch
    run.run()
    # Three run until the first has ended; there is no step that reports the two it takes with it.
    assert set(seen) == {3, 0}


def test_a_client_that_leaves_while_patience_runs_leaves_nothing_behind(new_run):
    run = new_run()
    ids = add_group(run, "g", [10, 20, 80, 80], group_size=2, early_stop=False, patience=3)
    while run.num_sampled.get("g-2", 0) < 25:
        run.step()
    abort(run, *ids[2:])
    run.run()
    assert [run.state(id) for id in ids] == ["finished", "finished", "failed", "failed"]
    add_group(run, "h", [5, 6], group_size=1)
    run.run()
    assert run.scheduler.group_steps._capped == {}
    assert_nothing_left(run)
