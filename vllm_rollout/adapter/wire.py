"""Typed carriers between our processes. Invariant: both ends of a carrier are in this file.

tag      API process -> scheduler, worker: `SamplingParams.extra_args[TAG_KEY]`
report   worker -> scheduler: the attribute `REPORT_ATTRIBUTE` of a `ModelRunnerOutput`, a plain dataclass pickled whole
ending   scheduler -> API process: `EngineCoreOutput.kv_transfer_params[ENDING_KEY]` on a candidate's last output; the
         client takes it out again before anybody else sees it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vllm_rollout.group.types import CandidateState

TAG_KEY = "vllm_rollout"
ENDING_KEY = "vllm_rollout"
REPORT_ATTRIBUTE = "vllm_rollout_report"
SURPLUS = "surplus"
"""Stop reason, beside finish reason `abort`, of a candidate its group gave up."""


@dataclass(frozen=True, slots=True)
class CandidateTag:
    """Makes a vLLM request a candidate of a group."""

    group_id: str
    index: int | None
    """None: the scheduler numbers it by arrival (requests that join a shared group)."""
    group_size: int
    num_candidates: int
    early_stop: bool
    output_interval: int
    """Tokens per message to the API process; 1 sends every step's token at once."""

    def to_extra_args(self) -> dict[str, Any]:
        return {
            TAG_KEY: [
                self.group_id,
                self.index,
                self.group_size,
                self.num_candidates,
                self.early_stop,
                self.output_interval,
            ]
        }

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> CandidateTag | None:
        """The tag of a request's `extra_args`; None when it has none."""
        if not extra_args:
            return None
        fields = extra_args.get(TAG_KEY)
        return None if fields is None else cls(*fields)


class RunnerReport(NamedTuple):
    """What the worker saw of this step's candidates. A tuple, because it is pickled in every step."""

    mean_confidence: np.ndarray
    """float32 [num_rows], by row of the step's batch; NaN for a row that is no candidate's."""


@dataclass(frozen=True, slots=True)
class EndingNote:
    """What the scheduler knows about a candidate at its end."""

    state: CandidateState
    end_step: int
    mean_confidence: float | None
    pauses: Sequence[int] = ()
    """Output lengths at which generation was paused: held outputs blur where vLLM thinks a weight version began."""

    def to_params(self, params: dict[str, Any] | None) -> dict[str, Any]:
        return {**(params or {}), ENDING_KEY: [self.state, self.end_step, self.mean_confidence, list(self.pauses)]}

    @classmethod
    def take(cls, params: dict[str, Any] | None) -> tuple[EndingNote | None, dict[str, Any] | None]:
        """Split a request output's `kv_transfer_params` into our note and what was there without it."""
        if not params or ENDING_KEY not in params:
            return None, params
        rest = {key: value for key, value in params.items() if key != ENDING_KEY}
        return cls(*params[ENDING_KEY]), rest or None
