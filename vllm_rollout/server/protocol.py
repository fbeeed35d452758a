"""Request bodies of our endpoints (docs/http.md).

Invariant: an unknown field is an error that names it, and what is accepted can travel to the engine.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    Tag,
    model_validator,
)

from vllm_rollout.config import DEFAULT_TRADEOFF, MAX_GROUP_SIZE, MAX_PATIENCE, MAX_PROMPTS, MAX_TRADEOFF
from vllm_rollout.group.migration import Migration
from vllm_rollout.server.attempts import OnEngineFailure
from vllm_rollout.server.body import MAX_INT, Body, check_json
from vllm_rollout.server.pruning_body import Pruning

MAX_STREAM_TOKENS = 1_000_000


class Prompt(Body):
    """One prompt in exactly one of three forms."""

    id: Annotated[StrictStr, Field(min_length=1, max_length=256)] | None = Field(
        default=None, description="Your name for the prompt, unique in the request. Default: its position."
    )
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)] | None = Field(
        default=None, description="Chat messages, at least one; the model's chat template is applied."
    )
    prompt: Annotated[StrictStr, Field(min_length=1)] | None = Field(
        default=None, description="Text of at least one character, tokenized as it is."
    )
    prompt_token_ids: (
        Annotated[list[Annotated[StrictInt, Field(ge=0, le=MAX_INT)]], Field(min_length=1, fail_fast=True)] | None
    ) = Field(default=None, description="At least one token id of the model's vocabulary, used as they are.")

    @model_validator(mode="after")
    def _one_form(self) -> Prompt:
        forms = [f for f in ("messages", "prompt", "prompt_token_ids") if getattr(self, f) is not None]
        if len(forms) != 1:
            got = " and ".join(forms) or "none of them"
            raise ValueError(f"give exactly one of messages, prompt, prompt_token_ids, got {got}")
        check_json(self.messages, "messages")
        return self


class DualEnd(Body):
    num_longest: Annotated[StrictInt, Field(ge=0, le=MAX_GROUP_SIZE)] | None = Field(
        default=None,
        description="L, from 0 to group_size - 1: the longest trajectories of the pool; the other group_size - L are "
        "its shortest. Default: 1, and 0 with a group_size of 1.",
    )
    patience: Annotated[StrictFloat, Field(ge=1, le=MAX_PATIENCE)] | None = Field(
        default=None,
        description="Once group_size valid candidates have finished, the others get this many times the tokens of the "
        f"longest of those, then they are stopped: a number from 1 to {MAX_PATIENCE:g}. Default: the whole pool runs "
        "to its end.",
    )


class DualEndSelection(Body):
    dual_end: DualEnd


def _form(value: Any) -> str:
    """Which branch of a union is meant, so that an error speaks of that one only."""
    if isinstance(value, (dict, Body)):
        return "<object>"
    return "<number>" if isinstance(value, (int, float)) else "<name>"


def _selection_form(value: Any) -> str:
    form = _form(value)
    return "<name>" if form == "<number>" else form


Selection = Annotated[
    Annotated[Literal["first", "shortest"], Tag("<name>")] | Annotated[DualEndSelection, Tag("<object>")],
    Discriminator(_selection_form),
]


class Auto(Body):
    tradeoff: Annotated[StrictFloat, Field(gt=0, le=MAX_TRADEOFF)] = Field(
        default=DEFAULT_TRADEOFF,
        description="lambda of DARTS Eq. 8, what time is worth against shaping, with the cost of a rollout without "
        f"redundancy as its unit: a number above 0, up to {MAX_TRADEOFF:g}. More of it gives fewer candidates.",
    )


class AutoRedundancy(Body):
    auto: Auto


EarlyStop = Annotated[
    Annotated[StrictBool, Tag("<flag>")] | Annotated[Literal["auto"], Tag("<name>")],
    Discriminator(lambda value: "<name>" if isinstance(value, str) else "<flag>"),
]
Redundancy = Annotated[
    Annotated[StrictInt, Field(ge=0, le=MAX_GROUP_SIZE), Tag("<number>")]
    | Annotated[Literal["auto"], Tag("<name>")]
    | Annotated[AutoRedundancy, Tag("<object>")],
    Discriminator(_form),
]


OffOrAuto = Literal["off", "auto"]


class Return(Body):
    text: StrictBool = Field(default=False, description="Detokenize and return the text of each trajectory.")
    logprobs: StrictBool = Field(default=True, description="Return the log probability of each sampled token.")
    unselected: StrictBool = Field(
        default=False, description="Also return tokens and text of candidates that were not selected."
    )


class RolloutRequest(Body):
    """Groups for many prompts."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "prompts": [{"id": "q1", "messages": [{"role": "user", "content": "What is 17 + 25?"}]}],
                    "group_size": 8,
                    "redundancy": 8,
                    "pruning": {"detection_length": 64, "keep_ratio": 0.5},
                    "sampling": {"temperature": 1.0, "max_tokens": 512},
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
                    "return": {"text": True},
                    "stream": True,
                    "stream_tokens": 16,
                },
            ]
        }
    )

    model: Annotated[StrictStr, Field(min_length=1)] | None = Field(
        default=None, description="The name of a served model. Default: the first."
    )
    prompts: Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS)] = Field(
        description=f"From 1 to {MAX_PROMPTS} prompts."
    )
    group_size: Annotated[StrictInt, Field(ge=1, le=MAX_GROUP_SIZE)] = Field(
        description=f"Trajectories you want for each prompt (M; OpenAI's n): an integer from 1 to {MAX_GROUP_SIZE}."
    )
    redundancy: Redundancy = Field(
        default=0,
        description=f"Spare candidates beyond group_size (M' - M): an integer from 0 to {MAX_GROUP_SIZE}, or "
        '"auto": up to group_size of them for each prompt, more where lengths vary more (DARTS).',
    )
    early_stop: EarlyStop | None = Field(
        default=None,
        description="Stop a group's other candidates when group_size valid ones have finished: true, false or "
        '"auto" (the default): wherever the selection allows it, which dual_end does not.',
    )
    selection: Selection = Field(
        default="first",
        description='Which finished candidates make the group: "first", "shortest" or '
        '{"dual_end": {"num_longest": 1}}.',
    )
    pruning: Pruning | None = Field(
        default=None,
        description="Score candidates at a detection length and stop those that will not help: an object such as "
        '{"detection_length": 512, "keep_ratio": 0.5}. Default: no pruning.',
    )
    audit_ratio: Annotated[StrictFloat, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="Share of groups that are audited: a number from 0 to 1. In an audit group nobody is stopped: it "
        "has group_size candidates, and what is learned of them is true whatever races and pruning do to others. "
        "Default: the server's --rollout-audit-ratio with pruning or redundancy auto, which learn; otherwise 0.",
    )
    audit_unit: Literal["auto", "group", "rollout"] = Field(
        default="auto",
        description='What is audited: each "group" by chance, or by count the whole "rollout", since one audited group '
        'holds up an answer as long as all of them would. "auto" is "group" for a stream, where others are used as '
        'they come, and "rollout" otherwise.',
    )
    migration: Migration = Field(
        default="off",
        description='What groups may move to other ranks for, when that pays: "spread", away from a rank that lags; '
        '"consolidate", the tail of a rollout on fewer ranks; "auto", both; or "off". Needs a profile.',
    )
    scale_down: OffOrAuto = Field(
        default="off",
        description='"auto": when 20 to 50 % of the candidates have ended and the others fit on half of the ranks, the '
        "other half is emptied and kept empty until the rollout is over; a stream has a `ranks_free` event.",
    )
    on_engine_failure: OnEngineFailure = Field(
        default="fail",
        description='What becomes of groups whose data-parallel rank dies while others live: "fail", what had not '
        'ended of them has failed; or "retry", they run again on another rank, and a stream has a `restarted` event.',
    )
    sampling: dict[str, Any] = Field(
        default_factory=dict,
        description="Any field of vLLM's SamplingParams except n: temperature, max_tokens, seed, …",
    )
    return_: Return = Field(default_factory=Return, alias="return")
    stream: StrictBool = Field(default=False, description="Answer with server-sent events as things happen.")
    stream_tokens: Annotated[StrictInt, Field(ge=1, le=MAX_STREAM_TOKENS)] | None = Field(
        default=None,
        description="With stream: also send tokens, in chunks of at least this many per candidate: an integer from 1 "
        f"to {MAX_STREAM_TOKENS}.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> RolloutRequest:
        if self.stream_tokens is not None and not self.stream:
            raise ValueError("stream_tokens: needs stream to be true, got false. Set stream, or leave it out.")
        seen: set[str] = set()
        for position, prompt in enumerate(self.prompts):
            prompt_id = prompt.id if prompt.id is not None else str(position)
            if prompt_id in seen:
                raise ValueError(
                    f"prompts.{position}.id: {prompt_id!r} is used twice; ids must be unique in a request "
                    "(a prompt without an id takes its position)"
                )
            seen.add(prompt_id)
        check_json(self.sampling, "sampling")
        return self
