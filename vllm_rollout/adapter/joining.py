"""A request that joins a group by its own fields -> its tag.

Invariant: which group it joins depends on its fields, prompt and adapter only, in whichever process they are read;
where it names none, also on which group of its prompt is open there.
"""

from __future__ import annotations

import re
import secrets

from vllm.sampling_params import SamplingParams

from vllm_rollout.adapter.wire import CandidateTag
from vllm_rollout.group.judging.ledger import AnswerName, Scoring, request_name
from vllm_rollout.group.plans.plan import GroupJoin
from vllm_rollout.group.plans.prompt_key import key_of_content, num_bytes, seed_for
from vllm_rollout.group.plans.terms import GroupTerms

MAX_ID_BYTES = 512
"""The longest id of a request that joins a group, as vLLM makes it of the client's."""

COMPLETION_ID = re.compile(r"(cmpl-.+)-(\d+)")


def first_of_completion(request_id: str) -> str:
    """The request of the first prompt of the same answer, which comes first."""
    several = COMPLETION_ID.fullmatch(request_id)
    return request_id if several is None else f"{several[1]}-0"


def too_long(request_id: str) -> str | None:
    """Why a request of that id cannot join a group: it is remembered under it until its reward has come."""
    if num_bytes(request_id) <= MAX_ID_BYTES:
        return None
    return (
        f"a request that joins a group has an id of at most {MAX_ID_BYTES} characters ({MAX_ID_BYTES // 4} where not "
        f"all are ASCII), got {len(request_id)}: {request_id[:24]!r}… Send a shorter request_id (X-Request-Id)."
    )


def answer_name(request_id: str, client: str = "", num_choices: int = 1, namespace: str = "") -> AnswerName:
    """The name of a request that has so many choices; `client`: whose it is, `namespace`: that it says.

    vLLM's /v1/completions makes a request of each prompt, `ID-0`, `ID-1` and so on, and one answer `ID` of them, with
    the choices of one prompt after the other. Everywhere else the answer has the request's id.
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
    """The tag of one sibling. `content` names its prompt; `answer`, `parent`: as of `Scoring`."""
    scoring = join.pruning and scoring_of(group_id, content, params, answer, parent)
    terms = GroupTerms(
        join.group_size, join.num_candidates, join.early_stop, pruning=join.pruning, audit_ratio=join.audit_ratio
    )
    return CandidateTag(group_id, None, terms, output_interval, scoring, observed=False, namespace=join.namespace)


def scoring_of(
    group_id: str,
    content: str,
    params: SamplingParams,
    answer: AnswerName | None = None,
    parent: AnswerName | None = None,
) -> Scoring:
    """How a group is scored that no rollout made: in the ledger it is one of its own.

    Chance: the same seeded request gets the same verdicts, others do not. `answer`: of a candidate that is one itself.
    """
    seed = secrets.randbits(62) if params.seed is None else seed_for(params.seed, content)
    return Scoring(group_id, content, seed, answer, parent, key_of_content(content))
