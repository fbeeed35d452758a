"""A request that joins a group by its own fields -> its tag.

Invariant: which group it joins depends on its fields, prompt and adapter only, in whichever process they are read;
where it names none, also on which group of its prompt is open there.
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

from vllm.sampling_params import SamplingParams

from vllm_rollout.adapter.wire import CandidateTag
from vllm_rollout.group.judge import Scoring
from vllm_rollout.group.ledger import request_name
from vllm_rollout.group.plan import GroupJoin
from vllm_rollout.group.prompt_key import joined_id, key_of_content, num_bytes, seed_for
from vllm_rollout.group.pruning_plan import PruningPlan

MAX_ID_BYTES = 512
"""Of a request that joins a group, what vLLM makes of the client's id."""

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


class AnswerName(NamedTuple):
    """What a reward may call a candidate, or the first of several: the answer it is in, and the choice there."""

    name: str
    choice: int = 0

    @classmethod
    def of(cls, request_id: str, client: str = "", num_choices: int = 1, namespace: str = "") -> AnswerName:
        """Of a request that has so many choices; `client`: whose it is, `namespace`: that it says.

        vLLM's /v1/completions makes a request of each prompt, `ID-0`, `ID-1` and so on, and one answer `ID` of them,
        with the choices of one prompt after the other. Everywhere else the answer has the request's id.
        """
        several = COMPLETION_ID.fullmatch(request_id)
        if several is None:
            return cls(request_name(client, request_id, namespace))
        return cls(request_name(client, several[1], namespace), int(several[2]) * num_choices)


def tag_of(
    join: GroupJoin,
    name: str | int,
    content: str,
    adapter: str | None,
    params: SamplingParams,
    answer: AnswerName,
    *,
    output_interval: int,
    parent: AnswerName | None = None,
) -> CandidateTag:
    """The tag of one sibling. `name`: its group's, or the number of its prompt's open group where it has none;
    `content`: names its prompt; `adapter`: of LoRA, by name; `parent`: as of `Scoring`."""
    group_id = joined_id(join.namespace, name, content, adapter or "")
    return CandidateTag(
        group_id,
        None,
        join.group_size,
        join.num_candidates,
        join.early_stop,
        output_interval,
        join.pruning and scoring_of(join.pruning, group_id, content, params, answer, parent),
        observed=False,
        audit_ratio=join.audit_ratio,
    )


def scoring_of(
    plan: PruningPlan,
    group_id: str,
    content: str,
    params: SamplingParams,
    answer: AnswerName | None = None,
    parent: AnswerName | None = None,
) -> Scoring:
    """Of a group that no rollout made: in the ledger it is one of its own.

    Chance: the same seeded request gets the same verdicts, others do not. `answer`: of a candidate that is one itself.
    """
    seed = secrets.randbits(62) if params.seed is None else seed_for(params.seed, content)
    return Scoring(group_id, content, seed, plan, *(answer or (None, 0)), parent, key_of_content(content))
