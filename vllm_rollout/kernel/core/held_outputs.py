"""Merges a candidate's per-step outputs into fewer messages. Invariant: no data of an output is lost or reordered."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from vllm.v1.engine import EngineCoreEvent, EngineCoreOutput
from vllm.v1.outputs import LogprobsLists


def keep_first(output: EngineCoreOutput, num_tokens: int) -> None:
    """Drop the data of a step's output after its first `num_tokens` tokens."""
    output.new_token_ids = output.new_token_ids[:num_tokens]
    if output.new_logprobs is not None:
        output.new_logprobs = output.new_logprobs.slice_request(0, num_tokens)
    if output.new_sampling_mask is not None:
        output.new_sampling_mask = output.new_sampling_mask.slice_request(0, num_tokens)
    if output.routed_experts is not None:
        output.routed_experts = output.routed_experts[:num_tokens]


def own_columns(logprobs: LogprobsLists, num_logprobs: int | None) -> LogprobsLists:
    """The columns that this candidate has asked for. vLLM makes rows as wide as the widest request of their step.

    A row begins with the sampled token. `num_logprobs`: number of further columns. None or -1: all.
    """
    if num_logprobs is None or num_logprobs < 0:
        return logprobs
    if logprobs.logprobs.ndim < 2 or logprobs.logprobs.shape[1] <= num_logprobs + 1:
        return logprobs
    # Copied, so that the step's own arrays are freed.
    token_ids, values = (
        array[:, : num_logprobs + 1].copy() for array in (logprobs.logprob_token_ids, logprobs.logprobs)
    )
    return LogprobsLists(token_ids, values, logprobs.sampled_token_ranks)


def joined(rows: list[LogprobsLists]) -> LogprobsLists:
    """Rows of several steps as one. vLLM makes a row too narrow beside a request with `logprob_token_ids`.

    Such a row is padded with its first entry, the sampled token, which adds no information.
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


@dataclass(slots=True, eq=False)
class HeldOutputs:
    """Data of one candidate's unsent outputs. The outputs themselves are dropped, because each step makes one per
    candidate.

    The first output is sent at once: it carries the prefill statistics for time to first token.
    """

    interval: int
    """Tokens per message."""
    num_logprobs: int | None = None
    """Log probabilities per token that the candidate has asked for, beside the sampled token's. None or -1: all that
    come.
    """
    passes_next: bool = True
    """True if the next output is sent at once."""
    _token_ids: list[int] = field(default_factory=list)
    _logprobs: list[LogprobsLists] = field(default_factory=list)
    _routed_experts: list[np.ndarray] = field(default_factory=list)
    _events: list[EngineCoreEvent] = field(default_factory=list)
    _num_nans: int = 0

    def add(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """Take an output that is not the last one. Returns the output to send now, if any."""
        if self.passes_next:
            self.passes_next = self.interval == 1
            return self.finish(output)
        self._collect(output)
        # A sampling mask cannot be merged, so its output must not wait for another one.
        if len(self._token_ids) < self.interval and output.new_sampling_mask is None:
            return None
        return self._release(output)

    def copy(self, request_id: str) -> EngineCoreOutput | None:
        """Everything held, as one output that is not sent. None if nothing is held."""
        return self._fill(EngineCoreOutput(request_id, [])) if self._token_ids else None

    def attach(self, held: EngineCoreOutput | None, *, passes_next: bool) -> None:
        """Continue with the state of another object of this class."""
        self.passes_next = passes_next
        if held is not None:
            self._collect(held)

    def finish(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Everything held, merged into this output."""
        if not self._token_ids:
            if output.new_logprobs is not None:
                output.new_logprobs = own_columns(output.new_logprobs, self.num_logprobs)
            return output
        self._collect(output)
        return self._release(output)

    def _collect(self, output: EngineCoreOutput) -> None:
        self._token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            self._logprobs.append(own_columns(output.new_logprobs, self.num_logprobs))
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
