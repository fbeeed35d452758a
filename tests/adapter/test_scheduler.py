"""Verdicts in vLLM's own scheduler: who stops, when, and that nothing is left behind."""

from functools import partial

import pytest
from scheduler_runs import ABORTED, CUT, LOST, WON, TracedRun, add_group, assert_nothing_left, prune_by_sign
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_rollout.adapter.wire import CandidateTag
from vllm_rollout.group.plans.pruning_plan import PruningPlan
from vllm_rollout.group.plans.terms import GroupTerms

PATIENT = {"group_size": 2, "early_stop": False, "patience": 1.5}
GROUPS = {
    "a tie in one step": ({}, [25, 25, 25, 25, 25, 26], {"group_size": 3}, [WON] * 3 + [LOST] * 3, [25] * 6),
    "a freed place": ({"max_num_seqs": 2}, [10, 60, 15, 70], {"group_size": 2}, [WON, LOST, WON, LOST], None),
    "no redundancy": ({}, [10, 30, 20], {"group_size": 3}, [WON] * 3, [10, 30, 20]),
    "no early stop": ({}, [10, 30, 20], {"group_size": 1, "early_stop": False}, [WON] * 3, [10, 30, 20]),
    "losers stop with the second": (
        *({}, [50, 20, 60, 40, 70], {"group_size": 2}),
        *([LOST, WON, LOST, WON, LOST], [40, 20, 40, 40, 40]),
    ),
    "losers that wait say nothing": (
        *({"max_num_seqs": 3}, [40, 20, 30, 10, 10, 10], {"group_size": 1}),
        *([LOST, WON, LOST, LOST, LOST, LOST], [20, 20, 20, 0, 0, 0]),
    ),
    "nobody left": ({}, [100] * 3, {"group_size": 1, "max_tokens": 20}, [CUT, LOST, LOST], [20] * 3),
    "joined": ({}, [30, 20, 40], {"group_size": 1, "joined": True}, [LOST, WON, LOST], [20] * 3),
    "patience": ({}, [10, 20, 30, 31, 90], PATIENT, [WON] * 3 + [LOST] * 2, [10, 20, 30, 30, 30]),
    # The last two wait for a place: they get as many tokens as their siblings all the same.
    "patience counts tokens, not steps": (
        *({"max_num_seqs": 3}, [10, 20, 80, 25, 80], PATIENT),
        *([WON, WON, LOST, WON, LOST], [10, 20, 30, 25, 30]),
    ),
}
"""What the engine is like, how long candidates want to be, what the group says -> how they end, and their tokens."""


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_ends_as_its_terms_say_whatever_another_one_in_the_batch_does(new_run, name):
    engine, lengths, terms, wanted, num_tokens = GROUPS[name]
    run = new_run(**engine)
    ids = add_group(run, "g", lengths, **terms)
    other = add_group(run, "other", [6, 9], group_size=2, early_stop=False)
    run.run()
    assert run.ends(ids) == wanted
    assert num_tokens in (None, [run.num_tokens(id) for id in ids])
    assert [run.num_tokens(id) for id in other] == [6, 9]
    assert_nothing_left(run)


def test_a_viewer_is_told_the_last_tokens_of_what_has_not_ended(new_run):
    run = new_run(max_num_seqs=3, max_model_len=2048)
    add_group(run, "g", [700, 5, 700, 700], group_size=2)
    add_group(run, "other", [9], group_size=1)
    while len((told := run.scheduler.last_tokens("g"))[0].token_ids) + told[0].offset < 600:
        assert run.step()
    assert [each.index for each in told] == [0, 2, 3]
    for each in told:
        said = list(run.requests[f"g-{each.index}"].output_token_ids)
        assert each.token_ids == said[each.offset :]
        assert len(each.token_ids) == min(512, len(said))
    assert run.scheduler.last_tokens("unknown") == []
    run.run()
    assert run.scheduler.last_tokens("g") == []


def test_of_candidates_that_tie_the_shortest_wins_before_the_lowest_index(new_run, loop):
    run = new_run()
    add_group(run, "g", [31], group_size=1, num_candidates=2)
    run.step()
    run.add("g-1", 31 - loop.depth, extra_args=CandidateTag("g", 1, GroupTerms(1, 2), 64).to_extra_args())
    run.run()
    assert run.note("g-0").end_step == run.note("g-1").end_step
    assert [run.end("g-0"), run.end("g-1")] == [LOST, WON]
    assert run.num_tokens("g-0") == 31


def test_aborting_the_whole_group_leaves_nothing_after_the_next_step(new_run):
    run = new_run(max_num_seqs=2)
    ids = add_group(run, "g", [100] * 4, group_size=2)
    for _ in range(5):
        run.step()
    run.abort(*ids)
    assert run.step()
    assert run.scheduler._candidates == {}
    run.run()
    assert run.ends(ids) == [ABORTED] * 4
    assert [run.num_tokens(id) for id in ids] == [5, 5, 0, 0]
    assert_nothing_left(run)


