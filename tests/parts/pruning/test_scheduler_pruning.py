"""Prune verdicts in vLLM's own scheduler: who stops, in which step, and what is told about it."""

import random
from dataclasses import replace
from functools import partial

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from tests.kernel.core.scheduler_runs import TracedRun
from tests.parts.pruning.scored_runs import add_group, assert_nothing_left, prune_by_sign
from tests.parts.pruning.steps import group_terms, judge_of, said, scores
from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.rules.rewards import Reward
from vllm_rollout.kernel.wire import CandidateTag
from vllm_rollout.parts.pruning.rules.assessment import Assessment, Confidence
from vllm_rollout.parts.pruning.rules.learning import Learning
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.pruning_plan import WHOLE, HeadKey, Observation, PruningPlan

PLAN = PruningPlan(detection_length=10, allow_fewer=True)
SHADOW = replace(PLAN, mode="shadow")

WON = ("finished", FinishReason.STOP, None)
CUT = ("finished", FinishReason.LENGTH, None)
LOST = ("surplus", FinishReason.ABORT, "surplus")
PRUNED = ("pruned", FinishReason.ABORT, "pruned")
ABORTED = ("failed", FinishReason.ABORT, None)


def ending(run: TracedRun, request_id: str) -> tuple[str, FinishReason, int | str | None]:
    last = run.last(request_id)
    return run.state(request_id), last.finish_reason, last.stop_reason


def endings(run: TracedRun, request_ids: list[str]) -> list[tuple]:
    return [ending(run, request_id) for request_id in request_ids]


def abort(run: TracedRun, *request_ids: str) -> None:
    run.scheduler.finish_requests(list(request_ids), RequestStatus.FINISHED_ABORTED)


def reward(run: TracedRun, prompt_id: str, *indices: int) -> list[str]:
    return judge_of(run.scheduler).reward("rollout", [(prompt_id, index, 1.0, True) for index in indices])[1]


@pytest.fixture
def pruning_run(new_run):
    """Makes a run in which a negative logit at token 10 means pruned."""

    def make(*args, **kwargs) -> TracedRun:
        run = new_run(*args, **kwargs)
        prune_by_sign(run, 10)
        return run

    return make


def test_pruned_candidates_stop_in_the_step_in_which_they_are_scored(pruning_run, loop):
    run = pruning_run()
    ids = add_group(run, "g", [50, 40, 60, 45], 4, pruning=PLAN, logits=[1, -1, 2, -2])
    run.run()
    assert endings(run, ids) == [WON, PRUNED, WON, PRUNED]
    assert [run.num_tokens(id) for id in ids] == [50, 10, 60, 10]
    assert [run.tokens(id) == run.own_tokens(id, 10) for id in (ids[1], ids[3])] == [True, True]
    assert [run.num_dropped(id) for id in (ids[1], ids[3])] == [loop.depth - 1] * 2
    assert {run.note(id).end_step for id in (ids[1], ids[3])} == {run.note("g-1").end_step}
    assert run.note("g-0").end_step == run.note("g-1").end_step + 1
    assert reward(run, "g", 0, 1, 2, 3) == ["accepted", "unfinished", "accepted", "unfinished"]
    assert_nothing_left(run)


def test_a_last_output_says_why_its_candidate_was_kept_or_not(pruning_run):
    run = pruning_run()
    ids = add_group(run, "g", [50, 40, 5], 3, pruning=PLAN, logits=[1.5, -2.5, 1])
    run.run()
    kept, pruned = (scores(run.note(id)).assessment for id in ids[:2])
    assert kept == Assessment("head", 1.5, 0.5, 0.75, True, 1, Confidence(1.5, 1.5, 1.5))
    assert pruned == Assessment("head", -2.5, 0.5, 0.75, False, 1, Confidence(-2.5, -2.5, -2.5))
    assert scores(run.note(ids[2])).assessment is None
    assert reward(run, "g", 2) == ["unscored"]


