"""Candidates whose reward may still come. Invariant: a reward counts once, and never vanishes in silence."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from json import dumps
from typing import Literal, NamedTuple

from vllm_rollout.config import MAX_REMEMBERED_CANDIDATES
from vllm_rollout.group.judging.race_bias import LabelOrigin
from vllm_rollout.group.plans.prompt_key import kept_name
from vllm_rollout.group.plans.pruning_plan import PruningPlan
from vllm_rollout.group.types import BASE_MODEL, Assessment, CandidateId, CandidateState, HeadKey, Observation

RewardStatus = Literal["accepted", "duplicate", "conflict", "unknown", "unfinished", "unscored"]
"""What became of a posted reward.

accepted    it teaches calibration and head
duplicate   the same reward came before; nothing changes
conflict    another reward came before, and stays
unknown     no such candidate, or one that has been forgotten
unfinished  the candidate is running, or was stopped (pruned, surplus, failed): no reward is expected
unscored    the candidate ended before it was scored: there is nothing to learn from
"""


class Reward(NamedTuple):
    """The reward of one trajectory, as the client posted it."""

    prompt_id: str
    index: int  # type: ignore[assignment]  # of a tuple's methods nobody here needs `index`
    reward: float
    positive: bool
    """The reward is above the threshold: the label that calibration and head learn."""


NamedBy = Literal["rollout", "group", "request"]
"""What the id in a candidate's name is of.

rollout  a rollout's id; beside the index stands the prompt's id
group    the id of one group of a rollout; with OWNER/ before it where the rollout's id has that
request  the id of a request that was a group, or one candidate of one; the index is that of the choice in its answer
"""


class NamedReward(NamedTuple):
    """A reward, and what its index counts in."""

    by: NamedBy
    id: str
    reward: Reward
    """Its prompt id means something by a rollout only."""


EVERYBODY = "*"
"""Whose a request is when nobody knows its client: any client may name it."""


def request_name(client: str, request_id: str, namespace: str = "") -> str:
    """The name of a request among all clients'. Those with the same key are one client; `namespace`: as it says."""
    return dumps([client, namespace, request_id])  # ASCII, and no id can look like another client's


def everybodys(name: str) -> str:
    """The name of the same request where nobody knows its client, who comes first in `request_name`."""
    return f'["{EVERYBODY}", {name.partition(", ")[2]}'


class AnswerName(NamedTuple):
    """What a reward may call a candidate, or the first of several: the answer it is in, and the choice there."""

    name: str
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a candidate is judged, and under which name its reward comes."""

    rollout_id: str
    prompt_id: str
    seed: int
    """Chance depends on (seed, prompt_id, index)."""
    answer: AnswerName | None = None
    """The name of a candidate that is a request of its own; None: it is named otherwise."""
    parent: AnswerName | None = None
    """Its name where that of its answer may have been made of the name of a request with several choices, of which it
    is one; a request that has this name comes first."""
    prompt_key: str = ""
    """Under which its prompt's success is remembered over rollouts, the key of its lengths; empty: it is not."""
    adapter: str = BASE_MODEL
    """The LoRA adapter's name. The engine says it: what a client writes about itself teaches nobody else's adapter."""
    num_resumed: int = 0
    """Tokens that it has from earlier rounds."""
    survival_before: float = 1.0
    """The probability with which it was kept in them."""


class EntryKey(NamedTuple):
    """Where the ledger has a candidate."""

    rollout_id: str
    prompt_id: str
    index: int  # type: ignore[assignment]  # of a tuple's methods nobody here needs `index`


class Trial(NamedTuple):
    """A score that decided nothing, and what would have been decided by it."""

    observation: Observation
    assessment: Assessment


@dataclass(slots=True)
class _RememberedGroup:
    """Where a group's candidates are, as long as one of them is remembered."""

    rollout_id: str
    prompt_id: str
    num_candidates: int = 0


@dataclass(slots=True, eq=False)
class LedgerEntry:
    """One candidate that is scored. The ledger counts along with what is written into it."""

    ledger: Ledger | None = field(init=False, default=None)
    """The one that remembers it."""
    request_id: str
    prompt_id: str
    """As `kept_name` has it."""
    prompt_key: str
    """Under which its prompt's success is remembered; empty: it is not."""
    adapter: str
    origin: LabelOrigin
    """The kind of group that its label is of."""
    group_id: str
    index: int
    plan: PruningPlan
    names: list[tuple[str, int]] = field(default_factory=list)
    """Requests in whose answers it is, and as which choice."""
    num_tokens: int = 0
    observation: Observation | None = None
    state: CandidateState = "running"
    assessment: Assessment | None = None
    trials: Mapping[int, Trial] = field(default_factory=dict)
    """What was seen of it at other lengths of its plan, and at its end, by length."""
    reward: float | None = None
    num_resumed: int = 0
    survival_before: float = 1.0
    """As of `Scoring`, and so is the one above."""
    _counted: tuple[CandidateState, tuple[int, ...]] | None = None

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if self.ledger is not None and name in ("state", "assessment", "trials", "reward"):
            self._count()

    def tried(self, length: int, observation: Observation, assessment: Assessment) -> None:
        self.trials = {**self.trials, length: Trial(observation, assessment)}

    @property
    def is_scored(self) -> bool:
        """Its reward teaches something."""
        return self.assessment is not None or bool(self.trials)

    def forget(self) -> None:
        """Still to be written into, but no longer remembered."""
        self._count(remembered=False)
        self.ledger = None

    def _count(self, *, remembered: bool = True) -> None:
        assert self.ledger is not None  # who is not remembered is not counted
        counted = None
        if remembered and self.is_scored and self.reward is None and self.state in ("running", "finished"):
            own = () if self.assessment is None else (self.plan.detection_length,)
            counted = (self.state, (*own, *self.trials))
        if counted != self._counted:
            self.ledger.recount(self.adapter, self._counted, counted)
            self._counted = counted


