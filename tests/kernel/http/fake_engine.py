"""An engine that really runs groups, without a model.

Invariant: the same seed, prompt and index make the same candidate. A step of virtual time adds one token to every
running candidate of a group; `GroupSteps` decides who stops.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from tests.support.part_modules import modules
from tests.support.steps import group_steps
from vllm_rollout.kernel.call_table import (
    ABORT_REQUESTS,
    CANCEL_GROUPS,
    GIVE_UP,
    RECOMPUTE,
    Argument,
    Operation,
    Result,
)
from vllm_rollout.kernel.http.aborts import not_launched
from vllm_rollout.kernel.http.engine import (
    CandidateEnd,
    CandidateTokens,
    EngineStopped,
    GroupLost,
    GroupOrder,
    Kind,
    NoRankTakes,
    Outlook,
    PreparedPrompt,
    PromptInput,
    RequestError,
)
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.kernel.http.ports import ApiPart
from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.rules.request_names import names_of_group
from vllm_rollout.kernel.rules.step import GroupSteps
from vllm_rollout.kernel.rules.types import (
    ABORTED,
    BASE_MODEL,
    CandidateId,
    CandidateState,
    Ending,
    EndReason,
    GroupCounts,
    RankCounts,
)

MODEL = "fake-model"
VOCAB_SIZE = 1000


class Sampling(BaseModel):
    """The sampling fields that mean something here."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: StrictInt = 0
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0)] = 0
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: list[StrictStr] | StrictStr | None = None
    logprobs: Annotated[StrictInt, Field(ge=-1, le=20)] | None = None


@dataclass(frozen=True, slots=True)
class Handle:
    sampling: Sampling
    want_logprobs: bool
    want_text: bool
    adapter: str = BASE_MODEL


@dataclass(slots=True)
class Candidate:
    """One candidate: what it will say, and how much of it is out."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    end_reason: EndReason
    num_tokens: int = 0
    num_sent: int = 0
    before: list[int] = field(default_factory=list)
    """Tokens of the candidate from an earlier round."""
    versions: list[str | None] = field(default_factory=list)
    """Version of the weights of each token."""

    def take_chunk(self, min_tokens: int) -> CandidateTokens | None:
        start, end = self.num_sent, self.num_tokens
        if end - start < min_tokens:
            return None
        self.num_sent = end
        return CandidateTokens(self.index, start, self.token_ids[start:end], self.logprobs[start:end])


class FakePart(ApiPart):
    """A part of the fake engine and of the app around it: `FAKE` of `tests/parts/NAME/fakes.py`."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine

    def begin(self, metrics: Metrics, settings: Mapping[str, Any]) -> None:
        """Called before there is a service of rollouts. `settings`: of the app."""

    def answers(self) -> Mapping[Operation[Any, Any], Callable[[Any], Any]]:
        """The part's answers to calls."""
        return {}

    def forget(self) -> None:
        """Forget what runs beside requests: its event loop is over."""

    def observe(self, token_ids: Sequence[int], length: int, adapter: str) -> Any:
        """Observation of a candidate that has reached a length at which the part's terms want one."""
        raise NotImplementedError

    def observe_last(self, terms: Any, token_ids: Sequence[int], adapter: str) -> Any | None:
        """Observation of a candidate's last token. None: these terms want none."""
        return None


