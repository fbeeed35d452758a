"""Dry runs of the scheduler with traceable tokens, and what tests ask of them."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.support.dry_run import EOS_TOKEN, DryRun
from vllm_rollout.adapter.options import Options, ServeOptions
from vllm_rollout.kernel.core.scheduler import AsyncRolloutScheduler, RolloutScheduler
from vllm_rollout.kernel.rules.step import GroupSteps
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.rules.terms_port import PartTerms
from vllm_rollout.kernel.wire import CandidateTag, EndingNote

REQUEST_STRIDE = 10_000
"""The k-th token of the n-th request is n * REQUEST_STRIDE + k, its last one EOS_TOKEN."""


NO_AUDITS = ServeOptions(audit_ratio=0.0)
"""Options without random audits."""


End = tuple[str, FinishReason, int | str | None]
"""State, and what vLLM says of it."""
WON: End = ("finished", FinishReason.STOP, None)
CUT: End = ("finished", FinishReason.LENGTH, None)
LOST: End = ("surplus", FinishReason.ABORT, "surplus")
ABORTED: End = ("failed", FinishReason.ABORT, None)


class Loop(NamedTuple):
    name: str
    scheduler_cls: type[Scheduler]
    stock_cls: type[Scheduler]
    depth: int


LOOPS = [Loop("sync", RolloutScheduler, Scheduler, 1), Loop("async", AsyncRolloutScheduler, AsyncScheduler, 2)]


class TracedRun(DryRun):
    """A dry run whose tokens say whose they are and which; the k-th has logprob -k and rank k.

    Candidates that said the same would share their blocks through the prefix cache.
    """

    def __init__(self, *args: Any, num_blocks: int = 2000, options: Options = NO_AUDITS, **kwargs: Any) -> None:
        super().__init__(*args, num_blocks=num_blocks, options=options, **kwargs)
        self.num_blocks_at_rest = self.num_free_blocks
        self.requests: dict[str, Request] = {}
        """Every request ever added."""
        self.scripts: dict[str, list[int]] = {}
        """Tokens of the requests that say something in particular."""

    def add(self, request_id: str, length: int, **kwargs: Any) -> Request:
        request = self.requests[request_id] = super().add(request_id, length, **kwargs)
        return request

    def sample(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        output = super().sample(scheduled)
        counts = [self.num_sampled.get(request_id, 0) for request_id in output.req_ids]
        for request_id, row, count in zip(output.req_ids, output.sampled_token_ids, counts, strict=True):
            if row and row != [EOS_TOKEN]:
                script = self.scripts.get(request_id, ())
                row[0] = script[count - 1] if count <= len(script) else self.first_token(request_id) + count - 1
        tokens = np.array([[row[0] if row else -1] for row in output.sampled_token_ids]).reshape(-1, 1)
        positions = np.array(counts, dtype=np.float32)
        output.logprobs = LogprobsLists(tokens, -positions[:, None], positions.astype(np.int64))
        return output

    def first_token(self, request_id: str) -> int:
        return (1 + list(self.requests).index(request_id)) * REQUEST_STRIDE + 1

    def own_tokens(self, request_id: str, num_tokens: int) -> list[int]:
        """First tokens of a request without a script."""
        first = self.first_token(request_id)
        return list(range(first, first + num_tokens))

    def tokens(self, request_id: str) -> list[int]:
        """Tokens delivered for a request, over all its messages."""
        return [token for output in self.outputs.get(request_id, ()) for token in output.new_token_ids]

    def note(self, request_id: str) -> EndingNote:
        """The note on a request's last output."""
        note, rest = EndingNote.take(self.last(request_id).kv_transfer_params)
        assert note is not None
        assert rest is None
        return note

    def state(self, request_id: str) -> str:
        return self.note(request_id).state

    def states(self) -> dict[str, str]:
        return {request_id: self.state(request_id) for request_id in self.outputs}

    def end(self, request_id: str) -> End:
        last = self.last(request_id)
        return self.state(request_id), last.finish_reason, last.stop_reason

    def ends(self, request_ids: Iterable[str]) -> list[End]:
        return [self.end(request_id) for request_id in request_ids]

    def abort(self, *request_ids: str) -> None:
        """Abort requests, as their client does."""
        self.scheduler.finish_requests(list(request_ids), RequestStatus.FINISHED_ABORTED)

    def num_dropped(self, request_id: str) -> int:
        """Tokens sampled for a request but never delivered."""
        return self.num_sampled.get(request_id, 0) - self.num_tokens(request_id)

    def record_steps(self) -> list[dict[int, EngineCoreOutputs]]:
        """Record the scheduler's outputs of each later step, by client."""
        steps: list[dict[int, EngineCoreOutputs]] = []
        update_from_output = self.scheduler.update_from_output

        def update_and_record(*args: Any) -> dict[int, EngineCoreOutputs]:
            steps.append(update_from_output(*args))
            return steps[-1]

        self.scheduler.update_from_output = update_and_record
        return steps


def add_group(
    run: TracedRun,
    group_id: str,
    lengths: list[int],
    group_size: int,
    *,
    early_stop: bool = True,
    interval: int = 64,
    joined: bool = False,
    num_candidates: int | None = None,
    patience: float | None = None,
    num_replaceable: int = 0,
    parts: Mapping[str, PartTerms] | None = None,
    said: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> list[str]:
    """Add one candidate per length; returns their request ids.

    `joined` leaves the numbering to the scheduler, as requests with a rollout_group_id do. `parts` are terms of the
    group, and `said` values of each candidate, by part.
    """
    request_ids = []
    terms = GroupTerms(group_size, num_candidates or len(lengths), early_stop, patience, num_replaceable, parts or {})
    for index, length in enumerate(lengths):
        tag = CandidateTag(group_id, None if joined else index, terms, interval, dict(said or {}))
        request_ids.append(f"{group_id}-{index}")
        run.add(request_ids[-1], length, extra_args=tag.to_extra_args(), **sampling)
    return request_ids


def assert_nothing_left(run: TracedRun) -> None:
    """The scheduler is as it was before the first request."""
    scheduler = run.scheduler
    assert not scheduler.requests
    assert not scheduler.running
    assert not scheduler.waiting
    assert run.num_free_blocks == run.num_blocks_at_rest
    if not isinstance(scheduler, (RolloutScheduler, AsyncRolloutScheduler)):
        return
    assert scheduler._candidates == {}
    assert scheduler.launched == {}
    assert scheduler._ended == []
    assert scheduler._num_with_stop_strings == 0
    assert_nothing_open(scheduler.group_steps)


def assert_nothing_open(steps: GroupSteps) -> None:
    """No group is left, and nothing waits for the next step."""
    assert len(steps) == 0
    assert not steps.has_events
    assert steps._capped == {}
