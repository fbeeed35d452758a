"""Requests that reach the engine core with `rollout_*` fields, because it has no client of ours.

This is the case in a trainer's own process: vLLM's engine with our scheduler, and nothing else. Such a client reads no
notes and gets every token at once. A bad field shows only in how its request ends.

Invariant: a request without our fields costs one look at its `extra_args`.
"""

from __future__ import annotations

import json
import re
from copy import copy

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.request import Request

from vllm_rollout.adapter.arguments import ArgumentError, argument_checks
from vllm_rollout.adapter.joining import tag_of, too_long
from vllm_rollout.adapter.options import ServeOptions, observing_refusal
from vllm_rollout.kernel.rules.plan import GroupJoin, PlanError
from vllm_rollout.kernel.rules.prompt_groups import PromptGroups
from vllm_rollout.kernel.rules.prompt_key import digest_of, joined_id
from vllm_rollout.kernel.rules.rewards import EVERYBODY, AnswerName, request_name
from vllm_rollout.kernel.rules.terms_port import pruning_of
from vllm_rollout.kernel.wire import CandidateTag
from vllm_rollout.kernel.xargs import NAMES, audit_ratio_from_xargs, plan_from_xargs, rollout_xargs

logger = init_logger("vllm.vllm_rollout")

ADDED_DIGITS = re.compile(r"-[0-9a-f]{8}$")
"""Random digits that vLLM adds to a client's id of a request."""
CHILD_ID = re.compile(r"(\d{1,9})_(.+)", re.DOTALL)
"""Id of one of the n requests that vLLM makes from a request with n choices."""


class JoinRefused(ValueError):
    """The fields of a request are invalid here. The text is for its client: field, value, allowed values, remedy."""


class Joining:
    """Makes candidates from requests with our fields."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._config = vllm_config
        self._max_candidates = vllm_config.scheduler_config.max_num_seqs
        self._audit_ratio = ServeOptions.of(vllm_config).audit_ratio
        self._argument_checks = argument_checks(vllm_config)
        self._prompt_groups = PromptGroups()
        self._numbers: dict[str, int] = {}
        """Numbers of groups that running requests have joined without a name, by request id."""

    def tag(self, request: Request) -> CandidateTag | None:
        """Read a request's fields, and replace them by its tag, which the worker reads. None for a request without
        fields.

        Raises: JoinRefused.
        """
        params = request.sampling_params
        if params is None or not params.extra_args:
            return None
        try:
            for check in self._argument_checks:
                check(params.extra_args)
        except ArgumentError as error:
            raise JoinRefused(str(error)) from error
        if not (fields := rollout_xargs(params.extra_args)):
            return None
        if not fields.keys() & {"rollout_group_id", "rollout_group_size"}:
            raise JoinRefused(
                f"{next(iter(fields))} needs rollout_group_size in vLLM's own engine, which cannot add candidates: "
                "send a request per candidate with rollout_group_size and rollout_num_candidates, or use our own API "
                "process (`vllm-rollout serve`, vllm_rollout.LLM)."
            )
        if request.resumable:
            raise JoinRefused(f"{next(iter(fields))} is for a request whose prompt comes whole. Leave it out.")
        try:
            join = plan_from_xargs(fields, 1, max_candidates=self._max_candidates)
            assert isinstance(join, GroupJoin), "rollout_group_size joins"
            join = join.with_audits(audit_ratio_from_xargs(fields, join, self._audit_ratio))
        except PlanError as error:
            raise JoinRefused(str(error)) from error
        if (reason := too_long(request.request_id)) is not None:
            raise JoinRefused(f"request_id: {reason}")
        if pruning_of(join.parts) is not None and (reason := self._scoring_refusal()) is not None:
            raise JoinRefused(f"{NAMES['detection_length']}: {reason}")
        parallel = self._config.parallel_config
        if parallel.data_parallel_size > 1 or parallel.data_parallel_index:  # ranks of dense models know only an index
            logger.warning_once(
                "vllm_rollout: with several data-parallel ranks siblings meet on one rank only. Send those of a group "
                "with the same data_parallel_rank, or use vllm_rollout.AsyncLLM."
            )
        adapter = None if request.lora_request is None else request.lora_request.lora_name
        content = _content_of(request)
        name: str | int | None = join.name
        if name is None:
            name = self._prompt_groups.join((join, content, adapter), join.num_candidates)
            self._numbers[request.request_id] = name
        id, parent = ADDED_DIGITS.sub("", request.request_id), None
        answer = AnswerName(request_name(EVERYBODY, id, join.namespace))
        if child := CHILD_ID.fullmatch(id):
            parent = AnswerName(request_name(EVERYBODY, child[2], join.namespace), int(child[1]))
        group_id = joined_id(join.namespace, name, content, adapter or "")
        tag = tag_of(join, group_id, content, params, answer, parent, output_interval=1)
        rest = {key: value for key, value in params.extra_args.items() if key not in fields}
        request.sampling_params = copy(params)  # the caller's own where the engine runs in its process
        request.sampling_params.extra_args = {**rest, **tag.to_extra_args()}
        return tag

    def ended(self, request_id: str) -> None:
        if (number := self._numbers.pop(request_id, None)) is not None:
            self._prompt_groups.leave(number)

    def _scoring_refusal(self) -> str | None:
        worker_cls = self._config.parallel_config.worker_cls
        if not hasattr(resolve_obj_by_qualname(worker_cls), "rollout_heads"):
            return (
                f"candidates are not scored by worker_cls {worker_cls!r}. Build the engine with "
                "worker_cls='vllm_rollout.Worker' as well, or leave pruning out."
            )
        reason = observing_refusal(self._config)
        return reason and f"candidates cannot be scored: {reason}. Build the engine without it, or leave pruning out."


def _content_of(request: Request) -> str:
    """Digest of the prompt's content: token ids, with the hashes of images and other media."""
    parts = [digest_of(request.prompt_token_ids or ())]
    if request.mm_features:
        parts.append(json.dumps([feature.identifier for feature in request.mm_features]))
    return "/".join(parts)
