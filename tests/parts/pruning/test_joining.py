"""Requests with fields of pruning that reach the engine core themselves, as from a trainer's own process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from vllm.v1.engine import FinishReason

from tests.kernel.core.scheduler_runs import TracedRun
from tests.kernel.core.test_joining import JOIN, add, ends
from tests.parts.pruning.scored_runs import assert_nothing_left, prune_by_sign
from tests.parts.pruning.steps import judge_of
from vllm_rollout.kernel.rules.rewards import NamedReward, Reward, request_name

PRUNE = {**JOIN, "rollout_detection_length": 4}


def test_it_is_pruned_where_the_worker_scores(new_run: Callable[..., TracedRun]) -> None:
    run = new_run()
    run.scheduler.vllm_config.parallel_config.worker_cls = "vllm_rollout.Worker"
    prune_by_sign(run, 4)
    for id, logit in {"r0": 1.0, "r1": -1.0, "r2": 1.0, "r3": -1.0}.items():
        run.logits[id] = logit
    ids = add(run, [20, 60, 30, 60], {**PRUNE, "rollout_early_stop": False})
    run.run()
    assert ends(run, *ids) == [("stop", None), ("abort", "pruned"), ("stop", None), ("abort", "pruned")]


def test_an_audit_group_stops_only_whom_it_has_no_place_for(new_run: Callable[..., TracedRun]) -> None:
    run = new_run()
    run.scheduler.vllm_config.parallel_config.worker_cls = "vllm_rollout.Worker"
    prune_by_sign(run, 4)
    for id in ("r0", "r1", "r2", "r3"):
        run.logits[id] = -1.0
    ids = add(run, [60, 20, 9, 9], {**PRUNE, "rollout_audit_ratio": 1})
    run.run()
    assert ends(run, *ids) == [("stop", None), ("stop", None), ("abort", "surplus"), ("abort", "surplus")]
    assert [run.num_tokens(id) for id in ids[:2]] == [60, 20], "neither pruned nor raced"
    assert max(run.num_tokens(id) for id in ids[2:]) <= run._depth
    assert_nothing_left(run)


@pytest.mark.parametrize("client", ["", "digest-of-a-key"])
def test_anybody_may_reward_a_request_whose_client_nobody_knows(new_run: Callable[..., TracedRun], client: str) -> None:
    run = new_run()
    run.scheduler.vllm_config.parallel_config.worker_cls = "vllm_rollout.Worker"
    prune_by_sign(run, 4)
    id = "cmpl-mine-3"  # vLLM's Python endpoint would mean the fourth prompt of an answer `cmpl-mine`
    run.add(id, 9, extra_args=PRUNE)
    run.run()
    ledger, reward = judge_of(run.scheduler).ledger, Reward("", 0, 1.0, positive=True)
    assert ledger.find(NamedReward("request", request_name(client, id), reward)) is not None
    assert ledger.find(NamedReward("request", request_name(client, "another"), reward)) is None


def test_a_sibling_that_asks_for_another_share_of_audits_is_told(new_run: Callable[..., TracedRun]) -> None:
    run = new_run()
    run.scheduler.vllm_config.parallel_config.worker_cls = "vllm_rollout.Worker"
    add(run, [9], PRUNE)
    (other,) = add(run, [9], {**PRUNE, "rollout_audit_ratio": 0.5}, "other")
    run.run()
    assert run.last(other).finish_reason == FinishReason.ERROR
    assert run.last(other).stop_reason.startswith("rollout_audit_ratio of this group is 0.0, as its first candidate")


def test_choices_of_a_request_are_named_as_its_client_names_them(new_run: Callable[..., TracedRun]) -> None:
    run = new_run()
    run.scheduler.vllm_config.parallel_config.worker_cls = "vllm_rollout.Worker"
    prune_by_sign(run, 4)
    fields = {**PRUNE, "rollout_pruning_mode": "shadow", "rollout_group_size": 4, "rollout_namespace": "run-7"}
    for id in ("0_step-12345678", "1_step-12345678", "2_step-12345678", "3_0_a-12345678"):
        run.add(id, 9, extra_args=dict(fields))
    run.run()
    ledger = judge_of(run.scheduler).ledger

    def named(id: str, choice: int = 0, namespace: str = "run-7") -> int | None:
        place = ledger.find(
            NamedReward("request", request_name("", id, namespace), Reward("", choice, 1.0, positive=True))
        )
        return place and place.index

    assert [named("step", choice) for choice in range(4)] == [0, 1, 2, None]
    assert [named(f"{choice}_step") for choice in range(3)] == [0, 1, 2]
    assert (named("0_a", 3), named("a", 3)) == (3, None)
    assert named("step", namespace="") is None


def test_a_worker_that_does_not_score_ends_the_request_with_what_is_wrong(new_run: Callable[..., TracedRun]) -> None:
    run = new_run()
    add(run, [9], PRUNE, "bad")
    run.run()
    output = run.last("bad0")
    assert output.finish_reason == FinishReason.ERROR
    said = "rollout_detection_length: candidates are not scored by worker_cls 'vllm.v1.worker.cpu_worker"
    assert output.stop_reason.startswith(said)
    assert run.num_tokens("bad0") == 0