FULL, LENGTHS, LOGITS = replace(PLAN, allow_fewer=False), [50, 40, 60, 45], [-3, -1, -2, -4]
GROUPS = {
    "the best stay as far as one is needed": (LENGTHS, 3, PLAN, LOGITS, {}, [PRUNED, WON, PRUNED, PRUNED], 4),
    "the best stay as far as all are needed": (LENGTHS, 3, FULL, LOGITS, {}, [WON, WON, WON, PRUNED], 4),
    "complete in the step of its scores": ([10, 50, 50], 1, PLAN, [-1, -1, 1], {}, [WON, LOST, LOST], 0),
    "race and pruning in one step": (
        *([10, 50, 50, 60, 70], 2, PLAN, [0, -1, 1, -1, 1], {}),
        *([WON, PRUNED, WON, PRUNED, LOST], 4),
    ),
    "cut in the due step": ([50, 50], 2, PLAN, [-1, 1], {"max_tokens": 10}, [CUT, CUT], 0),
    "over by itself in the due step": ([10, 50], 2, PLAN, [-1, 1], {}, [WON, WON], 1),
}
"""Lengths, size, plan, logits and sampling of a group -> how its candidates end, and how many were judged."""


@pytest.mark.parametrize("name", GROUPS)
def test_who_is_pruned_and_who_is_judged(pruning_run, name):
    lengths, group_size, plan, logits, sampling, wanted, num_judged = GROUPS[name]
    run = pruning_run()
    ids = add_group(run, "g", lengths, group_size, pruning=plan, logits=logits, **sampling)
    run.run()
    assert endings(run, ids) == wanted
    assert {run.num_tokens(id) for id, end in zip(ids, wanted, strict=True) if end in (PRUNED, CUT)} <= {10}
    assert sum(scores(run.note(id)).assessment is not None for id in ids) == num_judged
    assert_nothing_left(run)


def test_waiting_candidates_take_the_places_of_pruned_ones(pruning_run):
    run = pruning_run(max_num_seqs=2)
    ids = add_group(run, "g", [90, 80, 30, 20], 4, pruning=PLAN, logits=[-1, -1, 1, -1])
    statuses: dict[str, RequestStatus] = {}

    def look() -> None:
        if "g-0" not in run.outputs or not run.outputs["g-0"][-1].finished:
            statuses.update({id: request.status for id, request in run.requests.items()})

    while run.step(before_update=look):
        pass
    assert [statuses[id] for id in ids[2:]] == [RequestStatus.WAITING] * 2
    assert endings(run, ids) == [PRUNED, PRUNED, WON, PRUNED]
    assert [run.num_tokens(id) for id in ids] == [10, 10, 30, 10]
    assert_nothing_left(run)


def test_a_preempted_candidate_is_judged_when_it_gets_there(pruning_run):
    plan = replace(PLAN, detection_length=100)
    run = pruning_run(num_blocks=25)
    prune_by_sign(run, 100)
    ids = add_group(run, "g", [150, 160, 170, 180], 4, pruning=plan, logits=[1, 1, -1, -1])
    run.run()
    assert any(run.requests[id].num_preemptions for id in ids[2:])
    assert endings(run, ids) == [WON, WON, PRUNED, PRUNED]
    assert [run.num_tokens(id) for id in ids] == [150, 160, 100, 100]
    assert_nothing_left(run)


def test_pruning_that_makes_cut_candidates_count_completes_the_group_in_that_step(pruning_run):
    run = pruning_run()
    for index in range(4):
        tag = CandidateTag("g", index, group_terms(1, 4, pruning=PLAN), 64, said(Scoring("rollout", "g", 7)))
        sampling = {"max_tokens": 10} if index < 2 else {}
        run.add(f"g-{index}", 90, extra_args=tag.to_extra_args(), **sampling)
    run.logits.update({"g-2": -1, "g-3": -1})
    judge_of(run.scheduler).memory.learnings[10].assess = partial(_prune_all, run)
    run.run()
    assert endings(run, ["g-0", "g-1", "g-2", "g-3"]) == [CUT, LOST, PRUNED, PRUNED]
    assert [run.num_tokens(f"g-{i}") for i in range(4)] == [10] * 4
    assert_nothing_left(run)


def _prune_all(run, plan, observations, siblings):
    assert (siblings.at_least, siblings.num_to_come) == (0, 0)  # two have finished
    return {i: Assessment("head", seen.logit, 0.5, 0.5, False, 1, seen.confidence) for i, seen in observations.items()}


