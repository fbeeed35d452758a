"""A candidate's per-step outputs as fewer messages. Invariant: nothing an output carries is lost or reordered."""

from __future__ import annotations

import numpy as np
from vllm.v1.engine import EngineCoreEvent, EngineCoreOutput
from vllm.v1.outputs import LogprobsLists


def keep_first(output: EngineCoreOutput, num_tokens: int) -> None:
    """Take from a step's output what comes after that many of its tokens."""
    output.new_token_ids = output.new_token_ids[:num_tokens]
    if (logprobs := output.new_logprobs) is not None:
        output.new_logprobs = LogprobsLists(
            logprobs.logprob_token_ids[:num_tokens],
            logprobs.logprobs[:num_tokens],
            logprobs.sampled_token_ranks[:num_tokens],
        )
    if output.routed_experts is not None:
        output.routed_experts = output.routed_experts[:num_tokens]


def own_columns(logprobs: LogprobsLists, num_logprobs: int) -> LogprobsLists:
    """The columns that this candidate has asked for. vLLM makes rows as wide as the widest request of their step.

    A row begins with the sampled token. `num_logprobs`: how many others come after it; -1: all.
    """
    if num_logprobs < 0 or logprobs.logprobs.ndim < 2 or logprobs.logprobs.shape[1] <= num_logprobs + 1:
        return logprobs
    # Copied, so that the step's own arrays are let go.
    token_ids, values = (
        array[:, : num_logprobs + 1].copy() for array in (logprobs.logprob_token_ids, logprobs.logprobs)
    )
    return LogprobsLists(token_ids, values, logprobs.sampled_token_ranks)


def joined(rows: list[LogprobsLists]) -> LogprobsLists:
    """Rows of several steps. vLLM makes a row too narrow beside a request with `logprob_token_ids`.

    Such a row is filled with its first entry, the sampled token, of which that says nothing new.
    """
    widest = max(row.logprobs.shape[-1] for row in rows)

    def first_repeated(array: np.ndarray) -> np.ndarray:
        if array.ndim < 2 or array.shape[1] == widest:
            return array
        return np.concatenate([array, np.repeat(array[:, :1], widest - array.shape[1], axis=1)], axis=1)

    return LogprobsLists(
        np.concatenate([first_repeated(row.logprob_token_ids) for row in rows]),
        np.concatenate([first_repeated(row.logprobs) for row in rows]),
        np.concatenate([row.sampled_token_ranks for row in rows]),
    )


class HeldOutputs:
    """What one candidate's unsent outputs carried. The outputs themselves are let go: a step makes one per candidate.

    The first output passes at once: it carries the prefill statistics that time to first token is made of.
    """

    __slots__ = (
        "_events",
        "_logprobs",
        "_num_logprobs",
        "_num_nans",
        "_routed_experts",
        "_token_ids",
        "interval",
        "passes_next",
    )

    def __init__(self, interval: int, num_logprobs: int | None = None) -> None:
        self.interval = interval
        """Tokens per message."""
        self._num_logprobs = -1 if num_logprobs is None else num_logprobs
        """Log probabilities of each token that the candidate has asked for, beside its own; -1: all that come."""
        self.passes_next = True
        """The next output passes at once."""
        self._token_ids: list[int] = []
        self._logprobs: list[LogprobsLists] = []
        self._routed_experts: list[np.ndarray] = []
        self._events: list[EngineCoreEvent] = []
        self._num_nans = 0

    def add(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """Take an output that is not the last one; returns what is to be sent now, if anything."""
        if self.passes_next:
            self.passes_next = self.interval == 1
            return self.finish(output)
        self._collect(output)
        # A sampling mask cannot be merged, so its output must not wait for another one.
        if len(self._token_ids) < self.interval and output.new_sampling_mask is None:
            return None
        return self._release(output)

    def copy(self, request_id: str) -> EngineCoreOutput | None:
        """Everything held, as one output that is not to be sent; None when nothing is."""
        return self._fill(EngineCoreOutput(request_id, [])) if self._token_ids else None

    def attach(self, held: EngineCoreOutput | None, *, passes_next: bool) -> None:
        """Go on where another one let go."""
        self.passes_next = passes_next
        if held is not None:
            self._collect(held)

    def finish(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Everything held, together with this output."""
        if not self._token_ids:
            if output.new_logprobs is not None:
                output.new_logprobs = own_columns(output.new_logprobs, self._num_logprobs)
            return output
        self._collect(output)
        return self._release(output)

    def _collect(self, output: EngineCoreOutput) -> None:
        self._token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            self._logprobs.append(own_columns(output.new_logprobs, self._num_logprobs))
        if output.routed_experts is not None:
            self._routed_experts.append(output.routed_experts)
        if output.events is not None:
            self._events += output.events
        if output.num_nans_in_logits:
            self._num_nans = max(self._num_nans, output.num_nans_in_logits)

    def _release(self, output: EngineCoreOutput) -> EngineCoreOutput:
        self._fill(output)
        self._token_ids, self._logprobs, self._routed_experts, self._events, self._num_nans = [], [], [], [], 0
        return output

    def _fill(self, output: EngineCoreOutput) -> EngineCoreOutput:
        output.new_token_ids = self._token_ids
        if self._logprobs:
            output.new_logprobs = joined(self._logprobs)
        if self._routed_experts:
            output.routed_experts = np.concatenate(self._routed_experts)
        if self._events:
            output.events = self._events
        output.num_nans_in_logits = self._num_nans
        return output
