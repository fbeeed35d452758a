"""Turns a request into a rollout that is ready to run: plans, prompts, warnings.

Invariant: all faults of a request are found here, before anything is launched.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from vllm_rollout.config import MAX_CANDIDATES
from vllm_rollout.kernel.http.clients import client_namespace, client_request
from vllm_rollout.kernel.http.course import AllPrompts
from vllm_rollout.kernel.http.engine import Engine, PromptInput, RequestError
from vllm_rollout.kernel.http.plan_port import Draft, RolloutPart
from vllm_rollout.kernel.http.protocol import DualEnd, DualEndSelection, RolloutRequest
from vllm_rollout.kernel.http.rollout import Rollout
from vllm_rollout.kernel.http.slices import each
from vllm_rollout.kernel.rules.fields import PLAN_FIELDS
from vllm_rollout.kernel.rules.plan import GroupPlan, PromptPlan, make_plan, upper_bound
from vllm_rollout.kernel.rules.prompt_key import history_key
from vllm_rollout.kernel.rules.request_names import rollout_id
from vllm_rollout.kernel.rules.rows import PlanError

NAMES = {field: f"selection.dual_end.{field}" for field in DualEnd.model_fields} | {
    "allow_fewer": "pruning.allow_fewer"
}
"""Fields of a plan -> their names in the body."""


class Preparation:
    """Prepares rollouts for an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def rollout(self, request: RolloutRequest, parts: Sequence[RolloutPart]) -> Rollout:
        """Check a request and prepare its rollout, with these parts. Raises: RequestError that names the field."""
        plan, warnings = self._plan(request), list[str]()
        for part in parts:
            plan = await part.choose(request, plan, warnings)
        _check_max_candidates(request, plan)
        for part in parts:
            part.check(request, plan)
        _check_num_candidates(len(request.prompts), plan.num_candidates)
        inputs = [
            PromptInput(
                prompt.id if prompt.id is not None else str(position),
                position,
                prompt.messages,
                prompt.prompt,
                prompt.prompt_token_ids,
            )
            for position, prompt in enumerate(request.prompts)
        ]
        model, prompts = await self._engine.prepare(
            inputs,
            request.model,
            request.sampling_params,
            want_logprobs="logprobs" in request.include,
            want_text="text" in request.include or request.reward is not None,
        )
        adapter = self._engine.adapter_name(request.model)
        pairs = zip(request.prompts, prompts, strict=True)
        keys = await each(pairs, lambda pair: history_key(pair[0].id, pair[1].token_ids))
        plans = [PromptPlan(plan, key) for key in keys]
        draft = Draft(request, plan, adapter, prompts, plans, range(len(plans)), warnings)
        for part in parts:
            await part.shape(draft)
        for part in parts:
            part.audit(draft)
        rollout = Rollout(
            id=rollout_id(client_request()),
            created=int(time.time()),
            namespace=client_namespace(),
            model=model,
            adapter=adapter,
            plans=draft.plans,
            prompts=prompts,
            seed_names=[prompt.id for prompt in prompts],
            included=frozenset(request.include),
            stream_tokens=request.stream_tokens,
            course=AllPrompts(draft.positions),
            migration=request.migration,
            on_engine_failure=request.on_engine_failure,
            priority=request.priority,
            is_graded=request.reward is not None,
            budget=draft.budget,
            warnings=[*draft.warnings, *_alike(request, plan)],
        )
        rollout.parts = parts
        for part in parts:
            await part.ready(request, rollout)
        rollout.outcome.usage.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        return rollout

    def _plan(self, request: RolloutRequest) -> GroupPlan:
        """The plan of every prompt. With redundancy "auto" it has the largest number of candidates."""
        group = {field: value for field, value in request if field in PLAN_FIELDS}
        if isinstance(request.selection, DualEndSelection):
            group |= {"selection": "dual_end", **request.selection.dual_end.model_dump()}
        most = self._engine.max_num_seqs
        if request.tradeoff is not None:
            group["redundancy"] = max(0, upper_bound(request.group_size, most) - request.group_size)
        try:
            return make_plan(
                request.group_size,
                **group,
                parts=None if request.pruning is None else request.pruning.terms(),
                max_candidates=most,
                names=NAMES,
            )
        except PlanError as error:
            raise RequestError(str(error), param=error.field) from error


def _alike(request: RolloutRequest, plan: GroupPlan) -> list[str]:
    """Warnings about candidates that cannot differ."""
    said = request.sampling_params
    field = "temperature" if said.get("temperature") == 0 else "top_k" if said.get("top_k") == 1 else None
    if field is None or plan.num_candidates == 1:
        return []
    warning = (
        f"sampling_params.{field}: with {said[field]} all {plan.num_candidates} candidates of a prompt are the same. "
        "Nothing can be learned from their group, and spare ones only cost time. Sample with a temperature above 0."
    )
    return [warning]


def _check_num_candidates(num_prompts: int, num_candidates: int) -> None:
    if num_prompts * num_candidates > MAX_CANDIDATES:
        raise RequestError(
            f"prompts: {num_prompts} of up to {num_candidates} candidates are {num_prompts * num_candidates} "
            f"candidates, at most {MAX_CANDIDATES} are allowed in a request. Send fewer prompts per request.",
            param="prompts",
        )


def _check_max_candidates(request: RolloutRequest, plan: GroupPlan) -> None:
    if request.max_candidates is not None and request.max_candidates < plan.num_candidates:
        raise RequestError(
            f"max_candidates: a group may begin with {plan.num_candidates} (group_size + redundancy), got "
            f"{request.max_candidates}. Say at least as many, or leave it out.",
            param="max_candidates",
        )