def test_a_candidate_its_client_aborts_while_it_is_scored_is_failed(pruning_run):
    run = pruning_run()
    ids = add_group(run, "g", [50, 50, 50], 3, pruning=PLAN, logits=[-1, -1, 1])
    for _ in range(9):
        run.step()
    run.step(before_update=lambda: abort(run, "g-0"))
    run.run()
    assert endings(run, ids) == [ABORTED, PRUNED, WON]
    assert [run.num_tokens(id) for id in ids] == [9, 10, 50]
    assert scores(run.note("g-0")).assessment is None
    assert_nothing_left(run)


def test_aborting_pruned_candidates_afterwards_changes_nothing(pruning_run):
    run = pruning_run()
    ids = add_group(run, "g", [50, 50], 2, pruning=PLAN, logits=[-1, 1])
    for _ in range(12):
        run.step()
    abort(run, "g-0")
    run.run()
    assert endings(run, ids) == [PRUNED, WON]
    assert_nothing_left(run)


def test_a_candidate_that_is_scored_twice_is_judged_once(pruning_run):
    """After a reset of running requests the engine drops the token in flight and samples it again."""
    run = pruning_run()
    ids = add_group(run, "g", [50, 50], 2, pruning=PLAN, logits=[1, 2])
    for _ in range(10):
        run.step()
    run.logits.update({"g-0": -9, "g-1": -9})
    run._scored_lengths.update(dict.fromkeys(ids, (11,)))
    run.run()
    assert endings(run, ids) == [WON, WON]
    assert [scores(run.note(id)).assessment.score for id in ids] == [1, 2]


def delivered(run: TracedRun, request_id: str) -> list[tuple]:
    return [(output.new_token_ids, output.finish_reason, output.stop_reason) for output in run.outputs[request_id]]


def test_shadow_mode_changes_no_output_but_says_what_it_would_have_done(pruning_run):
    plain, shadow = pruning_run(num_blocks=40, max_num_seqs=4), pruning_run(num_blocks=40, max_num_seqs=4)
    lengths = [150, 160, 90, 30, 170, 20]
    ids = add_group(plain, "g", lengths, 4)
    add_group(shadow, "g", lengths, 4, pruning=SHADOW, logits=[-1, -1, 1, 1, -1, -1])
    plain.run()
    shadow.run()
    assert plain.num_steps == shadow.num_steps
    assert {id: delivered(shadow, id) for id in ids} == {id: delivered(plain, id) for id in ids}
    assert [shadow.state(id) for id in ids] == [plain.state(id) for id in ids]
    assert [scores(shadow.note(id)).assessment.keep for id in ids[:4]] == [False, False, True, True]


@pytest.mark.parametrize("group_size", [4, 2])
def test_keeping_everybody_gives_what_no_pruning_gives(new_run, group_size):
    plain, kept = new_run(), new_run()
    teach(kept)
    lengths, plan = [30, 20, 40, 25], replace(PLAN, keep_ratio=1.0, min_labels=8)
    ids = add_group(plain, "g", lengths, group_size)
    add_group(kept, "g", lengths, group_size, pruning=plan, logits=[-5] * 4)
    plain.run()
    kept.run()
    assert plain.num_steps == kept.num_steps
    for id in ids:
        assert delivered(kept, id) == delivered(plain, id)
        assert ending(kept, id) == ending(plain, id)
        assert not scores(kept.note(id)).assessment.cold


def test_untagged_requests_beside_pruning_get_what_stock_vllm_gives(pruning_run, new_run, loop):
    stock, mixed = new_run(scheduler_cls=loop.stock_cls), pruning_run()
    for run in (stock, mixed):
        run.add("plain-0", 15)
        run.add("plain-1", 70)
    add_group(mixed, "g", [60, 60, 60], 2, pruning=PLAN, logits=[-1, 1, -1])
    stock.run()
    mixed.run()
    for id in ("plain-0", "plain-1"):
        assert delivered(mixed, id) == delivered(stock, id)
        assert all(output.kv_transfer_params is None for output in mixed.outputs[id])
        assert mixed.num_sampled[id] == stock.num_sampled[id]
    assert mixed.state("g-0") == "pruned"


def test_a_group_without_pruning_beside_one_with_it_is_not_judged(pruning_run):
    run = pruning_run()
    pruned = add_group(run, "a", [50, 50], 1, pruning=PLAN, logits=[-1, 1])
    plain = add_group(run, "b", [50, 60], 1, logits=[-1, -1])
    run.run()
    assert endings(run, [*pruned, *plain]) == [PRUNED, WON, WON, LOST]
    assert scores(run.note("b-0")).assessment is None


