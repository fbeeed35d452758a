"""Candidates whose reward may still come. Invariant: a reward counts once, and every reward gets a status."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_rollout.config import MAX_REMEMBERED_CANDIDATES
from vllm_rollout.kernel.rules.prompt_key import kept_name
from vllm_rollout.kernel.rules.rewards import EVERYBODY, AnswerName, NamedReward, RewardStatus
from vllm_rollout.kernel.rules.types import BASE_MODEL, CandidateId, CandidateState
from vllm_rollout.parts.pruning.rules.assessment import Assessment
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey, Observation, PruningPlan
from vllm_rollout.parts.pruning.rules.race_bias import LabelOrigin


@dataclass(frozen=True, slots=True)
class Scoring:
    """Data for scores of a candidate, and the names under which its reward may come."""

    rollout_id: str
    prompt_id: str
    seed: int
    """Random draws depend on (seed, prompt_id, index)."""
    answer: AnswerName | None = None
    """Name of a candidate that is a request of its own. None: it has another name."""
    parent: AnswerName | None = None
    """Second name of a candidate that may be one of several choices of a request, by the name of that request.

    A request that really has this name takes precedence.
    """
    prompt_key: str = ""
    """Key of the prompt's success and lengths over rollouts. Empty: these are not recorded."""
    adapter: str = BASE_MODEL
    """Name of the LoRA adapter, as the engine states it. So a client cannot send rewards to another adapter's head."""
    num_resumed: int = 0
    """Tokens of the candidate from earlier rounds."""
    survival_before: float = 1.0
    """Probability that earlier rounds kept the candidate."""


class EntryKey(NamedTuple):
    """Key of a candidate in the ledger."""

    rollout_id: str
    prompt_id: str
    index: int  # type: ignore[assignment]  # of a tuple's methods nobody here needs `index`


class Trial(NamedTuple):
    """A score without a decision, with the decision that it would have caused."""

    observation: Observation
    assessment: Assessment


@dataclass(slots=True)
class _RememberedGroup:
    """Place of a group's candidates, while at least one of them is remembered."""

    rollout_id: str
    prompt_id: str
    num_candidates: int = 0


@dataclass(slots=True, eq=False)
class LedgerEntry:
    """One scored candidate. Changes of its fields update the counts of the ledger."""

    ledger: Ledger | None = field(init=False, default=None)
    """The ledger that contains it, or None after `forget`."""
    request_id: str
    prompt_id: str
    """Prompt id, as `kept_name` returns it."""
    prompt_key: str
    """Key under which the prompt's success is stored. Empty: it is not."""
    adapter: str
    origin: LabelOrigin
    """Kind of group that its label comes from."""
    group_id: str
    index: int
    plan: PruningPlan
    names: list[tuple[str, int]] = field(default_factory=list)
    """(request name, choice) of each answer that contains it."""
    num_tokens: int = 0
    observation: Observation | None = None
    state: CandidateState = "running"
    assessment: Assessment | None = None
    trials: Mapping[int, Trial] = field(default_factory=dict)
    """Scores at other lengths of its plan and at its end, by length."""
    reward: float | None = None
    num_resumed: int = 0
    survival_before: float = 1.0
    """`num_resumed` and `survival_before` are those of `Scoring`."""
    _counted: tuple[CandidateState, tuple[int, ...]] | None = None

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if self.ledger is not None and name in ("state", "assessment", "trials", "reward"):
            self._count()

    def tried(self, length: int, observation: Observation, assessment: Assessment) -> None:
        self.trials = {**self.trials, length: Trial(observation, assessment)}

    @property
    def is_scored(self) -> bool:
        """True if its reward can be learned from."""
        return self.assessment is not None or bool(self.trials)

    def forget(self) -> None:
        """Detach the entry from the ledger. It may still be written to."""
        self._count(remembered=False)
        self.ledger = None

    def _count(self, *, remembered: bool = True) -> None:
        assert self.ledger is not None  # a forgotten entry is not counted
        counted = None
        if remembered and self.is_scored and self.reward is None and self.state in ("running", "finished"):
            own = () if self.assessment is None else (self.plan.detection_length,)
            counted = (self.state, (*own, *self.trials))
        if counted != self._counted:
            self.ledger.recount(self.adapter, self._counted, counted)
            self._counted = counted


