"""Request bodies of our endpoints (docs/reference/http.md).

Invariant: an unknown field is an error that names it, and what is accepted can travel to the engine.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    Tag,
    ValidatorFunctionWrapHandler,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from vllm_rollout.config import MAX_PROMPTS, MAX_REWARD_S, REWARD_THRESHOLD
from vllm_rollout.kernel.http.body import MAX_INT, Body, PartFields, check_json, of_table
from vllm_rollout.kernel.parts import faces, faces_left_out
from vllm_rollout.kernel.rules import fields
from vllm_rollout.kernel.rules.rewards import Estimator

MAX_STREAM_TOKENS = 1_000_000


class Prompt(Body):
    """One prompt, given as `messages`, `prompt` or `prompt_token_ids`. Beside token ids, one other form is for the
    reward only."""

    id: Annotated[StrictStr, Field(min_length=1, max_length=256)] | None = Field(
        default=None, description="Your name for the prompt, unique in the request. Default: the prompt's position."
    )
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)] | None = Field(
        default=None, description="Chat messages, at least one. The model's chat template is applied."
    )
    prompt: Annotated[StrictStr, Field(min_length=1)] | None = Field(
        default=None, description="Text of at least one character, tokenized as it is."
    )
    prompt_token_ids: (
        Annotated[list[Annotated[StrictInt, Field(ge=0, le=MAX_INT)]], Field(min_length=1, fail_fast=True)] | None
    ) = Field(
        default=None,
        description="At least one token id of the model's vocabulary. Token ids are used as they are. Messages or text "
        "beside them are for the reward only.",
    )
    data: Any = Field(
        default=None,
        description="Any JSON, which the reward gets with each trajectory: the right answer, tests, columns.",
    )

    @model_validator(mode="before")
    @classmethod
    def _is_object(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise PydanticCustomError("no_prompt", "should be an object")
        return value

    @model_validator(mode="after")
    def _one_form(self) -> Prompt:
        forms = [f for f in ("messages", "prompt", "prompt_token_ids") if getattr(self, f) is not None]
        if len(forms) != 1 and not (len(forms) == 2 and self.prompt_token_ids is not None):
            got = " and ".join(forms) or "none of them"
            raise ValueError(f"give exactly one of messages, prompt, prompt_token_ids, got {got}")
        check_json(self.messages, "messages")
        check_json(self.data, "data")
        return self


RewardName = Annotated[StrictStr, Field(min_length=1, max_length=256)]


class RewardOptions(Body):
    """A reward by name, and how it is used."""

    name: RewardName = Field(
        description="Name of a built-in reward (exact, regex, math), or of a --rollout-reward of the server."
    )
    timeout_s: Annotated[StrictFloat, Field(gt=0, le=MAX_REWARD_S)] | None = Field(
        default=None,
        description="Upper bound, in seconds, of the time to grade a trajectory, with reward code of the time for "
        "each test. It holds even if the server has learned that more time is needed. Default: the server's limits.",
    )
    estimator: Estimator = Field(
        default="grpo", description="Estimator of the advantages in the answer: grpo, rloo or mean."
    )
    threshold: StrictFloat = Field(
        default=REWARD_THRESHOLD, description="A reward above this value is positive for what the server learns."
    )


RewardField = Annotated[
    Annotated[RewardName, Tag("<name>")] | Annotated[RewardOptions, Tag("<object>")],
    Discriminator(lambda value: "<object>" if isinstance(value, dict | BaseModel) else "<name>"),
]
"""A reward by name or by options. A name alone means the default options."""


@of_table
class DualEnd(Body, fields.DualEndFields):
    pass


@of_table
class DualEndSelection(Body, fields.DualEndSelectionFields):
    dual_end: DualEnd


@of_table
class Auto(Body, fields.AutoFields):
    pass


@of_table
class AutoRedundancy(Body, fields.AutoRedundancyFields):
    auto: Auto


if TYPE_CHECKING:
    OfParts = PartFields
else:
    OfParts = create_model(
        "OfParts", __base__=(*(body for _, body in chain(faces("fields"), faces_left_out("fields"))), PartFields)
    )


Included = Literal["text", "logprobs", "stopped"]
INCLUDED: tuple[Included, ...] = get_args(Included)
DEFAULT_INCLUDE: list[Included] = ["logprobs"]


@of_table
class RolloutFields(OfParts, fields.RaceFields):
    """Fields of a rollout that a run sets for all its rounds, and a round for itself."""

    sampling_params: dict[str, Any] = Field(
        default_factory=dict,
        description="Any field of vLLM's SamplingParams except n: temperature, max_tokens, seed, … With a seed, each "
        "prompt gets its own seed, made of the request's seed and the prompt's id. Candidate i samples by the "
        "prompt's seed + i.",
    )
    reward: RewardField | None = Field(
        default=None,
        description="Reward by which the server grades trajectories as they end. It is a name, or an object such as "
        '{"name": "math", "timeout_s": 10, "estimator": "rloo"}. Default: the server grades nothing.',
    )
    include: list[Included] = Field(
        default=DEFAULT_INCLUDE,
        description='List of what an answer has beside token ids: "text", "logprobs" (of the sampled tokens), '
        '"stopped". "stopped" adds the tokens of candidates that are not among the trajectories. An empty list: '
        "token ids only.",
    )

    @field_validator("include", mode="wrap")
    @classmethod
    def _each_word_once(cls, said: Any, checked: ValidatorFunctionWrapHandler) -> list[Included] | None:
        """In one order, whichever was written: a run of the same words is the same run."""
        words = checked(said[: len(INCLUDED) + 1] if isinstance(said, list) else said)
        if words is None:
            return None
        if len(set(words)) < len(words):
            raise ValueError(f"takes each of {', '.join(INCLUDED)} at most once, got {', '.join(words)}")
        return [word for word in INCLUDED if word in words]

    @model_validator(mode="after")
    def _sampling_params_are_json(self) -> Self:
        check_json(self.sampling_params, "sampling_params")
        return self


class StreamFields(Body):
    """Fields for an answer as a stream of events."""

    stream: StrictBool = Field(default=False, description="Answer with server-sent events as things happen.")
    stream_tokens: Annotated[StrictInt, Field(ge=1, le=MAX_STREAM_TOKENS)] | None = Field(
        default=None,
        description="With stream: also send tokens, in chunks of at least this many per candidate. An integer from "
        f"1 to {MAX_STREAM_TOKENS}.",
    )

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if self.stream_tokens is not None and not self.stream:
            raise ValueError("stream_tokens: needs stream to be true, got false. Set stream, or leave it out.")
        return self


@of_table
class RolloutRequest(RolloutFields, StreamFields, fields.GroupFields):
    """A rollout: one group of sampled answers per prompt."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "prompts": [{"id": "q1", "messages": [{"role": "user", "content": "What is 17 + 25?"}]}],
                    "group_size": 8,
                    "redundancy": 8,
                    **OfParts.example,
                    "sampling_params": {"temperature": 1.0, "max_tokens": 512},
                },
                {
                    "prompts": [{"id": "q1", "prompt": "17 + 25 ="}, {"id": "q2", "prompt": "6 * 7 ="}],
                    "group_size": 8,
                    "redundancy": "auto",
                    "selection": {"dual_end": {"num_longest": 1, "patience": 1.5}},
                },
                {
                    "prompts": [{"prompt": "17 + 25 ="}, {"prompt_token_ids": [1, 2, 3]}],
                    "group_size": 4,
                    "redundancy": 4,
                    "selection": {"dual_end": {"num_longest": 1}},
                    "include": ["text", "logprobs"],
                    "stream": True,
                    "stream_tokens": 16,
                },
            ]
        }
    )

    model: Annotated[StrictStr, Field(min_length=1)] | None = Field(
        default=None, description="Name of a served model. Default: the first."
    )
    prompts: Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS)] = Field(
        description=f"From 1 to {MAX_PROMPTS} prompts, each with messages, prompt or prompt_token_ids."
    )

    @property
    def tradeoff(self) -> float | None:
        """lambda of redundancy "auto". None if the request sets a number."""
        if isinstance(self.redundancy, int):
            return None
        return Auto().tradeoff if self.redundancy == "auto" else self.redundancy.auto.tradeoff

    @model_validator(mode="after")
    def _consistent(self) -> RolloutRequest:
        seen: set[str] = set()
        for position, prompt in enumerate(self.prompts):
            prompt_id = prompt.id if prompt.id is not None else str(position)
            if prompt_id in seen:
                raise ValueError(
                    f"prompts.{position}.id: {prompt_id!r} is used twice; ids must be unique in a request "
                    "(a prompt without an id takes its position)"
                )
            seen.add(prompt_id)
        return self
