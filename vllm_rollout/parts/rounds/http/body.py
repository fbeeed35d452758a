"""Request bodies of runs and rounds (docs/reference/http.md).

Invariant: what a run says is the default of its rounds.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Self, TypeVar

from pydantic import ConfigDict, Field, StrictBool, StrictInt, StrictStr, model_validator

from vllm_rollout.config import DEFAULT_SPECULATION, MAX_PROMPTS
from vllm_rollout.kernel.http.body import MAX_INT, of_table
from vllm_rollout.kernel.http.protocol import Prompt, RolloutFields, StreamFields
from vllm_rollout.kernel.http.rewards import Filter
from vllm_rollout.kernel.parts import face
from vllm_rollout.kernel.rules.plan import upper_bound
from vllm_rollout.parts.rounds.http.earlier import with_new_names
from vllm_rollout.parts.rounds.rules.fields import RoundKind, RunFields
from vllm_rollout.parts.rounds.rules.rounds import ALLOW_FEWER, RunTerms

Name = Annotated[StrictStr, Field(min_length=1, max_length=256)]

of_sessions = face("rounds", "sessions_field")
"""Type and check of the field `sessions` of a run. None without the part sessions."""

B = TypeVar("B", bound=RolloutFields)
_IN_ROUNDS = {
    "redundancy": "Applies to short rounds, in place of response_speculation.",
    "early_stop": "Applies to short rounds.",
    "selection": "Applies to short rounds.",
    "pruning": "A long round scores in shadow mode: it has no spare candidates.",
    "sampling_params": "Values of a round replace all values of its run.",
}


def _of_rollout(body: type[B]) -> type[B]:
    """Class decorator for a body that inherits fields of a rollout. None of these fields keeps a default of its own."""
    for name, field in RolloutFields.model_fields.items():
        its = body.model_fields[name]
        annotation: Any = field.annotation  # it may be a union, too
        its.annotation, its.default, its.default_factory = annotation | None, None, None
        its.description = f"{field.description} {_IN_ROUNDS.get(name, '')}".rstrip()
    if of_sessions is not None and "sessions" in body.model_fields:
        body.model_fields["sessions"].annotation = of_sessions.SessionOptions | None
    body.model_rebuild(force=True)
    return body


class SaidFields(RolloutFields):
    """Fields of a rollout that a request has set. None means the run's value, else the default of /v1/rollouts."""

    def rollout_fields(self) -> dict[str, Any]:
        """The fields that were set, as JSON."""
        return self.model_dump(mode="json", include=set(RolloutFields.model_fields), exclude_none=True)

    @model_validator(mode="after")
    def _groups_are_whole(self) -> Self:
        if (field := self.allows_fewer_by) is not None:
            raise ValueError(ALLOW_FEWER.format(field))
        return self


ONE_REWARD = "needs a group_size of at least 2, got 1: one reward differs from none. Leave it out, or want more."


