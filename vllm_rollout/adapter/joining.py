"""Tags of requests that join a group by their own fields.

Invariant: the group depends only on fields, prompt and adapter, in every process. If the fields name no group, it also
depends on which group of the prompt is open in the process.
"""

from __future__ import annotations

import re

from vllm.sampling_params import SamplingParams

from vllm_rollout.kernel.rules.plan import GroupJoin
from vllm_rollout.kernel.rules.prompt_key import num_bytes
from vllm_rollout.kernel.rules.rewards import AnswerName, request_name
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.rules.terms_port import Origin, said_of
from vllm_rollout.kernel.wire import CandidateTag

MAX_ID_BYTES = 512
"""Longest id of a request that joins a group, as vLLM makes it from the client's id."""

COMPLETION_ID = re.compile(r"(cmpl-.+)-(\d+)")


def first_of_completion(request_id: str) -> str:
    """Id of the request of the answer's first prompt."""
    several = COMPLETION_ID.fullmatch(request_id)
    return request_id if several is None else f"{several[1]}-0"


def too_long(request_id: str) -> str | None:
    """Reason if an id is too long to join a group, else None. The id is kept until the reward has come."""
    if num_bytes(request_id) <= MAX_ID_BYTES:
        return None
    return (
        f"a request that joins a group has an id of at most {MAX_ID_BYTES} characters ({MAX_ID_BYTES // 4} where not "
        f"all are ASCII), got {len(request_id)}: {request_id[:24]!r}… Send a shorter request_id (X-Request-Id)."
    )


def answer_name(request_id: str, client: str = "", num_choices: int = 1, namespace: str = "") -> AnswerName:
    """Name of a request. `client`: its owner. `num_choices`: choices per prompt. `namespace`: from its fields.

    vLLM's /v1/completions makes a request from each prompt (`ID-0`, `ID-1`, …) and one answer `ID` from all of them. It
    has the choices of one prompt after the other. Other endpoints use the request's id for the answer.
    """
    several = COMPLETION_ID.fullmatch(request_id)
    if several is None:
        return AnswerName(request_name(client, request_id, namespace))
    return AnswerName(request_name(client, several[1], namespace), int(several[2]) * num_choices)


def tag_of(
    join: GroupJoin,
    group_id: str,
    content: str,
    params: SamplingParams,
    answer: AnswerName,
    parent: AnswerName | None = None,
    *,
    output_interval: int,
) -> CandidateTag:
    """Tag of one sibling. `content`: digest of its prompt. `answer`, `parent`: as of `Origin`."""
    said = said_of(join.parts, Origin(group_id, content, params.seed, answer, parent))
    terms = GroupTerms(join.group_size, join.num_candidates, join.early_stop, parts=join.parts)
    return CandidateTag(group_id, None, terms, output_interval, said, observed=False, namespace=join.namespace)
