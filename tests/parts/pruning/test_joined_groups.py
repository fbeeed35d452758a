"""Pruning, audits and rewards of groups whose siblings are requests of their own, seen from the API process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.kernel.api.stepped_llm import SteppedLLM, let_everybody_run
from tests.kernel.core.scheduler_runs import TracedRun
from tests.kernel.core.test_joined_groups import JOIN, LOST, WON, Sibling, answer, answers, prompt, race
from tests.parts.pruning.scored_runs import assert_nothing_left, prune_by_sign
from tests.parts.pruning.steps import judge_of
from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.rules.rewards import NamedReward, Reward, request_name
from vllm_rollout.parts.pruning.rules.ledger import LedgerEntry
from vllm_rollout.parts.pruning.rules.step import SCORING, TERMS

pytestmark = pytest.mark.anyio

PRUNED = ("abort", "pruned")


@pytest.fixture
def llm(new_run: Callable[..., TracedRun]) -> SteppedLLM:
    return SteppedLLM(new_run())


PRUNE = {"rollout_detection_length": 4, "rollout_allow_fewer": 1}


SHADOW = {"rollout_redundancy": 1, "rollout_detection_length": 4, "rollout_pruning_mode": "shadow"}


def reward(
    llm: SteppedLLM, request_id: str, choice: int = 0, client: str = "", namespace: str = ""
) -> tuple[str, str | None]:
    """The status of a reward of 1 that names a choice by its answer's id, and the request that learns it."""
    name = request_name(client, request_id, namespace)
    named = NamedReward("request", name, Reward("", choice, 1.0, positive=True))
    judge = judge_of(llm.run.scheduler)
    if (place := judge.ledger.find(named)) is None:
        return "unknown", None
    _, (status,), labels = judge.reward(place.rollout_id, [Reward(place.prompt_id, place.index, 1.0, positive=True)])
    return status, next((label.request_id for label in labels), None)


async def test_a_reward_names_a_joined_candidate_by_its_request(llm: SteppedLLM) -> None:
    prune_by_sign(llm.run, 4)
    llm.run.logits = {f"r{i}-internal": -1.0 if i == 1 else 1.0 for i in range(4)}
    pruned = [Sibling(llm, f"r{i}", 9, {**JOIN, **PRUNE}) for i in range(4)]
    plain = [Sibling(llm, f"s{i}", 9, {**JOIN, "rollout_group_id": "q2"}) for i in range(4)]
    ends = await race(llm, *pruned, *plain)
    assert ends.count(PRUNED) == 1
    assert reward(llm, "r0") == ("accepted", "r0-internal")
    assert reward(llm, "r0") == ("duplicate", None)
    assert reward(llm, "r1") == ("unfinished", None), "it was pruned"
    assert [reward(llm, name)[0] for name in ("s0", "nobody's")] == ["unknown"] * 2, "not scored, not there"
    assert reward(llm, "r2", choice=1)[0] == "unknown"
    assert reward(llm, "r2", client="another")[0] == "unknown"
    assert not any(tag.observed for tag, _ in llm.added.values())
    assert_nothing_left(llm.run)


async def test_the_same_request_id_in_two_namespaces_is_two_names(llm: SteppedLLM) -> None:
    fields = {"rollout_group_size": 1, "rollout_pruning_mode": "shadow", "rollout_detection_length": 4}
    prune_by_sign(llm.run, 4)
    for namespace in ("run-1", "run-2", None):
        sibling = Sibling(llm, "r", 9, {**fields, "rollout_group_id": "q", "rollout_namespace": namespace})
        assert await race(llm, sibling) == [WON]
    assert [reward(llm, "r", namespace=namespace)[0] for namespace in ("run-3", "run-1/r", '"')] == ["unknown"] * 3
    assert [reward(llm, "r", namespace=namespace)[0] for namespace in ("run-1", "run-2", "")] == ["accepted"] * 3