def test_a_request_that_joins_with_another_plan_is_refused(pruning_run):
    run = pruning_run()
    prune_by_sign(run, 10)
    for number, plan in enumerate([PLAN, PLAN, replace(PLAN, detection_length=12), SHADOW, None]):
        scoring = plan and Scoring("g", "g", number)
        tag = CandidateTag("g", None, group_terms(1, 2, pruning=plan), 64, said(scoring))
        run.add(f"g-{number}", 30, extra_args=tag.to_extra_args())
    run.logits.update({"g-0": -1, "g-1": 1})
    run.run()
    assert endings(run, ["g-0", "g-1"]) == [PRUNED, WON]
    refusals = [run.note(f"g-{number}").refusal for number in (2, 3, 4)]
    assert [run.num_tokens(f"g-{number}") for number in (2, 3, 4)] == [0, 0, 0]
    assert [refusal.partition(". ")[0] for refusal in refusals] == [
        "pruning.detection_length of this group is 10, as its first candidate said, got 12",
        "pruning.mode of this group is 'active', as its first candidate said, got 'shadow'",
        "pruning.detection_length of this group is 10, as its first candidate said, got None",
    ]
    assert_nothing_left(run)


def test_a_group_with_nothing_new_is_not_settled_in_every_step(pruning_run, monkeypatch):
    run = pruning_run()
    settled = []
    settle = Group.settle
    monkeypatch.setattr(Group, "settle", lambda group, *_: settled.append(run.num_steps) or settle(group))
    add_group(run, "g", [60, 70], 2, pruning=PLAN, logits=[1, 1])
    run.run()
    assert len(settled) == 3  # scores, and two endings


def test_scheduler_statistics_and_finished_sets_know_the_pruned_in_that_step(pruning_run, loop):
    run = pruning_run(scheduler_cls=partial(loop.scheduler_cls, include_finished_set=True), log_stats=True)
    ids = add_group(run, "g", [50] * 4, 4, pruning=PLAN, logits=[-1, 1, -1, -1])
    steps = run.record_steps()
    run.run()
    for step in steps:
        for answer in step.values():
            assert (answer.finished_requests or set()) == {o.request_id for o in answer.outputs if o.finished}
    running = [answer.scheduler_stats.num_running_reqs for step in steps for answer in step.values()]
    assert running[8] == 4
    assert running[9] == 1
    assert endings(run, ids) == [PRUNED, WON, PRUNED, PRUNED]


def teach(run: TracedRun) -> None:
    """Warm up the real rule: a higher logit is a better chance."""
    learning, rng = Learning(10), random.Random(3)
    for i in range(60):
        seen = Observation(Confidence(1.0, 1.0, rng.random()), rng.gauss(1 if i % 2 else -1, 1), 1)
        kept = Assessment("head", seen.logit, None, 1.0, True, 1, seen.confidence, cold=True)
        learning.reward(seen, kept, 20, bool(i % 2), str(i), False)
        learning.calibrators["head"].observe(seen.logit)
    judge_of(run.scheduler).memory.learnings[10] = learning


def test_the_order_in_which_groups_and_siblings_arrive_does_not_change_verdicts(new_run):
    rng = random.Random(5)
    logits = {f"g{group}-{index}": rng.gauss(0, 2) for group in range(12) for index in range(2)}
    assessments = []
    for order in range(3):
        run = new_run()
        teach(run)
        run.logits.update(logits)
        ids = list(logits)
        random.Random(order).shuffle(ids)
        for id in ids:
            group, index = id.split("-")
            terms = group_terms(1, 2, pruning=replace(PLAN, min_labels=8))
            tag = CandidateTag(group, int(index), terms, 64, said(Scoring("r", group, 7)))
            run.add(id, 20, extra_args=tag.to_extra_args())
        for _ in range(11):
            run.step()
        assert {run.state(id) for id in logits if id in run.outputs and run.outputs[id][-1].finished} == {"pruned"}
        run.run()
        assessments.append({id: scores(run.note(id)).assessment for id in logits})
    assert assessments[0] == assessments[1] == assessments[2]
    assert len({assessment.keep for assessment in assessments[0].values()}) == 2


