"""A quality head and calibration that really learn, without a model.

Invariant: whether a candidate will succeed shows in its first token (`succeeded`), and its score foretells that with
noise. The judge and the ledger are the real ones; the head is a file of safetensors that knows the truth.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import numpy as np
from safetensors.numpy import save

from vllm_rollout.adapter.saved_state import END, HEAD, parse_state, state_header
from vllm_rollout.group.judge import Judge
from vllm_rollout.group.ledger import Reward
from vllm_rollout.group.memory import Memory
from vllm_rollout.group.types import Confidence, Observation
from vllm_rollout.server.engine import HeadInfo, LearningReport, RequestError, RewardsReceipt

MODEL = "fake-model"
HIDDEN_SIZE = 16
LABELS_TO_TRAIN = 16
"""Labels after which the head says something."""
SIGNAL_GAP = 1.5
"""Mean score of a candidate that will succeed, and minus that of one that will not; the noise is 1."""


def succeeded(token_ids: Sequence[int]) -> bool:
    """The hidden truth: what a checker would say of a trajectory."""
    return token_ids[0] % 2 == 0


@dataclass(slots=True)
class LearningEngine:
    """The part of `vllm_rollout.server.engine.Engine` that scores and learns."""

    pruning_refusal: str | None = None
    dead: bool = False
    """The engine has stopped."""
    evicts: bool = False
    """Features are gone when rewards come."""
    blind: bool = False
    """Confidence cannot be seen."""
    judge: Judge = field(default_factory=Judge)
    heads: dict[int, HeadInfo] = field(default_factory=dict)
    num_reports: int = 0

    def observe(self, token_ids: Sequence[int], detection_length: int) -> Observation:
        """What the step shows of a candidate that is due."""
        chance = random.Random(str(list(token_ids[:8])))
        truth = SIGNAL_GAP if succeeded(token_ids) else -SIGNAL_GAP
        head = self.heads.get(detection_length)
        bottom = math.nan if self.blind else 10 + 0.3 * truth + chance.gauss(0, 1)
        return Observation(
            Confidence(bottom + 2, bottom - 1, bottom),
            None if head is None else truth + chance.gauss(0, 1),
            0 if head is None else head.version,
        )

    async def post_rewards(self, rollout_id: str, rewards: Sequence[Reward]) -> RewardsReceipt | None:
        self._check_alive()
        result = self.judge.reward(rollout_id, rewards)
        if result is None:
            return None
        detection_length, statuses, labels = result
        before = self.heads.get(detection_length)
        if self.evicts:
            self.judge.num_evicted[detection_length] += len(labels)
            labels = []
        if labels:
            old = before or HeadInfo(detection_length, HIDDEN_SIZE, 0, 0, 0)
            num_labels = old.num_labels + len(labels)
            version = old.version + (num_labels >= LABELS_TO_TRAIN)
            self.heads[detection_length] = HeadInfo(
                detection_length, HIDDEN_SIZE, version, old.num_steps + 1, num_labels
            )
        return RewardsReceipt(statuses, len(labels), before.version if before else 0, detection_length)

    async def quality_head(self, detection_length: int | None) -> tuple[HeadInfo, bytes]:
        self._check_alive()
        head = self.heads[self._named(detection_length, self.heads, "quality head")]
        return head, self.head_file(head)

    @staticmethod
    def head_file(head: HeadInfo, model: str = MODEL) -> bytes:
        metadata = {"model": model, **{name: str(value) for name, value in _fields(head).items()}}
        return save({"w1": np.zeros((HIDDEN_SIZE, 4), np.float32)}, metadata)

    async def set_quality_head(self, weights: bytes) -> HeadInfo:
        self._check_alive()
        try:
            length = int.from_bytes(weights[:8], "little")
            metadata = json.loads(weights[8 : 8 + length])["__metadata__"]
            model = metadata.pop("model")
            head = HeadInfo(**{name: int(value) for name, value in metadata.items()})
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(
                f"the body is no quality head ({error!r:.80}). Send what GET /v1/quality_head gave."
            ) from error
        for name, mine, theirs in (("model", MODEL, model), ("hidden size", HIDDEN_SIZE, head.hidden_size)):
            if mine != theirs:
                raise RequestError(
                    f"the head is for {name} {theirs}, this server has {mine}. Use a head of this model.",
                    status=HTTPStatus.CONFLICT,
                )
        self.heads[head.detection_length] = head
        return head

    async def learning_report(self, detection_length: int | None) -> LearningReport:
        self._check_alive()
        self.num_reports += 1
        length = self._named(detection_length, self.judge.memory.learnings, "report")
        rules = self.judge.memory.learnings[length].report()
        head = self.heads.get(length)
        return LearningReport(
            detection_length=length,
            head=head,
            signals=rules.signals,
            num_awaiting=self.judge.ledger.num_awaiting()[length],
            num_evicted=self.judge.num_evicted[length],
            losses=[0.7 / (version + 1) for version in range(head.version if head else 0)],
            active=rules.active,
            shadow=rules.shadow,
        )

    async def learning_state(self) -> bytes:
        self._check_alive()
        lines = [json.dumps(row) for row in (state_header(MODEL), *self.judge.memory.to_state())]
        for head in self.heads.values():
            data = json.dumps(_fields(head))
            lines += [json.dumps([HEAD, len(data)]), data]
        # A head's bytes are followed by the next line at once.
        text = "".join(line if line.startswith('{"detection_length"') else f"{line}\n" for line in lines)
        return f"{text}{json.dumps([END, len(self.heads)])}\n".encode()

    async def set_learning_state(self, state: bytes) -> None:
        self._check_alive()
        try:
            model, rows, head_states = parse_state(state)
            memory = Memory.from_state(rows)
            heads = [HeadInfo(**json.loads(head)) for head in head_states()]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RequestError(
                f"the body is no learning state ({error!r:.80}). Send what GET /v1/rollouts/state gave."
            ) from error
        if model != MODEL:
            raise RequestError(
                f"the state is of model {model}, this server has {MODEL}. Start with a state of this model.",
                status=HTTPStatus.CONFLICT,
            )
        self.judge.memory = memory
        self.heads = {head.detection_length: head for head in heads}

    def _check_alive(self) -> None:
        if self.dead:
            raise RequestError(
                "the engine has stopped; restart the server and see its log for the reason.",
                status=HTTPStatus.SERVICE_UNAVAILABLE,
            )

    def _named(self, detection_length: int | None, known: Mapping[int, Any], what: str) -> int:
        lengths = ", ".join(map(str, known)) or "none"
        if detection_length is None and len(known) > 1:
            raise RequestError(
                f"detection_length: must be named, there is a {what} for each of {lengths}.",
                status=HTTPStatus.CONFLICT,
                param="detection_length",
            )
        if detection_length is None and known:
            return next(iter(known))
        if detection_length is None or detection_length not in known:
            raise RequestError(
                f"detection_length: no {what} for {detection_length}; there are: {lengths}. Post rewards first.",
                status=HTTPStatus.NOT_FOUND,
                param="detection_length",
            )
        return detection_length


def _fields(head: HeadInfo) -> dict[str, int]:
    return {name: getattr(head, name) for name in HeadInfo.__dataclass_fields__}