@dataclass
class FakeEngine:
    """Implements `vllm_rollout.kernel.http.engine.Engine`."""

    parts: dict[str, FakePart] = field(init=False)
    num_ranks: int = 1
    dead: bool = False
    """The engine has stopped."""
    adapters: Sequence[str] = ()
    """Adapters that are served beside the model."""
    max_num_seqs: int = 64
    max_model_len: int = 4096
    max_length: int = 40
    """Candidates that nothing makes longer have 1 to this many tokens."""
    step_s: float = 0.0
    lengths: Mapping[int, int] = field(default_factory=dict)
    """Number of tokens of a candidate, by index, in place of a random one."""
    failures: Mapping[int, int] = field(default_factory=dict)
    """Candidate index -> tokens after which it fails."""
    error: str | None = None
    """Error of candidates that fail."""
    losses: dict[str, int] = field(default_factory=dict)
    """Prompt id -> the step of its group at which its rank dies, once."""
    finds_no_rank: Callable[[GroupOrder], bool] = lambda order: False
    """True for a group that no rank takes now."""
    dies_at_step: int | None = None
    """The engine dies at that step of a group."""
    weight_version: str | None = None
    adapter_versions: dict[str, str] = field(default_factory=dict)
    weight_version_from: Mapping[int, str] = field(default_factory=dict)
    """Output token -> the weight version from there on, after `weight_version`."""
    num_launch_places: int = 128
    preemptions: Callable[[int], int] = lambda num_tokens: 0
    """Preemptions of a candidate, by its number of tokens."""
    outlooks: dict[str, Outlook | None] = field(default_factory=dict)
    """Outlook of every launched group, by its prompt."""
    num_launched: int = 0
    num_ended: int = 0
    num_aborted: int = 0
    """Aborted candidates, deferred ones included."""
    groups: dict[str, GroupSteps] = field(default_factory=dict)
    """Steps of running groups by id."""
    steps: GroupSteps = field(default_factory=group_steps)
    """Steps of the groups that start now."""
    candidates: dict[CandidateId, Candidate] = field(default_factory=dict)
    """Candidates of all running groups."""
    stops: dict[str, list[CandidateId]] = field(default_factory=dict)
    """Verdicts on candidates of a group, to be carried out in its next step."""
    cancelled: set[str] = field(default_factory=set)
    """Groups that their next step cancels, after one more token."""
    aborted: set[str] = field(default_factory=set)
    """Groups that their next step aborts."""
    recomputed: list[Sequence[str] | None] = field(default_factory=list)
    """Arguments of each call that recomputes KV."""
    last_step_s: float = 0.0
    """Time of the last step of any group."""

    def __post_init__(self) -> None:
        self.parts = {name: module.FAKE(self) for name, module in modules("fakes").items()}

    @property
    def calls(self) -> FakeEngine:
        return self

    @property
    def memories(self) -> Any:
        """All that parts have learned."""
        return self.steps.memories

    def part(self, kind: type[Kind]) -> Kind:
        found = self.find(kind)
        assert found is not None, kind
        return found

    def find(self, kind: type[Kind]) -> Kind | None:
        return next((part for part in self.parts.values() if isinstance(part, kind)), None)

    async def call_all(self, operation: Operation[Argument, Result], argument: Argument) -> list[Result]:
        """Results of an operation, as of one rank."""
        self.check_alive()
        answers: dict[Any, Callable[[Any], Any]] = {
            ABORT_REQUESTS: self._abort,
            CANCEL_GROUPS: self._cancel,
            GIVE_UP: self._give_up,
            RECOMPUTE: self._recompute,
        }
        for part in self.parts.values():
            answers |= part.answers()
        return [answers[operation](argument)]

    tell_groups = call_all

    def check_alive(self) -> None:
        """Raises: EngineStopped when the engine is dead."""
        if self.dead:
            raise EngineStopped(
                "the engine has stopped; restart the server and see its log for the reason.",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
            )

    @property
    def num_running(self) -> int:
        return self.num_launched - self.num_ended - self.num_aborted

    @property
    def is_idle(self) -> bool:
        """True if no group has made a step for 0.2 s: the readers of the groups make them wait."""
        return time.monotonic() - self.last_step_s > 0.2

    def adapter_name(self, model: str | None) -> str:
        if model in (None, MODEL):
            return BASE_MODEL
        if model not in self.adapters:
            raise RequestError(
                f"model: {model!r} is not served; served here: {MODEL}. Leave the field out to use the first.",
                status=HTTPStatus.NOT_FOUND,
                param="model",
            )
        return model

    async def prepare(
        self,
        prompts: Sequence[PromptInput],
        model: str | None,
        sampling: dict[str, Any],
        *,
        want_logprobs: bool,
        want_text: bool,
    ) -> tuple[str, list[PreparedPrompt]]:
        handle = Handle(_sampling(sampling), want_logprobs, want_text, self.adapter_name(model))
        prepared = []
        for prompt in prompts:
            token_ids = self._tokenize(prompt)
            room = self.max_model_len - len(token_ids)
            max_tokens = min(handle.sampling.max_tokens or room, room)
            refusal = (
                RequestError("resume: not with sampling_params.stop", param="resume") if handle.sampling.stop else None
            )
            prepared.append(PreparedPrompt(prompt.id, token_ids, handle, max_tokens, refusal))
        return model or MODEL, prepared

    async def run_group(self, order: GroupOrder) -> AsyncGenerator[CandidateTokens | CandidateEnd, None]:
        group_id, plan, prompt, stream_tokens = order.group_id, order.plan, order.prompt, order.stream_tokens
        if self.finds_no_rank(order):
            async for end in not_launched(order):
                yield replace(end, finish_reason="error", error=None)
            raise NoRankTakes("every rank is drained", status=HTTPStatus.SERVICE_UNAVAILABLE)
        steps, beginnings, said = self.steps, order.beginnings, {**order.said_once, **order.said}
        self.outlooks[prompt.id] = order.outlook
        handle: Handle = prompt.handle
        running: dict[CandidateId, Candidate] = {}
        started = dict.fromkeys(range(plan.num_candidates), ()) if beginnings is None else beginnings.token_ids
        next_index = plan.num_candidates if beginnings is None else beginnings.next_index

        def launch(index: int) -> Group:
            name = f"{group_id}-c{index}"
            id, group = steps.launch(group_id, plan.terms, index, request_id=name, adapter=handle.adapter, said=said)
            running[id] = self.candidates[id] = self._candidate(index, prompt, order.seed_name, started.get(index, ()))
            self.num_launched += 1
            return group

        group, *_ = [launch(index) for index in started]
        self.groups[group_id] = steps
        step = 0
        try:
            while running:
                await asyncio.sleep(self.step_s)
                self.last_step_s = time.monotonic()
                if step == self.dies_at_step:
                    raise RequestError(
                        "the engine has stopped; restart the server and see its log for the reason.",
                        status=HTTPStatus.SERVICE_UNAVAILABLE,
                    )
                if step == self.losses.get(prompt.id):
                    del self.losses[prompt.id]
                    for id, candidate in running.items():
                        steps.ended(id, group, "failed", candidate.num_tokens)
                    self._close_step(steps)
                    for candidate in running.values():
                        self.num_ended += 1
                        yield replace(self._end(candidate, group_id, group, handle), finish_reason="error")
                    running.clear()
                    if self.steps is steps:
                        self.steps = steps.fresh()  # another rank knows nothing of these groups
                    raise GroupLost("rank 1 of the engine died")
                if group_id in self.aborted:
                    for id, candidate in running.items():
                        steps.ended(id, group, "failed", candidate.num_tokens)
                    self._close_step(steps)
                    for candidate in running.values():
                        self.num_ended += 1
                        yield replace(self._end(candidate, group_id, group, handle), error=ABORTED)
                    running.clear()
                    return
                ended = self._step(steps, group, running, handle.adapter)
                num_deferred = sum(group.state(candidate.index) == "deferred" for candidate in ended)
                self.num_aborted += num_deferred
                self.num_ended += len(ended) - num_deferred
                for candidate in ended:
                    if stream_tokens is not None and (rest := candidate.take_chunk(1)) is not None:
                        yield rest
                    if group.is_replaced(candidate.index):
                        launch(next_index)
                        next_index += 1
                    yield self._end(candidate, group_id, group, handle)
                for candidate in tuple(running.values()):
                    if stream_tokens is not None and (chunk := candidate.take_chunk(stream_tokens)) is not None:
                        yield chunk
                step += 1
        finally:
            self.num_aborted += len(running)
            if running:
                steps.drop(group_id)
            del self.groups[group_id]
            self.stops.pop(group_id, None)
            self.cancelled.discard(group_id)
            self.aborted.discard(group_id)
            for id in [id for id in self.candidates if id.group_id == group_id]:
                del self.candidates[id]

    def text_of(self, prompt: PreparedPrompt, token_ids: Sequence[int], *, stopped: bool) -> str:
        return _text(token_ids)

    def prompt_text(self, prompt: PreparedPrompt) -> str:
        return _text(prompt.token_ids)

    async def current_weight_version(self, model: str | None = None) -> str | None:
        self.check_alive()
        return self.adapter_versions.get(model or "", self.weight_version)

    async def name_adapter(self, adapter: str, version: str) -> None:
        self.adapter_versions[adapter] = version

    def _abort(self, names: Sequence[str]) -> list[str]:
        found = {id for id in self.groups if not names_of_group(id).isdisjoint(names)} - self.aborted
        self.aborted |= found
        return [f"{id.group_id}-c{id.index}" for id in self.candidates if id.group_id in found]

    def _recompute(self, names: Sequence[str] | None) -> int:
        self.recomputed.append(names)
        return 3

    def _cancel(self, group_ids: Sequence[str]) -> None:
        self.cancelled.update(id for id in group_ids if id in self.groups)

    def _give_up(self, candidates: Mapping[str, Sequence[int]]) -> None:
        for group_id, indices in candidates.items():
            if group_id in self.groups:
                self.groups[group_id].give_up(group_id, indices)

    async def rank_counts(self) -> dict[int, RankCounts]:
        groups = GroupCounts(len(self.groups), 0)
        return {rank: RankCounts(GroupCounts(0, 0) if rank else groups) for rank in range(self.num_ranks)}

    def _candidate(self, index: int, prompt: PreparedPrompt, seed_name: str, before: Sequence[int]) -> Candidate:
        sampling: Sampling = prompt.handle.sampling
        chance = random.Random(f"{sampling.seed}/{seed_name}/{list(prompt.token_ids)}/{index}")
        room = prompt.max_tokens or 0
        length = self.lengths.get(index) or chance.randint(1, self.max_length)
        length = max(length, sampling.min_tokens)
        end_reason: EndReason = "length" if length > room else "stop"
        length = min(length, room)
        if self.failures.get(index, length) < length:
            end_reason, length = "failed", max(self.failures[index], len(before))
        tokens = [chance.randrange(VOCAB_SIZE) for _ in range(length)]
        logprobs = [-chance.expovariate(1.0) for _ in range(length)]
        num = len(before)
        assert tokens[:num] == list(before), f"candidate {index} of this prompt has never said {before}"
        return Candidate(index, tokens[num:], logprobs[num:], end_reason, before=tokens[:num])

    def _step(
        self, steps: GroupSteps, group: Group, running: dict[CandidateId, Candidate], adapter: str
    ) -> list[Candidate]:
        """One token for every running candidate; takes out and returns those that ended or were stopped."""
        own = next(iter(running)).group_id
        if stopped := self.stops.pop(own, None):
            return [running.pop(id) for id in stopped]
        ended: list[CandidateId] = []
        due: dict[str, dict[CandidateId, Any]] = {}
        for id, candidate in running.items():
            candidate.num_tokens = min(candidate.num_tokens + 1, len(candidate.token_ids))
            candidate.versions.append(self._version_of(len(candidate.versions)))
            terms = group.terms.parts.items()
            if candidate.num_tokens == len(candidate.token_ids):
                last = {name: self.parts[name].observe_last(its, candidate.token_ids, adapter) for name, its in terms}
                seen = {name: observation for name, observation in last.items() if observation is not None}
                steps.ended(id, group, candidate.end_reason, candidate.num_tokens, seen)
                ended.append(id)
                continue
            reached = len(candidate.before) + candidate.num_tokens
            for name in [name for name, its in terms if reached in its.scored_lengths]:
                seen = self.parts[name].observe(candidate.before + candidate.token_ids, reached, adapter)
                due.setdefault(name, {})[id] = seen
        if own in self.cancelled:
            steps.cancel(own)
        self._close_step(steps, due)
        return [running.pop(id) for id in (*ended, *self.stops.pop(own, ()))]

    def _close_step(self, steps: GroupSteps, seen: Mapping[str, Mapping[CandidateId, Any]] | None = None) -> None:
        for id in steps.close_step(seen or {}, lambda id: self.candidates[id].num_tokens).stop:
            self.stops.setdefault(id.group_id, []).append(id)

    def _version_of(self, token: int) -> str | None:
        """Version of the weights that make this output token now."""
        return next((v for at, v in reversed(self.weight_version_from.items()) if at <= token), self.weight_version)

    @staticmethod
    def _spans(versions: Sequence[str | None]) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for token, version in enumerate(versions):
            if version is not None and spans and spans[-1]["version"] == version:
                spans[-1]["end"] = token + 1
            elif version is not None:
                spans.append({"version": version, "start": token, "end": token + 1})
        return spans

    def _end(self, candidate: Candidate, group_id: str, group: Group, handle: Handle) -> CandidateEnd:
        state: CandidateState = group.state(candidate.index)
        num_tokens = candidate.num_tokens
        by_itself = state == "finished"
        truncated = by_itself and candidate.end_reason == "length"
        exact = state != "pruned" and candidate.end_reason == "stop" and num_tokens == len(candidate.token_ids)
        tokens = candidate.token_ids[:num_tokens]
        return CandidateEnd(
            ending=Ending(
                candidate.index,
                state,
                num_tokens,
                truncated,
                group.end_step(candidate.index),
                exact,
                num_preemptions=self.preemptions(num_tokens),
            ),
            token_ids=tokens,
            logprobs=candidate.logprobs[:num_tokens] if handle.want_logprobs else None,
            text=_text(tokens) if handle.want_text else None,
            finish_reason=candidate.end_reason if by_itself else "abort",
            stop_reason=state if state in ("surplus", "pruned") else None,
            confidence=None,
            weight_versions=self._spans(candidate.versions[:num_tokens]),
            parts=self.steps.notes(CandidateId(group_id, candidate.index), group),
            is_replaced=group.is_replaced(candidate.index),
            error=self.error if state == "failed" else None,
        )

    def _tokenize(self, prompt: PromptInput) -> list[int]:
        if prompt.messages is not None and prompt.prompt_token_ids is None:
            form = "messages"
            try:
                text = "".join(f"{message['role']}: {message['content']}\n" for message in prompt.messages)
            except KeyError as error:
                raise RequestError(
                    f"prompt {prompt.id!r} cannot be rendered: a message has no {error}",
                    status=HTTPStatus.BAD_REQUEST,
                    param=f"prompts.{prompt.id}.messages",
                ) from error
            token_ids = [ord(c) % VOCAB_SIZE for c in text]
        elif prompt.prompt is not None and prompt.prompt_token_ids is None:
            form, token_ids = "prompt", [ord(c) % VOCAB_SIZE for c in prompt.prompt]
        else:
            form, token_ids = "prompt_token_ids", list(prompt.prompt_token_ids or ())
        param = f"prompts.{prompt.id}.{form}"
        if not token_ids:
            raise RequestError(f"prompt {prompt.id!r} is empty after tokenization.", param=param)
        if max(token_ids) >= VOCAB_SIZE:
            raise RequestError(
                f"prompt {prompt.id!r}: token id {max(token_ids)} is out of vocabulary ({VOCAB_SIZE}).",
                status=HTTPStatus.BAD_REQUEST,
                param=param,
            )
        if len(token_ids) >= self.max_model_len:
            raise RequestError(
                f"prompt {prompt.id!r} has {len(token_ids)} tokens and must leave room for an answer within "
                f"max_model_len ({self.max_model_len}). Shorten it or start the server with a larger --max-model-len.",
                status=HTTPStatus.BAD_REQUEST,
                param=param,
            )
        return token_ids


def _text(token_ids: Sequence[int]) -> str:
    return "".join(f"t{token}\u2028" for token in token_ids)


def _sampling(fields: dict[str, Any]) -> Sampling:
    if "n" in fields:
        raise RequestError(
            "sampling_params.n: is not a sampling field here: use group_size.", param="sampling_params.n"
        )
    for name in fields:
        if name not in Sampling.model_fields:
            raise RequestError(
                f"sampling_params.{name}: vLLM 0.32.0 has no such sampling field; "
                f"allowed: {', '.join(sorted(Sampling.model_fields))}.",
                param=f"sampling_params.{name}",
            )
    try:
        return Sampling.model_validate(fields)
    except ValidationError as error:
        problem = error.errors()[0]
        name = f"sampling_params.{problem['loc'][0]}"
        raise RequestError(f"{name}: {problem['msg']}, got {problem['input']!r}", param=name) from error