def test_what_a_candidate_teaches_is_its_adapters_whatever_its_tag_says(new_run):
    """The scheduler takes the name from the request's adapter, for which vLLM answers."""
    run = new_run()
    prune_by_sign(run, 10)
    liar = Scoring("lie", "lie", 7, adapter="b")
    for group_id, lora in (("base", None), ("a", LoRARequest("a", 1, "/a")), ("lie", LoRARequest("a", 1, "/a"))):
        scoring = liar if group_id == "lie" else Scoring(group_id, group_id, 7)
        tag = CandidateTag(group_id, 0, group_terms(1, 1, pruning=PLAN), 64, said(scoring))
        run.logits[group_id] = -1.0
        run.add(group_id, 30, extra_args=tag.to_extra_args(), lora_request=lora)
    run.run()
    assert not scores(run.note("base")).assessment.cold
    judge = judge_of(run.scheduler)
    for group_id in ("a", "lie"):
        assert scores(run.note(group_id)).assessment.cold, "what the base model learned does not judge an adapter"
        _, statuses, (label,) = judge.reward(group_id, [Reward(group_id, 0, 1.0, True)])
        assert (statuses, label.key) == (["accepted"], HeadKey(10, "a"))
    assert list(judge.memories.all()) == ["", "a"]
    assert judge.known("a").learnings[10].calibrators["head"].num_positive == 2


def test_requests_that_join_a_group_teach_the_adapter_that_they_have(new_run):
    run = new_run()
    extra_args = {"rollout_group_id": "g", "rollout_group_size": 1, "rollout_detection_length": 10}
    extra_args["rollout_pruning_mode"] = "shadow"
    run.scheduler._joining._scoring_refusal = lambda: None
    for number, lora in enumerate((None, LoRARequest("a", 1, "/a"), LoRARequest("b", 2, "/b"))):
        run.add(f"r{number}", 30, extra_args=extra_args, lora_request=lora)
    run.run()
    judge = judge_of(run.scheduler)
    entries = [entry for rollout in judge.ledger._rollouts.values() for entry in rollout.values()]
    assert [entry.adapter for entry in entries] == ["", "a", "b"]
    assert [list(memory.learnings) for memory in judge.all().values()] == [[10]] * 3


def test_who_finished_has_a_final_score_with_its_last_token_and_nobody_else(pruning_run):
    run = pruning_run()
    plan = replace(PLAN, final_score=True)
    ids = add_group(run, "g", [50, 40, 6, 90, 90], 3, pruning=plan, logits=[1, -1, 2, 3, 4])
    run.run()
    assert endings(run, ids) == [WON, PRUNED, WON, WON, LOST]
    finals = [scores(run.note(id)).final for id in ids]
    assert [final and final.score for final in finals] == [2, None, 4, 6, None]
    assert scores(run.note(ids[2])).assessment is None, "it ended before its detection length"
    assert reward(run, "g", 0, 2, 3) == ["accepted"] * 3
    assert len(judge_of(run.scheduler).known("").learnings[WHOLE].outcomes()) == 3
    assert_nothing_left(run)


def test_an_aborted_candidate_has_no_final_score(new_run):
    run = new_run()
    ids = add_group(run, "g", [50, 40], 2, pruning=replace(SHADOW, final_score=True))
    for _ in range(20):
        run.step()
    abort(run, ids[0])
    run.run()
    assert [scores(run.note(id)).final is None for id in ids] == [True, False]


def test_several_lengths_stop_nobody_and_each_is_learned(new_run):
    run = new_run()
    plan = replace(SHADOW, trial_lengths=(15, 30))
    ids = add_group(run, "g", [50, 20, 40], 3, pruning=plan, logits=[1, -1, 2])
    run.run()
    assert endings(run, ids) == [WON] * 3
    assert reward(run, "g", 0, 1, 2) == ["accepted"] * 3
    learnings = judge_of(run.scheduler).known("").learnings
    assert {length: len(learning.outcomes()) for length, learning in learnings.items()} == {10: 3, 15: 3, 30: 2}
    tried = judge_of(run.scheduler).known("").tried
    assert sorted(candidate.num_tokens for candidate in tried) == [20, 40, 50]
    assert_nothing_left(run)
