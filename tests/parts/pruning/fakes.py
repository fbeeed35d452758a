"""A quality head and calibration of the fake engine that really learn, without a model.

Invariant: whether a candidate will succeed shows in its first token (`succeeded`), and its score foretells that with
noise. The judge and the ledger are the real ones; the head is a file of safetensors that knows the truth.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from itertools import chain
from typing import Any

import numpy as np
from safetensors.numpy import save

from tests.kernel.http.fake_engine import MODEL, FakeEngine, FakePart
from tests.parts.pruning.reports import report_of
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.rules.rewards import NamedReward, Reward
from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.parts.memories.rules import Memory
from vllm_rollout.parts.pruning.http.engine import KeepState, LearningPart, RewardsReceipt
from vllm_rollout.parts.pruning.rules.advice import advise
from vllm_rollout.parts.pruning.rules.assessment import Confidence
from vllm_rollout.parts.pruning.rules.judge import Judge
from vllm_rollout.parts.pruning.rules.known_prompts import KnownPrompt, known_prompts, prompt_rows
from vllm_rollout.parts.pruning.rules.learning_report import LearningReport
from vllm_rollout.parts.pruning.rules.length_trial import TriedCandidate
from vllm_rollout.parts.pruning.rules.memory import PruningMemory
from vllm_rollout.parts.pruning.rules.pruning_plan import WHOLE, HeadKey, Observation
from vllm_rollout.parts.pruning.rules.report import HeadInfo
from vllm_rollout.parts.pruning.rules.step import PruningStep
from vllm_rollout.parts.pruning.rules.terms import PruningTerms
from vllm_rollout.parts.pruning.saved_state import END, head_line, parse_state, state_header

HIDDEN_SIZE = 16
LABELS_TO_TRAIN = 16
"""Labels after which the head says something."""
SIGNAL_GAP = 1.5
"""Mean score of a candidate that will succeed, and minus that of one that will not; the noise is 1."""


def succeeded(token_ids: Sequence[int]) -> bool:
    """The hidden truth: what a checker would say of a trajectory."""
    return token_ids[0] % 2 == 0


class FakeLearning(FakePart, LearningPart):
    """Learns, and scores candidates."""

    pruning_refusal: str | None = None
    blind = False
    """The engine gives no confidence."""
    num_reports = 0

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine)
        self.heads: dict[HeadKey, HeadInfo] = {}

    @property
    def judge(self) -> Judge:
        return self.engine.steps.part(PruningStep).judge

    def observe(self, token_ids: Sequence[int], length: int, adapter: str) -> Observation:
        chance = random.Random(str(list(token_ids[:8])))
        truth = SIGNAL_GAP if succeeded(token_ids) else -SIGNAL_GAP
        head = self.heads.get(HeadKey(length, adapter))
        bottom = math.nan if self.blind else 10 + 0.3 * truth + chance.gauss(0, 1)
        return Observation(
            Confidence(bottom + 2, bottom - 1, bottom),
            None if head is None else truth + chance.gauss(0, 1),
            0 if head is None else head.version,
            length,
        )

    def observe_last(self, terms: PruningTerms, token_ids: Sequence[int], adapter: str) -> Observation | None:
        return self.observe(token_ids, WHOLE, adapter) if terms.plan.final_score else None

    async def post_named_rewards(self, rewards: Sequence[NamedReward]) -> RewardsReceipt:
        statuses, num_training, versions = [], 0, {}
        for named in rewards:
            place = self.judge.ledger.find(named)
            if place is None:
                statuses.append("unknown")
                continue
            reward = named.reward._replace(prompt_id=place.prompt_id, index=place.index)
            receipt = await self.post_rewards(place.rollout_id, [reward])
            statuses += receipt.statuses
            num_training += receipt.num_training
            versions = {**receipt.head_versions, **versions}
        return RewardsReceipt(statuses, num_training, versions)

    async def post_rewards(self, rollout_id: str, rewards: Sequence[Reward]) -> RewardsReceipt | None:
        self.engine.check_alive()
        result = self.judge.reward(rollout_id, rewards)
        if result is None:
            return None
        detection_length, statuses, labels = result
        key = HeadKey(detection_length, self.judge.ledger.adapter(rollout_id))
        before = self.heads.get(key)
        for length, num_new in Counter(length for label in labels for length in label.scores).items():
            at = HeadKey(length, key.adapter)
            old = self.heads.get(at) or HeadInfo(length, HIDDEN_SIZE, 0, 0, 0)
            num_labels = old.num_labels + num_new
            version = old.version + (num_labels >= LABELS_TO_TRAIN)
            self.heads[at] = HeadInfo(length, HIDDEN_SIZE, version, old.num_steps + 1, num_labels, key.adapter)
        num_training = sum(bool(label.scores) for label in labels)
        return RewardsReceipt(statuses, num_training, {key: before.version if before else 0})

    async def tried_lengths(self, adapter: str = BASE_MODEL) -> list[TriedCandidate]:
        self.engine.check_alive()
        return list(self.learned(adapter).tried)

    async def known_prompts(self, adapter: str = BASE_MODEL) -> list[KnownPrompt]:
        self.engine.check_alive()
        memory = self.memory(adapter)
        rows = prompt_rows(memory.get("shaping"), self.learned(adapter).successes, 2)
        return known_prompts(chain.from_iterable(rows))

    async def quality_head(self, detection_length: int | None, adapter: str = BASE_MODEL) -> tuple[HeadInfo, bytes]:
        self.engine.check_alive()
        heads = {key.detection_length: head for key, head in self.heads.items() if key.adapter == adapter}
        head = heads[self._named(detection_length, heads, "quality head")]
        return head, self.head_file(head)

    @staticmethod
    def head_file(head: HeadInfo, model: str = MODEL) -> bytes:
        metadata = {"model": model, **{name: str(value) for name, value in _fields(head).items()}}
        return save({"w1": np.zeros((HIDDEN_SIZE, 4), np.float32)}, metadata)

    async def set_quality_head(self, weights: bytes, adapter: str = BASE_MODEL) -> HeadInfo:
        self.engine.check_alive()
        try:
            length = int.from_bytes(weights[:8], "little")
            metadata = json.loads(weights[8 : 8 + length])["__metadata__"]
            del metadata["model"]
            head = HeadInfo(**{name: int(value) for name, value in metadata.items()}, adapter=adapter)
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(
                f"the body is no quality head ({error!r:.80}). Send what GET /v1/quality_head gave."
            ) from error
        self.heads[head.key] = head
        return head

    async def learning_report(self, detection_length: int | None, adapter: str = BASE_MODEL) -> LearningReport:
        self.engine.check_alive()
        self.num_reports += 1
        memory = self.learned(adapter)
        length = self._named(detection_length, memory.learnings, "report")
        rules = report_of(memory.learnings[length])
        head = self.heads.get(HeadKey(length, adapter))
        return LearningReport(
            detection_length=length,
            head=head,
            signals=rules.signals,
            num_awaiting=self.judge.ledger.num_awaiting(adapter)[length],
            num_evicted=memory.num_evicted[length],
            losses=[0.7 / (version + 1) for version in range(head.version if head else 0)],
            active=rules.active,
            shadow=rules.shadow,
            audit=rules.audit,
            advice=advise(memory.learnings[length].outcomes(), length),
            adapter=adapter,
        )

    async def learning_state(self) -> bytes:
        self.engine.check_alive()
        lines = [json.dumps(row) for row in (state_header(MODEL), *self.judge.memories.to_state())]
        for head in self.heads.values():
            data = json.dumps(_fields(head))
            lines += [json.dumps(head_line(len(data), head.adapter)), data]
        # A head's bytes are followed by the next line at once.
        text = "".join(line if line.startswith('{"detection_length"') else f"{line}\n" for line in lines)
        return f"{text}{json.dumps([END, len(self.heads)])}\n".encode()

    async def set_learning_state(self, state: bytes, keep: KeepState | None = None) -> None:
        self.engine.check_alive()
        try:
            _, rows, head_states = parse_state(state)
            memories = self.judge.memories.restored(rows)
            saved = head_states(list(memories.all()))
            heads = [HeadInfo(**json.loads(data), adapter=adapter) for adapter, data in saved]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RequestError(
                f"the body is no learning state ({error!r:.80}). Send what GET /v1/rollouts/state gave."
            ) from error
        if keep is not None:
            await keep("")
        self.judge.memories.take_over(memories)
        self.heads = {head.key: head for head in heads}

    def memory(self, adapter: str) -> Memory:
        """Memory of an adapter. The memory of an unused name is empty."""
        return self.judge.memories.known(adapter) or self.judge.memories.new()

    def learned(self, adapter: str) -> PruningMemory:
        return self.judge.known(adapter) or PruningMemory()

    def _named(self, detection_length: int | None, known: Mapping[int, Any], what: str) -> int:
        lengths = ", ".join(map(str, known)) or "none"
        meant = set(known) - {WHOLE} or set(known)
        if detection_length is None and known:
            return meant.pop()
        if detection_length is None or detection_length not in known:
            raise RequestError(
                f"detection_length: no {what} for {detection_length}; there are: {lengths}. Post rewards first.",
                status=HTTPStatus.NOT_FOUND,
                param="detection_length",
            )
        return detection_length


FAKE = FakeLearning


def _fields(head: HeadInfo) -> dict[str, int]:
    """Fields of a head's file. The adapter is not among them."""
    return {name: getattr(head, name) for name in HeadInfo.__dataclass_fields__ if name != "adapter"}