class Ledger:
    """All candidates that a reward could name, by rollout. The oldest candidates are forgotten first.

    A group without a rollout is a rollout of its own. Ids of clients are stored by `kept_name`.
    """

    def __init__(self, max_candidates: int = MAX_REMEMBERED_CANDIDATES) -> None:
        self._rollouts: dict[str, OrderedDict[tuple[str, int], LedgerEntry]] = {}
        self._rollout_of: OrderedDict[LedgerEntry, str] = OrderedDict()
        """Rollout of each candidate, the oldest candidate first."""
        self._groups: dict[str, _RememberedGroup] = {}
        self._requests: dict[str, dict[int, LedgerEntry]] = {}
        """Candidates that are choices of a request's answer, by the name of the request."""
        self._max_candidates = max_candidates
        self._scored: dict[CandidateState, Counter[HeadKey]] = {"running": Counter(), "finished": Counter()}
        """Number of scored candidates without a reward, by state and head key, for numbers above 0."""

    def __len__(self) -> int:
        return len(self._rollout_of)

    def detection_length(self, rollout_id: str) -> int | None:
        """Detection length of all candidates of the rollout. None if the rollout is unknown."""
        entries = self._rollouts.get(rollout_id)
        return None if entries is None else next(iter(entries.values())).plan.detection_length

    def adapter(self, rollout_id: str) -> str:
        """Adapter of all candidates of the rollout."""
        entries = self._rollouts.get(rollout_id)
        return BASE_MODEL if entries is None else next(iter(entries.values())).adapter

    def open(
        self,
        scoring: Scoring,
        candidate: CandidateId,
        request_id: str,
        plan: PruningPlan,
        origin: LabelOrigin = "plain",
    ) -> LedgerEntry:
        """Add a candidate that was launched, and return its entry, to which later events are written."""
        prompt_id = kept_name(scoring.prompt_id)
        entry = LedgerEntry(request_id, prompt_id, scoring.prompt_key, scoring.adapter, origin, *candidate, plan)
        entry.num_resumed, entry.survival_before = scoring.num_resumed, scoring.survival_before
        entry.ledger = self
        rollout = self._rollouts.setdefault(scoring.rollout_id, OrderedDict())
        before = rollout.pop((entry.prompt_id, entry.index), None)  # a group id may be used again
        rollout[entry.prompt_id, entry.index] = entry
        group = self._groups.setdefault(entry.group_id, _RememberedGroup(scoring.rollout_id, entry.prompt_id))
        group.num_candidates += 1
        self._rollout_of[entry] = scoring.rollout_id
        if before is not None:
            self._forget(before)
        while len(self) > self._max_candidates:
            self._forget_oldest()
        if scoring.answer is not None:
            self.name(scoring.answer.name, entry.group_id, {scoring.answer.choice: entry.index})
        if scoring.parent is not None:
            self.name(scoring.parent.name, entry.group_id, {scoring.parent.choice: entry.index}, unless_taken=True)
        return entry

    def name(self, name: str, group_id: str, choices: Mapping[int, int], *, unless_taken: bool = False) -> None:
        """Name candidates of a group, by their choice in a request's answer.

        Candidates that are unknown here are skipped: they ended in another engine. `unless_taken`: keep a choice that
        the name already has.
        """
        group = self._groups.get(group_id)
        if group is None:
            return
        entries, name = self._rollouts[group.rollout_id], kept_name(name)
        for choice, index in choices.items():
            entry = entries.get((group.prompt_id, index))
            if entry is None or (unless_taken and choice in self._requests.get(name, ())):
                continue
            self._requests.setdefault(name, {})[choice] = entry
            entry.names.append((name, choice))

    def find(self, named: NamedReward) -> EntryKey | None:
        """Key of the candidate that a reward names. None if it is unknown."""
        id, index = named.id, named.reward.index
        if named.by == "rollout":
            return EntryKey(id, named.reward.prompt_id, index) if id in self._rollouts else None
        if named.by == "request":
            choices = self._requests.get(kept_name(id)) or self._requests.get(kept_name(_everybodys(id)), {})
            if (entry := choices.get(index)) is None:
                return None
            id, index = entry.group_id, entry.index
        owner, _, plain = id.rpartition("/") if named.by == "group" else ("", "", id)
        group = self._groups.get(plain)
        if group is None or (named.by == "group" and group.rollout_id.rpartition("/")[0] != owner):
            return None
        return EntryKey(group.rollout_id, group.prompt_id, index)

    def take(self, rollout_id: str, prompt_id: str, index: int) -> LedgerEntry | None:
        """Remove a candidate that goes on in another engine. None if it has been forgotten."""
        rollout = self._rollouts.get(rollout_id)
        entry = None if rollout is None else rollout.pop((kept_name(prompt_id), index), None)
        if rollout is None or entry is None:
            return None
        self._forget(entry)
        if not rollout:
            del self._rollouts[rollout_id]
        return entry

    def reward(
        self, rollout_id: str, prompt_id: str, index: int, reward: float
    ) -> tuple[RewardStatus, LedgerEntry | None]:
        """Record a posted reward. The entry is returned with the first reward of a finished candidate only."""
        rollout = self._rollouts.get(rollout_id)
        entry = None if rollout is None else rollout.get((kept_name(prompt_id), index))
        if entry is None:
            return "unknown", None
        if entry.state != "finished":
            return "unfinished", None
        if not entry.is_scored:
            first, entry.reward = entry.reward is None, reward
            return "unscored", entry if first else None
        if entry.reward is not None:
            return ("duplicate" if entry.reward == reward else "conflict"), None
        entry.reward = reward
        return "accepted", entry

    def num_awaiting(self, adapter: str = BASE_MODEL) -> Counter[int]:
        """Finished scored candidates of a served name without a reward, by detection length."""
        finished = self._scored["finished"]
        return Counter({key.detection_length: num for key, num in finished.items() if key.adapter == adapter})

    def awaits(self, detection_length: int, adapter: str = BASE_MODEL) -> bool:
        """True if a reward may come for a candidate of this served name that was scored at this length."""
        return any(HeadKey(detection_length, adapter) in counts for counts in self._scored.values())

    def awaits_any(self, adapter: str) -> bool:
        """True if a reward may come for any scored candidate of this served name."""
        return any(key.adapter == adapter for counts in self._scored.values() for key in counts)

    def recount(
        self,
        adapter: str,
        before: tuple[CandidateState, tuple[int, ...]] | None,
        now: tuple[CandidateState, tuple[int, ...]] | None,
    ) -> None:
        """Move an entry between counts: (state, scored lengths) before and now. None: not counted."""
        for counted, difference in ((before, -1), (now, 1)):
            if counted is None:
                continue
            state, lengths = counted
            for length in lengths:
                key = HeadKey(length, adapter)
                self._scored[state][key] += difference
                if not self._scored[state][key]:
                    del self._scored[state][key]

    def _forget_oldest(self) -> None:
        entry, rollout_id = next(iter(self._rollout_of.items()))
        rollout = self._rollouts[rollout_id]
        del rollout[entry.prompt_id, entry.index]
        self._forget(entry)
        if not rollout:
            del self._rollouts[rollout_id]

    def _forget(self, entry: LedgerEntry) -> None:
        """Remove the references to an entry that has left its rollout."""
        entry.forget()
        del self._rollout_of[entry]
        group = self._groups[entry.group_id]
        group.num_candidates -= 1
        if not group.num_candidates:
            del self._groups[entry.group_id]
        for name, choice in entry.names:
            choices = self._requests.get(name, {})
            if choices.get(choice) is entry:  # not the one that has the name since a client used it again
                del choices[choice]
                if not choices:
                    del self._requests[name]


def _everybodys(name: str) -> str:
    """Name of the same request with an unknown client."""
    return f'["{EVERYBODY}", {name.partition(", ")[2]}'
