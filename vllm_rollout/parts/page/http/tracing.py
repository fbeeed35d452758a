"""OpenTelemetry spans of rollouts, for the tracer provider that vLLM makes with `--otlp-traces-endpoint`.

A rollout is one span in the trace of its HTTP request. Its phases and groups are child spans. vLLM's `llm_request` span
of a candidate is a child of its group.

Invariant: without a provider there are no spans, and the engine gets no trace headers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN_ID, Span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from vllm_rollout.kernel.http.answers import Usage
from vllm_rollout.kernel.http.clients import client_headers
from vllm_rollout.kernel.rules.types import STOP_STATES
from vllm_rollout.parts.page.recording.rows import RolloutPrompt, RolloutRow

tracer = trace.get_tracer("vllm_rollout")
PROPAGATOR = TraceContextTextMapPropagator()
OF_ROW = ("model", "state", "run", "round", "kind", "group_size", "num_prompts", "num_candidates")
OF_USAGE = ("generated_tokens", "returned_tokens", "wasted_tokens", "resumed_tokens", "num_surplus", "num_pruned")
"""Attributes of a rollout's span. `state` is `over`, or `left` if the client went away."""


def begin() -> RolloutTrace | None:
    """The trace of the rollout that is being requested. None if nothing is traced.

    It belongs to the client's trace (`traceparent`), unless a span of this process is open.
    """
    asked, parent, headers = None, trace.get_current_span(), client_headers()
    if "traceparent" in headers and not parent.get_span_context().is_valid:
        asked = PROPAGATOR.extract(headers)
        parent = trace.get_current_span(asked)
    span = tracer.start_span("rollout", asked)
    without_provider = (INVALID_SPAN_ID, parent.get_span_context().span_id)
    return None if span.get_span_context().span_id in without_provider else RolloutTrace(span)


class RolloutTrace:
    """The spans of one rollout. Id and parent are set at the beginning, attributes at the end."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._context = trace.set_span_in_context(span)
        self._asked = time.time()
        self._groups: dict[int, Span] = {}
        """Group spans by position."""

    def begin_group(self, position: int, at: float) -> Mapping[str, str]:
        """Begin the span of a group. Returns trace headers for its candidates. `at`: Unix seconds."""
        span = self._groups[position] = tracer.start_span("group", self._context, start_time=_ns(at))
        headers: dict[str, str] = {}
        PROPAGATOR.inject(headers, trace.set_span_in_context(span))
        return headers

    def end(self, row: RolloutRow, usage: Usage) -> None:
        """End all spans. `row`: a finished rollout."""
        if not self._span.is_recording():  # sampled out
            return
        assert row.began is not None
        assert row.seconds is not None
        for name, start_s, end_s in _phases(row, self._asked - row.began):
            phase = tracer.start_span(name, self._context, start_time=_ns(row.began + start_s))
            phase.end(_ns(row.began + end_s))
        for prompt in row.prompts:
            assert prompt.position is not None
            assert prompt.over_s is not None
            group = self._groups.pop(prompt.position, None)
            if group is not None:
                group.set_attributes(_of_group(prompt))
                group.end(_ns(row.began + prompt.over_s))
        for group in self._groups.values():  # its client left before
            group.end(_ns(row.began + row.seconds))
        self._span.set_attributes(_of_rollout(row, usage))
        self._span.end(_ns(row.began + row.seconds))


def _phases(row: RolloutRow, asked_s: float) -> Iterator[tuple[str, float, float]]:
    """(name, start, end) of each phase, in seconds after the rollout began. Phases without duration are left out,
    except `preparing`."""
    yield "preparing", asked_s, 0.0
    started = [prompt.started_s for prompt in row.prompts if prompt.started_s is not None]
    ended = [at for prompt in row.prompts for at in prompt.ended_s or () if at is not None]
    if not started or not ended:
        return
    over = last = max(ended)
    if any(prompt.reward_status for prompt in row.prompts):
        over = max([last, *(prompt.over_s for prompt in row.prompts if prompt.over_s is not None)])
    for name, start, end in (
        ("waiting", 0.0, max(started)),
        ("generating", min(started), last),
        ("grading", last, over),
        ("answering", over, row.seconds or 0.0),
    ):
        if end > start:
            yield name, start, end


def _of_rollout(row: RolloutRow, usage: Usage) -> dict[str, Any]:
    told = {name: getattr(row, name) for name in OF_ROW} | {name: getattr(usage, name) for name in OF_USAGE}
    return _named("rollout", {"id": row.rollout_id, **told})


def _of_group(prompt: RolloutPrompt) -> dict[str, Any]:
    ends = prompt.ends or []
    return _named(
        "group",
        {
            "prompt_id": prompt.id,
            "status": prompt.status,
            "reason": prompt.reason,
            "num_candidates": len(prompt.lengths),
            "num_stopped": sum(end in STOP_STATES for end in ends),
            "num_tokens": sum(prompt.lengths),
            "waited_s": prompt.started_s,
            "rank": prompt.rank,
            "num_moves": len(prompt.moves or (0,)) - 1,
        },
    )


def _named(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{name}": value for name, value in values.items() if value is not None}


def _ns(at: float) -> int:
    return round(at * 1e9)
