"""A running rollout: its checked request, the course of its prompts, and its results so far.

Invariants: generated + resumed = returned + wasted tokens. Each prompt is started at most once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_rollout.config import MAX_CANDIDATES
from vllm_rollout.kernel.http.answers import GroupAnswer, RanksFreeEvent, RedundancyBudget, Timing, Usage
from vllm_rollout.kernel.http.engine import CandidateEnd, GroupOrder, Outlook, PreparedPrompt, RequestError
from vllm_rollout.kernel.http.plan_port import RolloutPart
from vllm_rollout.kernel.http.protocol import Included, RolloutRequest
from vllm_rollout.kernel.rules.fields import OnEngineFailure
from vllm_rollout.kernel.rules.plan import GroupPlan, PromptPlan
from vllm_rollout.kernel.rules.receipt import Receipt
from vllm_rollout.kernel.rules.request_names import names_of_group
from vllm_rollout.kernel.rules.rewards import Grade, GradeStatus
from vllm_rollout.kernel.rules.types import CandidateState, GroupResult


class Course:
    """Decides which prompts of a rollout start: all of them, in the given order."""

    def __init__(self, positions: Sequence[int]) -> None:
        """`positions`: those of the prompts in the rollout."""
        self._positions = positions

    async def positions(self) -> AsyncIterator[int]:
        """Prompts to start, each as soon as that is decided. Ends when no more will start."""
        for position in self._positions:
            yield position

    def stopped(self) -> Awaitable[object] | None:
        """An awaitable that is done when no prompt may start for now. None: that never happens."""
        return None

    def starts(self, position: int) -> bool:
        """True if the prompt starts, now that there are places for its group."""
        return True


@dataclass(slots=True)
class RolloutOutcome:
    """Results of a rollout so far."""

    num_ended: int = 0
    """Number of candidates that have ended."""
    freed: RanksFreeEvent | None = None
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    started_s: dict[int, float] = field(default_factory=dict)
    """Seconds from the rollout's beginning until a group got its places, by position."""
    versions: set[str] = field(default_factory=set)
    """Versions of the weights that sampled a token."""
    reward_error: str | None = None
    """Reason of the first grade with status `error`."""
    error: str | None = None
    """Error of the first candidate that failed for a known reason."""
    off_policy: bool = False
    """True if any trajectory is off policy."""
    receipt: Receipt | None = None
    """None before the rollout's end. Its token counts are replaced by those of `usage`, which include groups of an
    interrupted round."""

    @property
    def weight_version(self) -> str | None:
        """The version that sampled every token. None if there is none, or more than one."""
        return next(iter(self.versions)) if len(self.versions) == 1 else None

    def ended_before(self, group: GroupAnswer) -> None:
        """Count a group that was complete when its round was interrupted. Its tokens are resumed ones."""
        usage = self.usage
        returned = sum(each.num_tokens for each in group.trajectories)
        wasted = sum(each.num_tokens for each in group.candidates)
        usage.returned_tokens += returned
        usage.wasted_tokens += wasted
        usage.resumed_tokens += returned + wasted
        usage.num_candidates += len(group.trajectories) + len(group.candidates)
        for candidate in group.candidates:
            self._count_ended(candidate.state)
        for trajectory in group.trajectories:
            self._count_ended("finished")
            self._count_reward(trajectory.reward, trajectory.reward_status, trajectory.reward_reason)
            self.versions.update(span["version"] for span in trajectory.weight_versions)
        self.off_policy |= group.off_policy

    def group_over(
        self, result: GroupResult, ends: Collection[CandidateEnd], grades: Iterable[Grade], latency_s: float
    ) -> None:
        usage = self.usage
        usage.generated_tokens += result.generated_tokens
        usage.returned_tokens += result.returned_tokens
        usage.wasted_tokens += result.wasted_tokens
        usage.resumed_tokens += result.resumed_tokens
        usage.num_candidates += len(result.endings)
        for ending in result.endings:
            self._count_ended(ending.state)
        self.error = self.error or next((end.error for end in ends if end.error is not None), None)
        if self.timing.time_to_first_group_s is None:
            self.timing.time_to_first_group_s = latency_s
        for grade in grades:
            self._count_reward(grade.reward, grade.status, grade.reason)
        self.versions.update(span["version"] for end in ends for span in end.weight_versions)

    def warnings(self) -> Iterator[str]:
        """Warnings at the rollout's end."""
        usage = self.usage
        if self.error is not None:
            yield (
                f"{usage.num_failed} of {usage.num_candidates} candidates failed, the first one for this reason: "
                f"{self.error}"
            )
        if usage.num_reward_errors:
            yield (
                f"{usage.num_reward_errors} of {usage.num_reward_errors + usage.num_rewards + usage.num_voids} "
                f"trajectories have no reward; of the first one: {self.reward_error}"
            )

    def _count_ended(self, state: CandidateState) -> None:
        counter = f"num_{state}"
        setattr(self.usage, counter, getattr(self.usage, counter) + 1)

    def _count_reward(self, reward: float | None, status: GradeStatus | None, reason: str | None) -> None:
        """Count a trajectory's grade. All arguments are None if it was not to be graded."""
        self.usage.num_rewards += reward is not None
        self.usage.num_reward_timeouts += status == "timeout"
        if status == "error":
            self.usage.num_reward_errors += 1
            self.reward_error = self.reward_error or reason
        self.usage.num_voids += status == "void"


