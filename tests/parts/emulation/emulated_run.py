"""vLLM's scheduler on an emulated device, in this process and in no time: seconds are the device's.

Invariant: schedulers, runner, rule and step times are those of `serve --rollout-emulate`; nothing waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from tests.parts.pruning.steps import said
from tests.support.dry_run import DryRun
from vllm_rollout.kernel.core.scheduler import RolloutScheduler
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.wire import CandidateTag
from vllm_rollout.parts.drafts.options import SPECULATIVE_CONFIG
from vllm_rollout.parts.drafts.with_emulation.worker import EmulatedDrafts
from vllm_rollout.parts.emulation.device import Device
from vllm_rollout.parts.emulation.fate import LENGTHS_FIELD, Fates
from vllm_rollout.parts.emulation.settings import Settings
from vllm_rollout.parts.emulation.worker.runner import EmulatedRunner, LaunchedStep
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.with_emulation.worker import HIDDEN_SIZE, NUM_IN_FLIGHT, EmulatedHeads
from vllm_rollout.parts.pruning.worker.feature_ring import FeatureRing

VOCAB_SIZE = 32_000


class EmulatedRun(DryRun):
    """A dry run with an emulated device. Overrides: __init__, step, sample."""

    def __init__(self, model: str, settings: Settings, *, drafts: bool, **kwargs: Any) -> None:
        speculative = dict(SPECULATIVE_CONFIG) if drafts else None
        super().__init__(RolloutScheduler, model, speculative_config=speculative, **kwargs)
        most, room = SPECULATIVE_CONFIG["num_speculative_tokens"], self.scheduler.max_model_len
        self.ring = FeatureRing(HIDDEN_SIZE, torch.float32, 2**20)
        self.heads = EmulatedHeads(self.ring, 1 + (most if drafts else NUM_IN_FLIGHT))
        self.drafts = EmulatedDrafts(settings.drafts, most, room) if drafts else None
        self.runner = EmulatedRunner(Fates(settings), VOCAB_SIZE)
        self.runner.parts = [("pruning", self.heads)]
        if self.drafts is not None:
            self.runner.parts.append(("drafts", self.drafts))
        self._device = Device(settings)
        self.steps: list[LaunchedStep] = []
        self.ends: list[float] = []
        """When each of them was over."""
        self.seconds = 0.0

    def launch(
        self,
        group_id: str,
        lengths: Sequence[int],
        prompt_token_ids: list[int],
        terms: GroupTerms,
        scoring: Scoring | None = None,
        **sampling: Any,
    ) -> None:
        """A group whose candidates end by themselves after so many tokens."""
        for index, length in enumerate(lengths):
            fields = CandidateTag(group_id, index, terms, 1, said(scoring)).to_extra_args()
            self.add(
                f"{group_id}/{index}",
                length,
                prompt_token_ids=list(prompt_token_ids),
                extra_args={**fields, LENGTHS_FIELD: list(lengths)},
                seed=1000 + index,
                **sampling,
            )

    def step(self, *args: Any, **kwargs: Any) -> bool:
        stepped = super().step(*args, **kwargs)
        if stepped and self.drafts is not None and self.steps:
            self.scheduler.update_draft_token_ids(self.drafts.propose(self.steps[-1].rows))
        return stepped

    def sample(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        step = self.runner.step(scheduled)
        if step is None:
            return ModelRunnerOutput([], {}, [])
        span = self._device.launch(self.seconds, step.work)
        if self.drafts is not None:
            self.drafts.took(step.work, span.end - span.start)
        self.seconds = span.end
        self.steps.append(step)
        self.ends.append(span.end)
        return step.output

    def tokens(self, request_id: str) -> list[int]:
        """Tokens that have left the scheduler."""
        return [token for output in self.outputs.get(request_id, ()) for token in output.new_token_ids]
