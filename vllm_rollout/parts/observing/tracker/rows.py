"""Port of the tracker: a part that sees logits and hidden states of candidates.

Invariant: a step calls a part once, for all its rows. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from vllm_rollout.parts.observing.tracker.verified import SeenTokens

if TYPE_CHECKING:
    from vllm_rollout.kernel.wire import CandidateTag, RunnerReport


class SeenRows(NamedTuple):
    """Tokens of candidates that a step has sampled."""

    request_ids: Sequence[str]
    """Request of each row of the batch."""
    seen: SeenTokens
    slots: np.ndarray
    """int64 [num_seen]: the candidate's slot in the tracker."""
    positions: np.ndarray
    """int64 [num_seen]: number of the candidate's output tokens before this one."""
    hidden: torch.Tensor | None
    """[num_states, hidden_size]. None if no part wanted them."""
    hidden_rows: torch.Tensor | None
    """int32 or int64: the state of each row of the logits. None: both have the same rows."""

    def states_at(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of `hidden` for these rows of the logits, int64 on the device."""
        return rows if self.hidden_rows is None else self.hidden_rows.index_select(0, rows).long()


class RowValues(Protocol):
    """Values that a part has computed from a step's rows."""

    def to_host(self) -> RowValues:
        """Start copying to the host, on the current stream. The copies are filled when that stream gets there."""

    def add_to(self, report: RunnerReport) -> RunnerReport:
        """The step's report with these values, which are on the host. Runs on the thread that reads outputs."""


class RowsPart:
    """A part that sees rows. It may keep a value for each slot of the tracker.

    An exception of a hook fails all observed candidates, because a wrong or missing score is worse.
    """

    num_wanting = 0
    """Number of candidates for which the part needs hidden states."""
    refusal: str | None = None
    """Reason for which each candidate fails that must be observed for this part."""

    def observes(self, tag: CandidateTag) -> bool:
        """True if the candidate must be observed for this part."""
        return False

    def begin(self, slot: int, tag: CandidateTag, adapter: str) -> None:
        """Register a candidate. `adapter`: name of the adapter that computes it."""

    def end(self, slot: int, request_id: str) -> None:
        """Forget a candidate. Its slot is free next."""

    def forget_all(self) -> None:
        """Forget all candidates, whatever state an exception has left."""

    def grow(self) -> None:
        """Double the number of slots."""

    def choose(self, rows: SeenRows) -> Sequence[np.ndarray] | None:
        """int64 arrays that `see_rows` needs on the device. They go there in the copy of the step. None if the part has
        nothing to do in this step, in which `see_rows` is not called.
        """

    def see_rows(self, rows: SeenRows, chosen: Sequence[torch.Tensor]) -> RowValues:
        """Compute values of a step. `chosen`: the arrays of `choose`, on the device."""
        raise NotImplementedError

    def warm_up(self, logits: torch.Tensor, hidden: torch.Tensor) -> None:
        """Call each operator once in each variant, before the first step. Arguments: as of `warm_up`."""
