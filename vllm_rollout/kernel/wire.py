"""Typed data in vLLM's requests and outputs. Invariant: both ends of each kind are in this file.

`call_table.py` has the calls of an API process to an engine core.

tag      API process -> scheduler, worker: `SamplingParams.extra_args[TAG_KEY]`, as bytes. A client of vLLM's own front
         ends can send only JSON in `extra_args`, and JSON has no bytes, so no client can make a tag
report   worker -> scheduler: the attribute `REPORT_ATTRIBUTE` of a `ModelRunnerOutput`, a plain dataclass pickled whole
ending   scheduler -> API process: `EngineCoreOutput.kv_transfer_params[ENDING_KEY]` on a candidate's last output. The
         client takes it out again before other code reads the output
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from vllm_rollout.kernel.parts import faces
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.rules.types import CandidateState

TAG_KEY = "vllm_rollout"
ENDING_KEY = "vllm_rollout"
REPORT_ATTRIBUTE = "vllm_rollout_report"
NO_POSITION = -1
"""First position of a row that samples nothing."""


ValueKind = Literal["terms", "said", "note", "taken"]
"""Kind of a part's values that go from process to process.

terms  terms of a group with the part, on a tag
said   what one candidate says to the part, on a tag
note   what the part says at the end of a candidate, in a note
taken  what the part takes along when a group moves
"""


def typed(kind: ValueKind, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of parts in their types, from values that were decoded without them. Values of unknown parts are left out.

    Raises: msgspec.ValidationError.
    """
    types = _types(kind)
    return {name: msgspec.convert(value, types[name]) for name, value in values.items() if name in types}


@cache
def _types(kind: ValueKind) -> Mapping[str, Any]:
    return {name: types[kind] for name, types in faces("wire") if kind in types}


class CandidateTag(msgspec.Struct, frozen=True, array_like=True):
    """Makes a vLLM request a candidate of a group."""

    group_id: str
    index: int | None
    """Index in the group. None: the scheduler numbers it by arrival (requests that join a shared group)."""
    terms: GroupTerms
    """Terms of the group, the same for all siblings."""
    output_interval: int
    """Tokens per message to the API process. 1 sends every step's token at once."""
    said: dict[str, Any] = {}
    """Values of the candidate for parts, by part."""
    observed: bool = True
    """True if its mean confidence is wanted. A part may observe the candidate in any case."""
    num_resumed: int = 0
    """Output tokens of an earlier round, at the end of the prompt."""
    namespace: str = ""
    """Namespace of its owner. Candidates of one prompt are drafts for each other within a namespace."""

    def to_extra_args(self) -> dict[str, Any]:
        return {TAG_KEY: msgspec.msgpack.encode(self)}

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> CandidateTag | None:
        """The tag in a request's `extra_args`. None without one, or if a client has written something else in its
        place.
        """
        if not extra_args or not isinstance(data := extra_args.get(TAG_KEY), bytes):
            return None
        try:
            tag = _TAG_DECODER.decode(data)
            if not (tag.said or tag.terms.parts):
                return tag
            terms = replace(tag.terms, parts=typed("terms", tag.terms.parts))
            return msgspec.structs.replace(tag, terms=terms, said=typed("said", tag.said))
        except msgspec.MsgspecError:
            return None


_TAG_DECODER = msgspec.msgpack.Decoder(CandidateTag)


class PartReport(Protocol):
    """Values of a part in the report of a step."""

    @property
    def request_ids(self) -> Sequence[str]:
        """Ids of the requests that were observed while they ran."""

    def observations(self) -> Iterable[tuple[str, Any]]:
        """Request id and observation of each of them, for the part's `StepPart`."""

    def last_observation(self, confidence: float, row: int, token: int) -> Any:
        """Observation of a candidate whose last token is this token and row of the step's batch. `confidence`: its
        mean."""


class RunnerReport(NamedTuple):
    """Observations of this step's candidates by the worker. A tuple, because it is pickled in every step."""

    confidence: np.ndarray
    """float32 [2, num_tokens, num_rows]: mean and standard deviation of the candidate's token confidences up to each
    token of the step, by row of its batch. Without drafts num_tokens is 1. NaN for a row that is not observed.
    """
    parts: Mapping[str, PartReport] = {}
    """Values of parts, by part."""
    first_positions: np.ndarray | None = None
    """int64 [num_rows]: output tokens before this step, or `NO_POSITION`. None in a step without drafts."""
    failed: Mapping[str, str] = {}
    """Reasons by id of requests that cannot be observed any more. They fail, because a wrong or missing
    score is worse.
    """
    num_internal_errors: int = 0
    """Exceptions of ours that this worker has caught."""
    weights: int = 0
    """Number of the weights change after which this step was computed. 0: the first weights."""

    def token_of(self, row: int, num_tokens: int) -> int | None:
        """Index in the step of a request's last token, given its row and its number of output tokens. None if the step
        has not sampled it.
        """
        if self.first_positions is None:
            return 0
        token = num_tokens - 1 - int(self.first_positions[row])
        return token if 0 <= token < self.confidence.shape[1] else None


def nothing_seen(num_rows: int, **others: Any) -> RunnerReport:
    """Report of a step in which no request was observed."""
    return RunnerReport(np.full((2, 1, num_rows), np.nan, dtype=np.float32), **others)


class EndingNote(msgspec.Struct, frozen=True, array_like=True):
    """The scheduler's data about a candidate at its end."""

    state: CandidateState
    end_step: int
    confidence: tuple[float, float] | None
    """Mean and standard deviation over the trajectory's tokens."""
    weights: list[tuple[int, str]] = []
    """Pairs of first output token and weight version. vLLM assigns versions when tokens arrive. This is too late for
    tokens that are held or in flight.
    """
    parts: dict[str, Any] = {}
    """Values of parts, by part."""
    refusal: str | None = None
    """Reason why the named group refused the request, which then has no output. It becomes a 400."""
    ended_by_itself: bool = False
    """True also for a surplus candidate whose ending came too late to count: its length is exact."""
    is_replaced: bool = False
    """True if it was lost, and its group waits for another candidate in its place."""
    num_preemptions: int = 0
    error: str | None = None
    """Reason why it failed, if known."""

    def to_params(self, params: dict[str, Any] | None) -> dict[str, Any]:
        return {**(params or {}), ENDING_KEY: self}

    @classmethod
    def take(cls, params: dict[str, Any] | None) -> tuple[EndingNote | None, dict[str, Any] | None]:
        """Split a request output's `kv_transfer_params` into our note and the rest."""
        if not params or ENDING_KEY not in params:
            return None, params
        rest = {key: value for key, value in params.items() if key != ENDING_KEY}
        note = msgspec.convert(params[ENDING_KEY], cls)
        return (msgspec.structs.replace(note, parts=typed("note", note.parts)) if note.parts else note), rest or None
