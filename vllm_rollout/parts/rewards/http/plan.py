"""Rewards in the life of a rollout: the server grades its trajectories while it runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vllm_rollout.config import MAX_REMEMBERED_CANDIDATES
from vllm_rollout.kernel.http.clients import owned_name
from vllm_rollout.kernel.http.engine import PreparedPrompt
from vllm_rollout.kernel.http.plan_port import Given, GroupPart, GroupRecord, PlanPart, RolloutPart, Tell
from vllm_rollout.kernel.http.protocol import Prompt, RewardOptions, RolloutRequest
from vllm_rollout.kernel.http.rollout import Rollout
from vllm_rollout.kernel.http.slices import each
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.rewards import NamedReward, Reward
from vllm_rollout.parts.rewards.http.candidates import LaunchedCandidates
from vllm_rollout.parts.rewards.http.group import GradedGroup
from vllm_rollout.parts.rewards.http.service import Grading, GradingService, Question, RewardsPart, options_of


class RewardsPlan(PlanPart):
    """All rollouts of the service. Overrides: fields, asked."""

    fields = frozenset(("reward",))

    def __init__(self, given: Given) -> None:
        part = given.engine.find(RewardsPart)
        self.engine = given.engine
        self.rewards = given.rewards
        self.grading = GradingService(None, given.metrics) if part is None else part.grading

    def asked(self, request: RolloutRequest) -> GradedRollout | None:
        return None if request.reward is None else GradedRollout(self, options_of(request.reward))


class GradedRollout(RolloutPart):
    """A rollout with a reward. Overrides: check, ready, begun, group, warn, leave."""

    _rollout: Rollout
    _grading: Grading
    _num_forgotten = 0
    """Rewards that were not learned from, since the engine no longer knew their candidates."""

    def __init__(self, plan: RewardsPlan, options: RewardOptions) -> None:
        self._plan = plan
        self._options = options

    def check(self, request: RolloutRequest, plan: GroupPlan) -> None:
        self._plan.grading.check(self._options, len(request.prompts) * request.group_size)

    async def ready(self, request: RolloutRequest, rollout: Rollout) -> None:
        engine = self._plan.engine

        def question(pair: tuple[Prompt, PreparedPrompt]) -> Question:
            prompt, prepared = pair
            return Question(prompt.messages or prompt.prompt or engine.prompt_text(prepared), prompt.data)

        self._rollout = rollout
        self._grading = Grading(
            self._options,
            await each(zip(request.prompts, rollout.prompts, strict=True), question),
            len(request.prompts) * request.group_size,
            self._plan.grading,
            request.max_candidates,
        )

    def begun(self, tell: Tell) -> None:
        self._grading.promise()

    def group(self, record: GroupRecord) -> GroupPart:
        candidates = LaunchedCandidates(self._plan.engine, record, self._grading.waves)
        return GradedGroup(self._grading, record, candidates, self._teach)

    async def warn(self) -> Sequence[str]:
        if not self._num_forgotten:
            return ()
        warning = (
            f"{self._num_forgotten} rewards teach nothing: the engine has forgotten their candidates. It remembers "
            f"{MAX_REMEMBERED_CANDIDATES} of rollouts with pruning: have fewer on their way at a time."
        )
        return [warning]

    def leave(self) -> Collection[str]:
        self._grading.leave()
        return self._grading.waves

    async def _teach(self, group: GroupRecord) -> None:
        """Learn from the rewards of a group, if its candidates are scored."""
        rollout, threshold = self._rollout, self._options.threshold
        name = owned_name(rollout.namespace, rollout.id)
        rewards = [
            NamedReward("rollout", name, Reward(group.prompt.id, index, reward, reward > threshold))
            for index, grade in group.grades.items()
            if (reward := grade.reward) is not None
        ]
        if rewards and rollout.is_scored:
            self._num_forgotten += await self._plan.rewards.tell(rewards, rollout.id)