@dataclass(slots=True)
class Rollout:
    """A checked request that is ready to run."""

    id: str
    created: int
    namespace: str
    """Namespace of the client."""
    model: str
    adapter: str
    """Name of the LoRA adapter, for which results are learned."""
    plans: list[PromptPlan]
    """One plan per prompt."""
    prompts: list[PreparedPrompt]
    seed_names: Sequence[str]
    """One name per prompt. Its seed follows from this and the request's seed."""
    included: Set[Included]
    stream_tokens: int | None
    course: Course
    on_engine_failure: OnEngineFailure = "fail"
    """Action for groups that the engine loses."""
    priority: int = 0
    """A lower number gets places earlier."""
    source: object = None
    """The object of a part that runs many rollouts at once, and takes turns with others. None: no part does."""
    budget: RedundancyBudget | None = None
    """None without redundancy "auto"."""
    warnings: list[str] = field(default_factory=list)
    is_graded: bool = False
    """True if the server grades its trajectories."""
    has_client: bool = False
    """True if a client's request waits for its end. False if a part runs it, and may stop it by itself."""
    is_aborted: bool = False
    """True if a client has aborted it. No group of it starts any more."""
    stops_groups: bool = False
    """True if some of its groups are stopped when enough others are complete."""
    began_with: str | None = None
    """Version of the weights at its beginning, for candidates that continue from an earlier rollout. None if it has
    no name, or if no candidate continues."""
    outcome: RolloutOutcome = field(default_factory=RolloutOutcome)
    parts: Sequence[RolloutPart] = ()
    """Objects of parts, in the order in which they hear."""
    labels: dict[str, Any] = field(default_factory=dict)
    """Names that a part gives the rollout, for its row in viewers and recordings."""

    def group_id(self, position: int) -> str:
        """The engine's name for the group of the prompt at `position`."""
        return f"{self.id}-{position}"

    @property
    def names(self) -> set[str]:
        """All names by which a client may abort it."""
        return names_of_group(self.group_id(0))

    def order(self, position: int, *, may_move: bool) -> GroupOrder:
        """The order to run the group of the prompt at `position`. `may_move`: there are other ranks."""
        prompt, plan = self.prompts[position], self.plans[position]
        outlook = Outlook(plan.lengths, len(prompt.token_ids), prompt.max_tokens)
        return GroupOrder(
            group_id=self.group_id(position),
            plan=plan.group,
            prompt=prompt,
            seed_name=self.seed_names[position],
            stream_tokens=self.stream_tokens,
            outlook=outlook if may_move else None,
            priority=self.priority,
        )

    @property
    def num_responses(self) -> int:
        """Number of candidates at the start."""
        return sum(plan.group.num_candidates for plan in self.plans)

    def envelope(self) -> dict[str, Any]:
        """Fields of every answer and of the last event, without groups."""
        pruning = self.plans[0].group.pruning
        return {
            "id": self.id,
            "created": self.created,
            "model": self.model,
            "weight_version": self.outcome.weight_version,
            "warnings": self.warnings,
            "budget": self.budget,
            "detection_length": None if pruning is None else pruning.detection_length,
            "off_policy": self.outcome.off_policy,
            "freed": self.outcome.freed,
            "usage": self.outcome.usage,
            "timing": self.outcome.timing,
            "receipt": self.receipt,
        }

    @property
    def receipt(self) -> Receipt | None:
        written, usage = self.outcome.receipt, self.outcome.usage
        names = ("generated_tokens", "returned_tokens", "wasted_tokens", "resumed_tokens")
        return written and replace(written, **{name: getattr(usage, name) for name in names})

    @property
    def is_scored(self) -> bool:
        """True if its candidates are scored, and rewards of them are learned from."""
        return self.plans[0].group.pruning is not None

    def ended_before(self, group: GroupAnswer) -> None:
        """Count a group that was complete when the rollout was interrupted."""
        self.outcome.ended_before(group)
        for part in self.parts:
            part.ended_before(group)

    def rewarded(self, rewards: Sequence[tuple[str, int, float]]) -> None:
        """Pass on rewards that were posted while the rollout runs. Each is (prompt id, index, reward)."""
        for part in self.parts:
            part.rewarded(rewards)


