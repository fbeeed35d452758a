"""Drafts on an emulated device, under vLLM's real scheduler: nothing is said but sooner."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm.v1.engine import EngineCoreOutput

from tests.kernel.core.scheduler_runs import NO_AUDITS
from tests.parts.emulation.emulated_run import EmulatedRun
from tests.parts.pruning.steps import group_terms, scores, scores_in
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.wire import REPORT_ATTRIBUTE, EndingNote
from vllm_rollout.parts.drafts.acceptance import DraftSettings
from vllm_rollout.parts.drafts.rules import MAX_DRAFT_TOKENS, bin_of
from vllm_rollout.parts.drafts.with_emulation.worker import EmulatedDrafts
from vllm_rollout.parts.emulation.device import StepWork
from vllm_rollout.parts.emulation.settings import settings_type
from vllm_rollout.parts.emulation.worker.ports import SaidRow
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.pruning_plan import WHOLE, HeadKey, PruningPlan
from vllm_rollout.parts.pruning.with_emulation.worker import HIDDEN_SIZE
from vllm_rollout.parts.pruning.worker.feature_ring import StateKey
from vllm_rollout.parts.pruning.worker.quality_head import HeadWeights
from vllm_rollout.parts.pruning.worker.scorer import PublishedHead

GPU = {"step": {"ms": 5.2, "ms_per_request": 0.012, "ms_per_context_token": 2e-5, "ms_per_prefilled_token": 0.03}}
COMPUTES = {"step": {"ms": 0.001, "ms_per_request": 0.05, "ms_per_prefilled_token": 0.05}}
"""Every token costs what the first one does."""
SURE = {"kinds": [{"share": 1.0, "accepted": [1.0] * MAX_DRAFT_TOKENS}], "alone": 1.0}
LENGTHS = [3, 40, 41, 90, 200, 333, 334, 700]


@pytest.fixture
def new_run(tiny_model):
    def make(drafts: bool, device: dict[str, Any] = GPU, **kwargs: Any) -> EmulatedRun:
        return EmulatedRun(
            tiny_model, settings_type().model_validate(device), drafts=drafts, options=NO_AUDITS, **kwargs
        )

    return make


def launch(run: EmulatedRun, lengths: Sequence[int] = LENGTHS, **fields: Any) -> None:
    """Launch two groups."""
    pruning = fields.pop("pruning", None)
    for number in range(2):
        terms = group_terms(len(lengths), len(lengths), pruning=pruning)
        run.launch(f"g{number}", lengths, [100 + number] * 40, terms, **fields)


def rows_of(run: EmulatedRun) -> tuple[float, float]:
    """Tokens and drafts of a request in a step, on average."""
    num_rows = sum(step.work.num_requests for step in run.steps)
    num_sampled = sum(step.num_sampled for step in run.steps)
    return num_sampled / num_rows, sum(step.work.num_drafts for step in run.steps) / num_rows


@pytest.mark.parametrize(
    "limits", [{}, {"num_blocks": 60}, {"max_num_seqs": 3}, {"max_num_seqs": 32, "max_num_batched_tokens": 64}]
)
def test_tokens_are_the_same_with_drafts_and_come_in_fewer_steps(new_run, limits):
    plain, drafted = new_run(False, **limits), new_run(True, **limits)
    for run in (plain, drafted):
        launch(run)
        run.run()
    said = {request_id: plain.tokens(request_id) for request_id in plain.outputs}
    assert sorted(map(len, said.values())) == sorted(2 * LENGTHS)
    assert said == {request_id: drafted.tokens(request_id) for request_id in drafted.outputs}
    assert len(drafted.steps) < 0.85 * len(plain.steps)
    assert drafted.seconds < 0.85 * plain.seconds
    assert (drafted.scheduler.num_preemptions > 0) == ("num_blocks" in limits)


def test_a_run_repeats(new_run):
    runs = [new_run(True) for _ in range(2)]
    for run in runs:
        launch(run)
        run.run()
    assert [step.work for step in runs[0].steps] == [step.work for step in runs[1].steps]


def test_drafts_cost_what_tokens_cost_and_where_that_is_much_there_are_hardly_any(new_run):
    plain, drafted = new_run(False, COMPUTES), new_run(True, COMPUTES)
    for run in (plain, drafted):
        launch(run, [400] * 32)
        run.run()
    assert rows_of(drafted)[1] < 0.02
    assert drafted.seconds < 1.02 * plain.seconds
    assert drafted.seconds != plain.seconds  # some were tried


def test_a_cut_at_max_tokens_is_where_it_is_without_drafts_and_none_goes_beyond(new_run):
    plain, drafted = (new_run(drafts, GPU | {"drafts": SURE}) for drafts in (False, True))
    for run in (plain, drafted):
        run.launch("g", [1000], [7] * 10, GroupTerms(1, 1), max_tokens=30)
        run.run()
    assert drafted.tokens("g/0") == plain.tokens("g/0")
    assert len(drafted.tokens("g/0")) == 30
    assert sum(step.num_sampled for step in drafted.steps) == 30
    assert len(drafted.steps) < 12


def test_nothing_is_drafted_beyond_a_candidates_end_or_the_models_length(new_run):
    run = new_run(True, GPU | {"drafts": SURE}, max_num_seqs=1)
    run.launch("g", [60], [7] * 10, GroupTerms(1, 1))
    run.run()
    work = [step.work.num_drafts for step in run.steps]
    assert max(work) == MAX_DRAFT_TOKENS
    assert sum(step.num_sampled for step in run.steps) == 60  # none was thrown away
    assert [step.num_sampled for step in run.steps] == [1 + num for num in work]


@dataclass
class FakeRequest:
    id: str = "r"
    num_prompt: int = 10
    newest: int = 6
    length: int = 1000
    num_before: int = 0
    max_tokens: int = 9000
    salt: int = 5

    def token(self, number: int) -> int:
        return 10 * number


def cheap(settings: dict[str, Any] = SURE, max_model_len: int = 4096) -> EmulatedDrafts:
    """Drafts that cost nothing, at every batch size of these tests."""
    drafts = EmulatedDrafts(DraftSettings.model_validate(settings), MAX_DRAFT_TOKENS, max_model_len)
    for num_rows in (1, 2):
        for work in [StepWork(num_rows, 9, 0)] * 2 + [StepWork(num_rows, 9, 0, 4 * num_rows)] * 40:
            drafts.took(work, 1.0)
    return drafts


def proposed(drafts: EmulatedDrafts, *rows: SaidRow) -> list[list[int]]:
    return drafts.propose(rows).draft_token_ids


@pytest.mark.parametrize(
    ("changes", "room"),
    [
        ({}, 12),
        ({"newest": 4085 - 10, "length": 9000}, 10),
        ({"max_tokens": 9}, 2),
        ({"length": 11}, 4),
        ({"length": 11, "num_before": 3}, 1),
        ({"length": 7}, 0),
    ],
)
def test_drafts_are_the_tokens_that_come_next_up_to_the_one_before_its_last_as_far_as_there_is_room(changes, room):
    drafts, request = cheap(), FakeRequest(**changes)
    drafts.know("r", "prompt", "group")
    first = request.num_before + request.newest + 1
    assert proposed(drafts, SaidRow(request, 1)) == [[10 * (first + place) for place in range(room)]]


def test_only_candidates_that_have_said_something_have_drafts():
    drafts = cheap()
    drafts.know("r", "prompt", "group")
    assert proposed(drafts, SaidRow(FakeRequest("other"), 1), SaidRow(FakeRequest(), 0)) == [[], []]
    drafts.end(FakeRequest())
    assert proposed(drafts, SaidRow(FakeRequest(), 1)) == [[]]


def test_a_wrong_draft_is_no_token_of_the_candidate():
    drafts = cheap({"kinds": [{"share": 1.0, "accepted": [0.9, 1e-12]}], "alone": 1.0})
    drafts.know("r", "prompt", "group")
    ((first, second),) = proposed(drafts, SaidRow(FakeRequest(), 1))
    assert first == 70
    assert second != 80


def num_with_drafts(known: Sequence[tuple[str, str]], settings: dict[str, Any]) -> int:
    """Rows with drafts among 300 rows of a candidate of group `g`, after the candidates of `known`."""
    drafts = cheap(settings)
    for number, (prompt, group_id) in enumerate(known):
        drafts.know(f"{number}", prompt, group_id)
        drafts.end(FakeRequest(f"{number}"))
    drafts.know("r", "prompt", "g")
    rows = [proposed(drafts, SaidRow(FakeRequest(salt=salt), 1)) for salt in range(300)]
    return sum(bool(its[0]) for its in rows)


def test_siblings_and_earlier_answers_of_the_same_prompt_bring_drafts_also_when_they_have_ended():
    settings = {"kinds": [{"share": 0.4, "accepted": [1.0] * 4}], "alone": 0.2, "earlier_answer": 5}
    alone, strangers, siblings, earlier = (
        num_with_drafts(known, settings)
        for known in ([], [("another", "g")] * 15, [("prompt", "g")] * 3, [("prompt", "f")] * 3)
    )
    assert alone == strangers < siblings < earlier


@pytest.mark.parametrize(("num_said", "num_drafts"), [(1, 4), (5, 4), (0, 4), (2, 2), (1, 0)])
def test_the_rule_learns_what_became_of_the_drafts_that_were_verified(num_said, num_drafts):
    drafts = cheap({"kinds": [{"share": 1.0, "accepted": [0.5] * 4}], "alone": 1.0})
    rule, bin = drafts._rule, bin_of(0.5)
    drafts.know("r", "prompt", "group")
    assert len(proposed(drafts, SaidRow(FakeRequest(), 1))[0]) == 4
    before = list(rule._drafted), list(rule._accepted)
    proposed(drafts, SaidRow(FakeRequest(), num_said, num_drafts))
    drafted, accepted = rule._drafted[bin] - before[0][bin], rule._accepted[bin] - before[1][bin]
    assert (round(drafted), round(accepted)) == (num_drafts if num_said else 0, max(0, min(num_said - 1, num_drafts)))
    assert sum(rule._drafted) - sum(before[0]) == pytest.approx(drafted)


SCORED = PruningPlan(detection_length=20, mode="shadow", trial_lengths=(60, 120), final_score=True)


def test_scores_are_those_without_drafts(new_run):
    """Candidates with many tokens a step have the same scores, at detection lengths and at their end."""
    seen = []
    for drafts in (False, True):
        run = new_run(drafts, GPU | {"drafts": SURE})
        head = HeadWeights(torch.eye(HIDDEN_SIZE), torch.ones(HIDDEN_SIZE), torch.ones(HIDDEN_SIZE), torch.zeros(1))
        for length in (20, 60, 120, WHOLE):
            run.heads.heads[HeadKey(length)] = PublishedHead(length + 2, head)
        launch(run, pruning=SCORED, scoring=Scoring("rollout", "prompt", 7))
        run.run()
        reports = [its for step in run.steps if (its := step.output.__dict__.get(REPORT_ATTRIBUTE)) is not None]
        each = [pair for its in reports for pair in scores_in(its).observations()]
        observed = {(id, o.detection_length, o.head_version) for id, o in each}
        assert len(observed) == 2 * (7 + 5 + 4)
        notes = {id: EndingNote.take(its[-1].kv_transfer_params)[0] for id, its in run.outputs.items()}
        seen.append((observed, {id: _scores(note) for id, note in notes.items()}))
        run.runner.step(run.scheduler.schedule())  # it hears who has ended
        ended = [StateKey(id, len(run.tokens(id)), at_end=True) for id in notes]
        assert len(run.ring.take(ended)[1]) == 16
    assert max(step.num_sampled for step in run.steps) > 16
    assert run.heads.num_last_states == 1 + MAX_DRAFT_TOKENS  # a stop string may end it at any of them
    assert seen[0] == seen[1]
    assert sum(scores[0] is not None for scores in seen[1][1].values()) == 14


def _scores(note: EndingNote) -> tuple[Any, ...]:
    """At its detection length and at its end, as far as they do not depend on who else is scored in the step."""
    assessed = [its and (round(its.score, 3), its.head_version) for its in scores(note)]
    return *assessed, note.confidence


@pytest.mark.parametrize("num_alternatives", [0, 3])
def test_every_token_has_its_log_probabilities(new_run, num_alternatives):
    said = []
    for drafts in (False, True):
        run = new_run(drafts)
        launch(run, logprobs=num_alternatives)
        run.run()
        said.append({id: [line for each in outputs for line in _lines(each)] for id, outputs in run.outputs.items()})
        assert all([line[0] for line in said[-1][id]] == run.tokens(id) for id in run.outputs)
    assert said[0] == said[1]


def _lines(output: EngineCoreOutput) -> list[list[int]]:
    return [] if output.new_logprobs is None else output.new_logprobs.logprob_token_ids.tolist()