async def test_the_id_of_a_request_may_be_large_and_nothing_in_the_engine_is_large_by_it(llm: SteppedLLM) -> None:
    prune_by_sign(llm.run, 4)
    id = "x" * 100_000
    assert (await answer(llm, id, [9, 30, 8], SHADOW)).request_id == id
    assert all(len(request_id) < 100 for request_id in llm.run.requests)
    sibling = Sibling(llm, id, 9)
    with pytest.raises(VLLMValidationError, match=r"^request_id: a request that joins .* at most 512 characters"):
        await sibling.task
    assert reward(llm, id, 1)[0] == "accepted"
    assert_nothing_left(llm.run)
    assert len(pickle.dumps([entry.names for entry in entries(llm)])) < 2000


def entries(llm: SteppedLLM) -> list[LedgerEntry]:
    """All that the engine remembers of candidates."""
    return [entry for rollout in judge_of(llm.run.scheduler).ledger._rollouts.values() for entry in rollout.values()]


async def test_a_reward_names_the_choices_of_an_openai_answer(llm: SteppedLLM) -> None:
    prune_by_sign(llm.run, 4)
    for number, lengths in enumerate(([9, 30, 8], [7, 6, 40])):  # two prompts of one answer
        await answer(llm, f"cmpl-x-{number}", lengths, SHADOW)
    learned = [reward(llm, "cmpl-x", choice) for choice in range(4)]
    assert [status for status, _ in learned] == ["accepted"] * 4
    candidates = [request_id.split("-") for _, request_id in learned]
    assert [(parts[2], parts[4]) for parts in candidates] == [("0", "c0"), ("0", "c2"), ("1", "c0"), ("1", "c1")]
    assert reward(llm, "cmpl-x", 4)[0] == "unknown"


async def test_a_late_reward_of_a_group_whose_name_is_used_again_teaches_nothing(
    llm: SteppedLLM,
) -> None:
    prune_by_sign(llm.run, 4)
    shadow = {**JOIN, "rollout_num_candidates": 2, "rollout_detection_length": 4, "rollout_pruning_mode": "shadow"}
    for step in range(2):
        await race(llm, *(Sibling(llm, f"step{step}-{i}", 9, shadow) for i in range(2)))
    assert reward(llm, "step1-0") == ("accepted", "step1-0-internal")
    assert reward(llm, "step0-0") == ("unknown", None)


async def test_chance_is_that_of_the_seed_and_the_prompt(llm: SteppedLLM) -> None:
    for i, (seed, token_ids) in enumerate([(7, ()), (7, ()), (8, ()), (7, (1, 2)), (None, ()), (None, ())]):
        await race(llm, Sibling(llm, f"r{i}", 9, {**JOIN, **PRUNE}, *token_ids, seed=seed))
        await answer(llm, f"c{i}", prompt(9, *token_ids), {"rollout_redundancy": 1, **PRUNE}, 1, seed)
    for name in ("r", "c"):
        scorings = [
            SCORING.of(tag.said) for id, (tag, _) in llm.added.items() if id[0] == name and not id.endswith("-c1")
        ]
        chances = [(scoring.seed, scoring.prompt_id) for scoring in scorings]
        assert chances[0] == chances[1]
        assert len(set(chances)) == len(chances) - 1


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"speculative_config": SimpleNamespace(method="eagle")}, "--speculative-config"),
        ({"enable_batch_sharded_sampling": True}, "--enable-batch-sharded-sampling"),
    ],
)
@pytest.mark.parametrize("xargs", [{**JOIN, **PRUNE}, {"rollout_redundancy": 2, **PRUNE}])
def test_pruning_is_refused_where_candidates_cannot_be_scored(new_run, flags, reason, xargs) -> None:
    llm = SteppedLLM(new_run(), **flags)
    params = SamplingParams(max_tokens=40, extra_args={**xargs})
    with pytest.raises(VLLMValidationError, match="without it, or leave pruning out") as error:
        llm.generate(prompt(5), params, "r")
    assert error.value.parameter == "vllm_xargs.rollout_detection_length"
    assert reason in str(error.value)