def alike(request: RolloutRequest, plan: GroupPlan) -> list[str]:
    """Warnings about candidates that cannot differ."""
    said = request.sampling_params
    field = "temperature" if said.get("temperature") == 0 else "top_k" if said.get("top_k") == 1 else None
    if field is None or plan.num_candidates == 1:
        return []
    warning = (
        f"sampling_params.{field}: with {said[field]} all {plan.num_candidates} candidates of a prompt are the same. "
        "Nothing can be learned from their group, and spare ones only cost time. Sample with a temperature above 0."
    )
    return [warning]


def cut(request: RolloutRequest, max_model_len: int) -> list[str]:
    """Warnings about answers that end before `max_tokens`. vLLM's endpoints refuse such requests."""
    said = request.sampling_params.get("max_tokens")
    if not isinstance(said, int) or said <= max_model_len:
        return []
    warning = (
        f"sampling_params.max_tokens: {said} tokens do not fit into the context of {max_model_len} tokens, where "
        "answers end. Lower it, or start the server with a larger --max-model-len."
    )
    return [warning]


def check_num_candidates(num_prompts: int, num_candidates: int) -> None:
    """Raises: RequestError for too many candidates in a request."""
    if num_prompts * num_candidates > MAX_CANDIDATES:
        raise RequestError(
            f"prompts: {num_prompts} of up to {num_candidates} candidates are {num_prompts * num_candidates} "
            f"candidates, at most {MAX_CANDIDATES} are allowed in a request. Send fewer prompts per request.",
            param="prompts",
        )


def check_max_candidates(request: RolloutRequest, plan: GroupPlan) -> None:
    """Raises: RequestError for a group that begins with more candidates than it may ever have."""
    if request.max_candidates is not None and request.max_candidates < plan.num_candidates:
        raise RequestError(
            f"max_candidates: a group may begin with {plan.num_candidates} (group_size + redundancy), got "
            f"{request.max_candidates}. Say at least as many, or leave it out.",
            param="max_candidates",
        )
