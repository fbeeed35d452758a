"""Tail batching: which prompts a round runs, and what becomes of them.

    hand in -> fresh -> [short round] -> returned
                         |   |  `-----> filtered
                         |   `--------> deferred: the queue -> [long round] -> returned, filtered
                         `------------> not begun: first of the next short round

A short round starts more prompts than it returns, and keeps those that complete first. The others wait in a queue; when
it holds as many prompts as a round returns, a long round runs them without speculation.

Invariant: every prompt that was handed in waits in exactly one place (queue, carried, the open round), or was returned
or filtered, once.

Source: RollPacker section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal, get_args

from vllm_rollout.config import DEFAULT_SPECULATION, MAX_CANDIDATES, MAX_GROUP_SIZE, MAX_PROMPTS
from vllm_rollout.group.lengths.receipt import Receipt
from vllm_rollout.group.plans.fields import QueueOrder, RunFields
from vllm_rollout.group.rounds.savings import Savings

RoundKind = Literal["short", "long"]
ROUND_KINDS: tuple[RoundKind, ...] = get_args(RoundKind)
QUEUE_ORDERS: tuple[QueueOrder, ...] = get_args(QueueOrder)

MAX_HISTORY_ROUNDS = 64
"""Newest rounds that a run tells of."""

MAX_WAITING = 4 * MAX_PROMPTS
"""Prompts that may wait in one run when a round begins."""


class RoundError(ValueError):
    """A round that cannot be opened. The text is for the client: what, value, allowed, remedy."""

    def __init__(self, field: str, message: str, *, conflict: bool = False) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.conflict = conflict
        """What was asked for is right, but not now."""


@dataclass(frozen=True, slots=True)
class RunTerms(RunFields):
    """What all rounds of a run have in common."""

    response_speculation: float = DEFAULT_SPECULATION

    @property
    def num_prompts(self) -> int:
        """Prompts of a short round, ceil(eta P0)."""
        return speculated(self.prompts_per_round, self.prompt_speculation)

    @property
    def num_candidates(self) -> int:
        """Candidates of a prompt in a short round, ceil(eta R0)."""
        return speculated(self.group_size, self.response_speculation)

    @property
    def num_period_prompts(self) -> int:
        """What the short rounds of a period take: until as many prompts are deferred as a long round returns; 0 when
        none are."""
        spare = self.num_prompts - self.prompts_per_round
        return -(-self.prompts_per_round // spare) * self.num_prompts if spare else 0

    def check(self, num_candidates: int) -> None:
        """Raises: RoundError for terms of which no short round could ever run.

        Args:
            num_candidates: most that a prompt of a short round has.
        """
        if num_candidates - self.group_size > MAX_GROUP_SIZE:
            raise RoundError(
                "response_speculation",
                f"a prompt has at most {MAX_GROUP_SIZE} spare candidates, got {self.response_speculation:g} x "
                f"{self.group_size} = {num_candidates} candidates. Lower it.",
            )
        if self.num_prompts > MAX_PROMPTS:
            raise RoundError(
                "prompts_per_round",
                f"a round runs at most {MAX_PROMPTS} prompts, got {self.prompt_speculation:g} x "
                f"{self.prompts_per_round} = {self.num_prompts} of a short round. Lower it, or prompt_speculation.",
            )
        if (num := self.num_prompts * num_candidates) > MAX_CANDIDATES:
            raise RoundError(
                "prompts_per_round",
                f"a round runs at most {MAX_CANDIDATES} candidates, got {self.num_prompts} prompts of a short round x "
                f"up to {num_candidates} = {num}. Lower it, group_size, or how many spare ones there are of either.",
            )


def speculated(count: int, factor: float) -> int:
    """ceil(factor * count), as it is written in decimals: 1.1 * 10 is 11."""
    return ceil(round(count * factor, 6))


@dataclass(frozen=True, slots=True)
class FreshPrompt:
    """A prompt that a trainer hands in."""

    prompt_id: str
    epoch: int | None = None
    """Which time it comes, if the trainer says so."""
    content: str = ""
    """Digest of what it says."""

    @property
    def seed_name(self) -> str:
        """What its seed follows from: the same in each round that takes it, and another one when it comes again."""
        return self.prompt_id if self.epoch is None else f"{self.prompt_id} of epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A prompt that was handed in and has not been returned."""

    number: int
    """How many were handed in before it."""
    prompt: FreshPrompt
    num_deferred: int = 0
    """Rounds that ended without it."""

    @property
    def prompt_id(self) -> str:
        return self.prompt.prompt_id