async def test_an_audited_answer_has_as_many_candidates_as_choices(llm: SteppedLLM) -> None:
    llm.rollout_metrics = Metrics(registry := CollectorRegistry())
    prune_by_sign(llm.run, 4)
    xargs = {"rollout_redundancy": 2, **PRUNE, "rollout_audit_ratio": 1}
    audited = await answer(llm, "audited", [40, 9, 5, 5], xargs)
    assert [(each.finish_reason, len(each.token_ids)) for each in audited.outputs] == [("stop", 40), ("stop", 9)]
    plans = [TERMS.of(tag.terms.parts).plan for tag, _ in llm.added.values()]
    assert [(plan.mode, plan.audit) for plan in plans] == [("shadow", True)] * 2
    assert registry.get_sample_value("vllm_rollout:audit_groups_total") == 1
    assert_nothing_left(llm.run)


async def test_all_prompts_of_a_completion_are_audited_or_none(llm: SteppedLLM) -> None:
    xargs = {"rollout_redundancy": 1, **PRUNE, "rollout_audit_ratio": 0.5}
    sizes = []
    for name in range(8):
        llm.added.clear()
        await answers(llm, [(f"cmpl-x{name}-{number}", [5 + number, 9]) for number in range(4)], xargs, 1)
        sizes.append(len(llm.added))
    assert sizes == [4, 8, 4, 8, 4, 4, 8, 4]


async def test_completions_are_audited_by_their_number_those_that_race_by_themselves(llm: SteppedLLM) -> None:
    audited = []
    for number in range(12):
        llm.added.clear()
        xargs = {**PRUNE, "rollout_audit_ratio": 0.5, "rollout_redundancy": number % 2}
        await answer(llm, f"r{number}", [5, 9], xargs, 1, seed=1)
        audited.append(any(TERMS.of(tag.terms.parts).plan.audit for tag, _ in llm.added.values()))
    assert audited[::2] == audited[1::2] == [True, False, True, False, True, True]


async def test_a_joined_group_that_is_audited_ends_as_one_that_races(llm: SteppedLLM) -> None:
    """As many finish as the trainer asked for, but those that came first, however long they take."""
    prune_by_sign(llm.run, 4)
    xargs = {**JOIN, **PRUNE, "rollout_audit_ratio": 1}
    siblings = [Sibling(llm, f"r{i}", length, xargs) for i, length in enumerate((90, 60, 5, 6))]
    assert await race(llm, *siblings) == [WON, WON, LOST, LOST]
    assert [len(sibling.outputs[-1].outputs[0].token_ids) for sibling in siblings] == [90, 60, 1, 1]
    assert_nothing_left(llm.run)


async def test_a_joined_group_is_audited_by_the_engine_s_share(llm: SteppedLLM) -> None:
    llm.vllm_config.additional_config = ServeOptions(audit_ratio=1.0).into({})
    siblings = [Sibling(llm, f"r{i}", length, {**JOIN, **PRUNE}) for i, length in enumerate((9, 8, 5, 6))]
    plain = [Sibling(llm, f"p{i}", length, {**JOIN, "rollout_group_id": "p"}) for i, length in enumerate((9, 8, 5, 6))]
    assert await race(llm, *siblings, *plain) == [WON, WON, LOST, LOST, LOST, LOST, WON, WON]


async def test_a_sibling_that_scores_where_the_first_does_not_is_refused_with_both_values(llm: SteppedLLM) -> None:
    first = Sibling(llm, "r0", 20)
    await let_everybody_run()
    other = Sibling(llm, "r1", 10, {**JOIN, **PRUNE})
    await let_everybody_run()
    await llm.step_to_the_end()
    with pytest.raises(VLLMValidationError, match=r"is None.*got 4") as error:
        await other.task
    assert error.value.parameter == "vllm_xargs.rollout_detection_length"
    assert await first.end() == WON