class Ledger:
    """All candidates that a reward could name, by rollout. The oldest candidates of the oldest rollout go first.

    A group that no rollout made is a rollout of its own. What clients name is remembered by `kept_name`.
    """

    def __init__(self, max_candidates: int = MAX_REMEMBERED_CANDIDATES) -> None:
        self._rollouts: OrderedDict[str, OrderedDict[tuple[str, int], LedgerEntry]] = OrderedDict()
        self._groups: dict[str, _RememberedGroup] = {}
        self._requests: dict[str, dict[int, LedgerEntry]] = {}
        """By the name of a request: the candidates that are choices in its answer."""
        self._max_candidates = max_candidates
        self._num_candidates = 0
        self._scored: dict[CandidateState, Counter[HeadKey]] = {"running": Counter(), "finished": Counter()}
        """Scored candidates without a reward, by state and by what scored them; none is not counted."""

    def __len__(self) -> int:
        return self._num_candidates

    def detection_length(self, rollout_id: str) -> int | None:
        """The one that the rollout's candidates share; None when it is not remembered."""
        entries = self._rollouts.get(rollout_id)
        return None if entries is None else next(iter(entries.values())).plan.detection_length

    def adapter(self, rollout_id: str) -> str:
        """The one of all of the rollout's candidates."""
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
        """A candidate was launched. What happens to it is written into the entry."""
        prompt_id = kept_name(scoring.prompt_id)
        entry = LedgerEntry(request_id, prompt_id, scoring.prompt_key, scoring.adapter, origin, *candidate, plan)
        entry.num_resumed, entry.survival_before = scoring.num_resumed, scoring.survival_before
        entry.ledger = self
        rollout = self._rollouts.setdefault(scoring.rollout_id, OrderedDict())
        before = rollout.pop((entry.prompt_id, entry.index), None)  # a group id may be used again
        rollout[entry.prompt_id, entry.index] = entry
        group = self._groups.setdefault(entry.group_id, _RememberedGroup(scoring.rollout_id, entry.prompt_id))
        group.num_candidates += 1
        self._num_candidates += 1
        if before is not None:
            self._forget(before)
        while self._num_candidates > self._max_candidates:
            self._forget_oldest()
        if scoring.answer is not None:
            self.name(scoring.answer.name, entry.group_id, {scoring.answer.choice: entry.index})
        if scoring.parent is not None:
            self.name(scoring.parent.name, entry.group_id, {scoring.parent.choice: entry.index}, unless_taken=True)
        return entry

    def name(self, name: str, group_id: str, choices: Mapping[int, int], *, unless_taken: bool = False) -> None:
        """A request's answer has these candidates of a group, by choice. Those that are not here are passed over: they
        ended in another engine. `unless_taken`: a choice that the name has stays."""
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
        """The candidate that a reward names; None when it is not remembered."""
        id, index = named.id, named.reward.index
        if named.by == "rollout":
            return EntryKey(id, named.reward.prompt_id, index) if id in self._rollouts else None
        if named.by == "request":
            choices = self._requests.get(kept_name(id)) or self._requests.get(kept_name(everybodys(id)), {})
            if (entry := choices.get(index)) is None:
                return None
            id, index = entry.group_id, entry.index
        owner, _, plain = id.rpartition("/") if named.by == "group" else ("", "", id)
        group = self._groups.get(plain)
        if group is None or (named.by == "group" and group.rollout_id.rpartition("/")[0] != owner):
            return None
        return EntryKey(group.rollout_id, group.prompt_id, index)

    def take(self, rollout_id: str, prompt_id: str, index: int) -> LedgerEntry | None:
        """Let go of a candidate that goes on in another engine; None when it has been forgotten."""
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
        """Account for a posted reward; the entry comes with status `accepted` only."""
        rollout = self._rollouts.get(rollout_id)
        entry = None if rollout is None else rollout.get((kept_name(prompt_id), index))
        if entry is None:
            return "unknown", None
        if entry.state != "finished":
            return "unfinished", None
        if not entry.is_scored:
            return "unscored", None
        if entry.reward is not None:
            return ("duplicate" if entry.reward == reward else "conflict"), None
        entry.reward = reward
        return "accepted", entry

    def num_awaiting(self, adapter: str = BASE_MODEL) -> Counter[int]:
        """Scored candidates of a served name that finished and have no reward yet, by detection length."""
        finished = self._scored["finished"]
        return Counter({key.detection_length: num for key, num in finished.items() if key.adapter == adapter})

    def awaits(self, detection_length: int, adapter: str = BASE_MODEL) -> bool:
        """A reward may come for a candidate of this served name that was scored at this length."""
        return any(HeadKey(detection_length, adapter) in counts for counts in self._scored.values())

    def awaits_any(self, adapter: str) -> bool:
        """A reward may come for a scored candidate of this served name."""
        return any(key.adapter == adapter for counts in self._scored.values() for key in counts)

    def recount(
        self,
        adapter: str,
        before: tuple[CandidateState, tuple[int, ...]] | None,
        now: tuple[CandidateState, tuple[int, ...]] | None,
    ) -> None:
        """An entry counts as another kind of candidate, scored at these lengths, or as none."""
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
        rollout_id, rollout = next(iter(self._rollouts.items()))
        _, entry = rollout.popitem(last=False)
        self._forget(entry)
        if not rollout:
            del self._rollouts[rollout_id]

    def _forget(self, entry: LedgerEntry) -> None:
        """It has left its rollout."""
        entry.forget()
        self._num_candidates -= 1
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