@dataclass(frozen=True, slots=True)
class OpenRound:
    """A round that was begun: what it took is in it until it is closed or given up."""

    number: int
    key: str
    """The client's name for it: repeated, it means the same round."""
    kind: RoundKind
    entries: tuple[Entry, ...]
    """Prompts to run, in order."""
    reserve: tuple[Entry, ...] = ()
    """Prompts to run in place of filtered ones, in order."""
    num_wanted: int = 0
    """Complete groups that end it."""

    @property
    def wants_all(self) -> bool:
        """It ends with the last of its prompts, so that it counts which of them begin first."""
        return self.num_wanted == len(self.entries)

    @property
    def all_entries(self) -> tuple[Entry, ...]:
        return self.entries + self.reserve


Fate = Literal["returned", "filtered", "deferred", "unstarted"]
"""What a round makes of a prompt. `unstarted`: no candidate of it has run; a reserve that was not needed, too."""


@dataclass(frozen=True, slots=True)
class EntryOutcome:
    fate: Fate
    max_tokens: int = 0
    """Tokens of its longest trajectory, if it was returned or filtered."""


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What is remembered of a round that is over."""

    number: int
    key: str
    kind: RoundKind
    num_returned: int
    num_filtered: int
    num_deferred: int
    max_tokens: int
    """Tokens of the longest trajectory that was returned."""
    latency_s: float = 0.0
    generated_tokens: int = 0
    returned_tokens: int = 0


@dataclass(slots=True)
class Run:
    """The rounds of one training run."""

    terms: RunTerms
    num_handed_in: int = 0
    num_rounds: int = 0
    """Closed ones."""
    queue: list[Entry] = field(default_factory=list)
    """Deferred, oldest first."""
    carried: list[Entry] = field(default_factory=list)
    """Those of short rounds that ended before they were begun."""
    open: OpenRound | None = None
    num_returned: int = 0
    num_filtered: int = 0
    num_deferred: int = 0
    """Deferrals, a prompt's each."""
    generated_tokens: int = 0
    returned_tokens: int = 0
    latency_s: float = 0.0
    """Sum over closed rounds, as are the tokens."""
    history: list[RoundRecord] = field(default_factory=list)
    """Newest last."""
    savings: Savings = field(default_factory=Savings)
    receipt: Receipt | None = None
    """The sum over closed rounds, of those that have one."""

    @property
    def next_kind(self) -> RoundKind:
        """Long when the queue has as many entries as a round returns prompts. Two of one prompt never run in the same
        round, so that it may return fewer."""
        return "long" if len(self.queue) >= self.terms.prompts_per_round else "short"

    @property
    def num_fresh(self) -> int:
        """Prompts that the next round wants from the trainer."""
        return 0 if self.next_kind == "long" else max(0, self.terms.num_prompts - len(self.carried))

    @property
    def num_waiting(self) -> int:
        """Prompts that were handed in and are not back, those of an open round excepted."""
        return len(self.queue) + len(self.carried)

    def plan(
        self,
        key: str,
        fresh: Sequence[FreshPrompt],
        reserve: Sequence[FreshPrompt] = (),
        kind: RoundKind | None = None,
        predicted: Mapping[str, float] | None = None,
    ) -> OpenRound:
        """The next round; nothing changes. `predicted`: mean length of prompts, by id, as far as they are known.

        `kind` may be "long" before its time: what waits, and fresh prompts beside it, without speculation. So an epoch
        ends.

        Raises: RoundError.
        """
        self._check_closed(key)
        kind = kind or self.next_kind
        if kind == "short" and self.next_kind == "long":
            raise RoundError(
                "kind",
                f"must be long now, got 'short': the queue holds {len(self.queue)} prompts, and a round returns "
                f"{self.terms.prompts_per_round}. Run them first.",
                conflict=True,
            )
        self._check_prompts([*fresh, *reserve])
        self._check_room(len(reserve))
        numbered = [Entry(self.num_handed_in + i, prompt) for i, prompt in enumerate([*fresh, *reserve])]
        new, spare = tuple(numbered[: len(fresh)]), tuple(numbered[len(fresh) :])
        taken = {prompt.prompt_id for prompt in [*fresh, *reserve]}
        waiting = self.carried if kind == "short" else self._in_order(predicted or {})
        if kind != self.next_kind:  # a long round before its time: all that waits
            waiting = [*self.carried, *waiting]
        size = self.terms.prompts_per_round if kind == "long" else self.terms.num_prompts
        old: list[Entry] = []
        for entry in waiting:
            if len(old) + len(new) < size and entry.prompt_id not in taken:
                taken.add(entry.prompt_id)
                old.append(entry)
        self._check_number(kind, len(new), len(old))
        self._check_reserve(len(new) + len(old), len(spare))
        num_wanted = min(self.terms.prompts_per_round, len(old) + len(new))
        return OpenRound(self.num_rounds, key, kind, (*old, *new), spare, num_wanted)

    def begin(self, planned: OpenRound) -> None:
        """Take the prompts of a round that was just planned."""
        assert self.open is None, f"round {planned.number} begins in another one"
        taken = {entry.number for entry in planned.all_entries}
        self.queue = [entry for entry in self.queue if entry.number not in taken]
        self.carried = [entry for entry in self.carried if entry.number not in taken]
        self.num_handed_in = max(self.num_handed_in, *(number + 1 for number in taken))
        self.open = planned

    def close(
        self,
        outcomes: Mapping[int, EntryOutcome],
        latency_s: float,
        generated_tokens: int,
        returned_tokens: int,
        receipt: Receipt | None = None,
    ) -> RoundRecord:
        """The open round is over; `outcomes` by entry number, of all its entries."""
        opened = self.open
        assert opened is not None, "no round is open"
        assert outcomes.keys() == {e.number for e in opened.all_entries}, "each entry has one outcome"
        of: dict[Fate, list[Entry]] = {fate: [] for fate in get_args(Fate)}
        for entry in opened.all_entries:
            of[outcomes[entry.number].fate].append(entry)
        self.queue += [replace(entry, num_deferred=entry.num_deferred + 1) for entry in of["deferred"]]
        self._put_back(of["unstarted"])
        num = {fate: len(entries) for fate, entries in of.items()}
        record = RoundRecord(
            opened.number,
            opened.key,
            opened.kind,
            num["returned"],
            num["filtered"],
            num["deferred"],
            max((outcomes[entry.number].max_tokens for entry in of["returned"]), default=0),
            latency_s,
            generated_tokens,
            returned_tokens,
        )
        back = (entry.number for entry in (*of["returned"], *of["filtered"]))
        self.savings.returned(((n, outcomes[n].max_tokens) for n in back), self.terms.prompts_per_round)
        self.num_returned += num["returned"]
        self.num_filtered += num["filtered"]
        self.num_deferred += num["deferred"]
        self.generated_tokens += generated_tokens
        self.returned_tokens += returned_tokens
        self.latency_s += latency_s
        if receipt is not None:
            its = receipt.repaying if opened.kind == "long" else receipt
            self.receipt = its if self.receipt is None else self.receipt + its
        self.history = [*self.history, record][-MAX_HISTORY_ROUNDS:]
        self.num_rounds += 1
        self.open = None
        return record

    def give_up(self) -> OpenRound:
        """Put back what the open round took, as if it had never begun."""
        opened = self.open
        assert opened is not None, "no round is open"
        self._put_back(opened.all_entries)
        self.open = None
        return opened

    def _put_back(self, entries: Sequence[Entry]) -> None:
        """Entries go to where they came from, or would have waited: before all others."""
        self.queue = [*(entry for entry in entries if entry.num_deferred), *self.queue]
        self.carried = [*(entry for entry in entries if not entry.num_deferred), *self.carried]

    def _in_order(self, predicted: Mapping[str, float]) -> list[Entry]:
        """The queue as a long round takes from it. A prompt of unknown length counts as the longest: it was cut."""
        if self.terms.queue_order == "first_in":
            return self.queue
        sign = 1.0 if self.terms.queue_order == "shortest" else -1.0
        longest = max(predicted.values(), default=0.0)
        return sorted(self.queue, key=lambda entry: sign * predicted.get(entry.prompt_id, longest))

    def _check_closed(self, key: str) -> None:
        if self.open is not None:
            raise RoundError(
                "idempotency_key",
                f"round {self.open.number} of this run is open under the key {self.open.key!r}, got {key!r}: a run has "
                "one round at a time. Repeat that key for its answer, or DELETE the round to put its prompts back.",
                conflict=True,
            )

    def _check_room(self, num_reserve: int) -> None:
        most = MAX_WAITING - self.num_waiting
        if num_reserve > most:
            raise RoundError(
                "reserve",
                f"at most {MAX_WAITING} prompts may wait in a run, and {self.num_waiting} do, got {num_reserve}. Send "
                f"at most {max(0, most)}: those that were not needed come first in the next short rounds.",
            )

    def _check_prompts(self, prompts: Sequence[FreshPrompt]) -> None:
        seen: set[str] = set()
        waiting: dict[str, list[Entry]] = {}
        for entry in (*self.queue, *self.carried):
            waiting.setdefault(entry.prompt_id, []).append(entry)
        for prompt in prompts:
            if prompt.prompt_id in seen:
                raise RoundError(
                    "prompts",
                    f"id {prompt.prompt_id!r} is used twice; ids must be unique in a round, reserve included.",
                )
            seen.add(prompt.prompt_id)
            for entry in waiting.get(prompt.prompt_id, ()):
                if entry.prompt.content != prompt.content:
                    raise RoundError(
                        "prompts",
                        f"id {prompt.prompt_id!r} waits in this run with another content. Another prompt needs another "
                        "id.",
                        conflict=True,
                    )
                if prompt.epoch is not None and prompt.epoch == entry.prompt.epoch:
                    raise RoundError(
                        "prompts",
                        f"id {prompt.prompt_id!r} of epoch {prompt.epoch} waits in this run already, deferred "
                        f"{entry.num_deferred} times: a later round returns it. Leave it out.",
                        conflict=True,
                    )

    def _check_reserve(self, num_prompts: int, num_reserve: int) -> None:
        most = max(0, MAX_PROMPTS - num_prompts)
        if num_reserve > most:
            raise RoundError(
                "reserve",
                f"a round runs at most {MAX_PROMPTS} prompts, its reserve included, and begins with {num_prompts}, got "
                f"{num_reserve} in reserve. Send at most {most}.",
            )

    def _check_number(self, kind: RoundKind, num_fresh: int, num_old: int) -> None:
        wanted, most = self.num_fresh, self.terms.prompts_per_round
        if kind == "short" and num_fresh != wanted:
            raise RoundError(
                "prompts",
                f"this short round wants {wanted} fresh prompts ({self.terms.num_prompts}, of which "
                f"{self.terms.num_prompts - wanted} wait already), got {num_fresh}. Send {wanted}, or at the end of an "
                f'epoch at most {most} with "kind": "long".',
            )
        if kind == "long" and self.next_kind == "long" and num_fresh:
            raise RoundError(
                "prompts",
                f"this long round wants 0 fresh prompts, because the queue holds {len(self.queue)}, got {num_fresh}. "
                "Keep them for the round after it.",
            )
        if kind == "long" and num_fresh > most:
            raise RoundError("prompts", f"a long round takes at most {most} prompts, got {num_fresh}. Send fewer.")
        if kind == "long" and not num_fresh + num_old:
            raise RoundError(
                "prompts", "a long round needs a prompt, got none, and none waits: the queue is empty. Send some."
            )