@_of_rollout
@of_table
class RunRequest(SaidFields, RunFields):
    """Create a run: the rounds of one training."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"id": "math-7b", "group_size": 8, "prompts_per_round": 128, "sampling_params": {"max_tokens": 8192}},
            ]
        }
    )

    id: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")] | None = Field(
        default=None,
        description="Your name for the run: letters, digits and . _ : -, at most 128 characters. Creating it again "
        "on the same terms is no error. Default: the server makes one.",
    )
    model: Annotated[StrictStr, Field(min_length=1)] | None = Field(
        default=None, description="Name of a served model, for all rounds of the run. Default: the first."
    )
    resume: StrictBool = Field(
        default=False,
        description="Keep the tokens that a deferred prompt has generated, and continue them in its long round. If "
        "the weights change in between, the answer says off_policy. Rounds take sampling_params and include from the "
        "run.",
    )
    filter: Filter | None = Field(
        default=None,
        description='"zero_variance": a round removes groups whose rewards are all the same, and runs prompts of its '
        "reserve in their place (DAPO). Its rounds need stream, or a reward.",
    )

    sessions: Any = Field(
        default=None,
        description="The candidates of its rounds are sessions, which a harness runs. The object has the fields that "
        "its groups share, as in POST /v1/groups. {} takes all defaults.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> RunRequest:
        if self.redundancy is not None and self.response_speculation is not None:
            raise ValueError(
                "response_speculation: redundancy says how many candidates a prompt has, got both. Leave one out."
            )
        if self.filter is not None and self.group_size < 2:
            raise ValueError(f"filter: {ONE_REWARD}")
        if self.sessions is not None and of_sessions is not None:
            of_sessions.check(self)
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """Settings as JSON. Another request for a run of the same id needs the same settings."""
        unsaid = {"sessions"} if self.sessions is None else set()  # as runs that were kept before there were any
        return self.model_dump(mode="json", exclude={"id", "model", *unsaid})

    @property
    def terms(self) -> RunTerms:
        factor = self.response_speculation if self.redundancy is None else 1.0
        return RunTerms(
            self.group_size,
            self.prompts_per_round,
            self.prompt_speculation,
            DEFAULT_SPECULATION if factor is None else factor,
            self.queue_order,
        )

    def num_candidates(self, most: int) -> int:
        """Most candidates of a prompt in a short round. `most`: candidates that the engine runs at once."""
        if self.redundancy is None:
            return self.terms.num_candidates
        if isinstance(self.redundancy, int):
            return self.group_size + self.redundancy
        return max(self.group_size, upper_bound(self.group_size, most))


class RoundPrompt(Prompt):
    """A prompt of a run. Its id identifies it from round to round."""

    id: Name = Field(description="Your name for the prompt. It is required: the prompt may come back rounds later.")


@_of_rollout
class RoundRequest(SaidFields, StreamFields):
    """One round of a run."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"prompts": [{"id": "q1", "prompt": "17 + 25 ="}], "idempotency_key": "step-17", "stream": True},
            ]
        }
    )

    prompts: Annotated[list[RoundPrompt], Field(max_length=MAX_PROMPTS)] = Field(
        default_factory=list,
        description="Prompts of the round, each with an id: as many as the run's num_fresh_prompts, and none for a "
        "long round.",
    )
    reserve: Annotated[list[RoundPrompt], Field(max_length=MAX_PROMPTS)] = Field(
        default_factory=list,
        description="Prompts to run in place of filtered ones. Prompts that are not needed are the first of the next "
        "short round.",
    )
    kind: RoundKind | None = Field(
        default=None,
        description='Default: the run\'s next_round. "long" ends an epoch early: the round runs the queue, and the '
        "given prompts beside it.",
    )
    idempotency_key: Name | None = Field(
        default=None,
        description="Your name for this round. If it is repeated, the server sends the same answer, or runs the "
        "round anew if there was no answer. Default: the server makes a key, which is in the round event.",
    )
    epoch: Annotated[StrictInt, Field(ge=0, le=MAX_INT // 2**11)] | None = Field(
        default=None,
        description="Number of the pass over the data. With it, a prompt that still waits from the same epoch is an "
        "error, and with a seed each epoch samples anew.",
    )
    filter: Filter | None = Field(default=None, description="As in the run. Default: the run's value.")

    @property
    def is_repeat(self) -> bool:
        """True if the request names an earlier round by its key alone."""
        empty = {name for name in ("prompts", "reserve") if not getattr(self, name)}
        said = {name for name in self.model_fields_set - empty if getattr(self, name) is not None}
        return self.idempotency_key is not None and said <= {"idempotency_key", *_HOW_TO_ANSWER}

    def memo(self) -> str:
        """The request as JSON, with a digest of its prompts. It is stored with the round, for repeats of the round's
        key."""
        prompts = hashlib.sha256(self.model_dump_json(include={"prompts", "reserve"}).encode()).hexdigest()
        said = self.model_dump(mode="json", exclude_unset=True, exclude={*_NOT_IN_MEMO})
        return json.dumps({"digest": prompts, **said}, sort_keys=True)

    def as_before(self, memo: str) -> RoundRequest:
        """This repeat, completed from the memo of the first request. Raises: ValueError for an invalid memo."""
        return self.from_memo(memo, **self.model_dump(include={"idempotency_key", *_HOW_TO_ANSWER}, exclude_unset=True))

    @classmethod
    def from_memo(cls, memo: str, **now: Any) -> RoundRequest:
        """A request with the fields of a memo, overridden by `now`. Raises: ValueError, TypeError, AttributeError
        for an invalid memo."""
        said = {name: value for name, value in json.loads(memo).items() if name != "digest"}
        return cls.model_validate({**with_new_names(said), **now})


_HOW_TO_ANSWER = ("stream", "stream_tokens")
_NOT_IN_MEMO = ("prompts", "reserve", "idempotency_key", *_HOW_TO_ANSWER)


def digest_of_prompt(prompt: RoundPrompt) -> str:
    """Digest of a prompt without its id."""
    return hashlib.sha256(prompt.model_dump_json(exclude={"id"}).encode()).hexdigest()[:32]