def test_an_abort_while_the_model_runs_is_obeyed_in_that_step(new_run):
    run = new_run()
    ids = add_group(run, "g", [10, 10, 40], group_size=1)
    for _ in range(9):
        run.step()
    run.step(before_update=lambda: run.abort("g-0"))
    run.run()
    assert run.end("g-0") == ABORTED
    assert run.num_tokens("g-0") == 9  # the aborted step's token is dropped, what was held is delivered
    assert run.ends(ids[1:]) == [WON, LOST]
    assert_nothing_left(run)


def test_a_candidate_ended_by_a_stop_token_wins(new_run):
    run = new_run()
    run.scripts["g-1"] = [500, 501, 77]
    ids = add_group(run, "g", [50, 50], group_size=1, stop_token_ids=[77])
    run.run()
    assert run.end(ids[1]) == ("finished", FinishReason.STOP, 77)
    assert run.end(ids[0]) == LOST
    assert run.tokens(ids[1]) == [500, 501, 77]


def test_a_candidate_ended_by_an_error_counts_as_failed(new_run):
    run = new_run()
    ids = add_group(run, "g", [10, 30, 40], group_size=1)
    for _ in range(5):
        run.step()
    run.scheduler.finish_requests("g-0", RequestStatus.FINISHED_ERROR)
    run.run()
    assert run.ends(ids[1:]) == [WON, LOST]
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
    assert run.ends(ids) == [WON, LOST, ("failed", FinishReason.ERROR, None)]
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
    assert run.ends(ids) == [("failed", FinishReason.ERROR, None), WON]
    assert run.tokens("g-0") == run.own_tokens("g-0", 7)
    assert_nothing_left(run)


@pytest.mark.parametrize(
    ("stop", "what", "state"),
    [("cancel_groups", ["g", "unknown"], "deferred"), ("give_up", {"g": [0, 1, 2, 3], "unknown": [0]}, "surplus")],
)
def test_what_is_stopped_from_outside_keeps_all_its_tokens(new_run, stop, what, state):
    run = new_run(max_num_seqs=2)
    ids = add_group(run, "g", [10, 50, 50, 50], 4)
    other = add_group(run, "h", [40], 1)
    for _ in range(20):
        run.step()
    getattr(run.scheduler, stop)(what)
    run.run()
    assert [run.state(id) for id in (*ids, *other)] == ["finished", state, state, state, "finished"]
    assert (run.last(ids[1]).finish_reason, run.last(ids[1]).stop_reason) == (FinishReason.ABORT, state)
    assert run.tokens(ids[1]) == run.own_tokens(ids[1], run.num_tokens(ids[1]))
    assert 18 <= run.num_tokens(ids[1]) <= 22
    assert run.num_tokens(ids[3]) == 0, "it waited"
    assert_nothing_left(run)


def test_a_sibling_that_arrives_while_others_run_is_stopped_with_the_next_step(new_run, loop):
    run = new_run()
    run.add("other", 100)
    add_group(run, "shared", [5], group_size=1, joined=True, num_candidates=2)
    for _ in range(20):
        run.step()
    assert run.end("shared-0") == WON
    run.add("late", 50, extra_args=CandidateTag("shared", None, GroupTerms(1, 2), 64).to_extra_args())
    run.step()
    assert run.end("late") == LOST
    run.run()
    assert run.num_tokens("other") == 100
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
    prune_by_sign(mixed, 10)
    plan = PruningPlan(detection_length=10, allow_fewer=True)
    add_group(mixed, "pruned", [60, 60, 60], group_size=2, pruning=plan, logits=[-1, 1, -1])
    stock.run()
    mixed.run()
    for id in ("plain-0", "plain-1", "plain-2", "cut"):
        assert delivered(mixed, id) == delivered(stock, id)
        assert len(mixed.outputs[id]) == mixed.num_tokens(id)
        assert mixed.num_sampled[id] == stock.num_sampled[id]
    assert (mixed.state("g-0"), mixed.state("pruned-0")) == ("finished", "pruned")
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
    aborted = add_group(run, "aborted", [60, 60], group_size=1)
    for index, id in enumerate(ids):
        run.requests[id].client_index = index % 2
    steps = run.record_steps()
    run.step()
    run.abort(*aborted)
    run.run()
    for step in steps:
        for answer in step.values():
            ended = {output.request_id for output in answer.outputs if output.finished}
            assert (answer.finished_requests or set()) == ended
    named = [id for step in steps for answer in step.values() for id in answer.finished_requests or ()]
    assert sorted(named) == sorted([*ids, "plain", *aborted])
    assert [run.state(id) for id in ids].count("surplus") == 4
    assert_nothing_left(run)


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
    assert run.ends(ids) == [LOST, WON, LOST, LOST]


def test_a_client_that_leaves_while_patience_runs_leaves_nothing_behind(new_run):
    run = new_run()
    ids = add_group(run, "g", [10, 20, 80, 80], group_size=2, early_stop=False, patience=3)
    while run.num_sampled.get("g-2", 0) < 25:
        run.step()
    run.abort(*ids[2:])
    run.run()
    assert [run.state(id) for id in ids] == ["finished", "finished", "failed", "failed"]
    add_group(run, "h", [5, 6], group_size=1)
    run.run()
    assert_nothing_left(run)
