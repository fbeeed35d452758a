"""Tail batching: chooses the prompts of each round, and records their outcomes.

    hand in -> fresh -> [short round] -> returned
                         |   |  `-----> filtered
                         |   `--------> deferred: the queue -> [long round] -> returned, filtered
                         `------------> not begun: first of the next short round

A short round starts more prompts than it returns, and keeps those that complete first. The others wait in a queue. When
the queue holds as many prompts as a round returns, a long round runs them without speculation.

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
from vllm_rollout.kernel.rules.receipt import Receipt
from vllm_rollout.parts.rounds.rules.fields import QueueOrder, RoundKind, RunFields
from vllm_rollout.parts.rounds.rules.savings import Savings

ROUND_KINDS: tuple[RoundKind, ...] = get_args(RoundKind)
QUEUE_ORDERS: tuple[QueueOrder, ...] = get_args(QueueOrder)

MAX_HISTORY_ROUNDS = 64
"""Newest rounds in the history of a run."""

MAX_WAITING = 4 * MAX_PROMPTS
"""Most prompts that may wait in one run when a round begins."""

ALLOW_FEWER = (
    "{}: cannot be true in a run: a round is over when enough groups have group_size trajectories, and it allows "
    "groups that have fewer. Leave it out."
)


class RoundError(ValueError):
    """A round cannot be opened. The text is for the client: what, value, allowed, remedy."""

    def __init__(self, field: str, message: str, *, conflict: bool = False) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.conflict = conflict
        """True if the request is valid, but not in the run's present state."""


@dataclass(frozen=True, slots=True)
class RunTerms(RunFields):
    """Terms that all rounds of a run share."""

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
        """Prompts that the short rounds of one period start. 0 if no prompt is ever deferred.

        A period ends when as many prompts are deferred as a long round returns.
        """
        spare = self.num_prompts - self.prompts_per_round
        return -(-self.prompts_per_round // spare) * self.num_prompts if spare else 0

    def check(self, num_candidates: int) -> None:
        """Raises: RoundError for terms under which no short round could ever run.

        Args:
            num_candidates: most candidates that a prompt of a short round has.
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
    """ceil(factor * count), computed as in decimals: 1.1 * 10 is 11."""
    return ceil(round(count * factor, 6))


@dataclass(frozen=True, slots=True)
class FreshPrompt:
    """A prompt that a trainer hands in."""

    prompt_id: str
    epoch: int | None = None
    """Epoch that the trainer states for the prompt. None: not stated."""
    content: str = ""
    """Digest of the prompt's content."""

    @property
    def seed_name(self) -> str:
        """Name from which the prompt's seed is derived.

        It is equal in each round that takes the prompt, and another one if the prompt comes in another epoch.
        """
        return self.prompt_id if self.epoch is None else f"{self.prompt_id} of epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A prompt that was handed in and has not been returned."""

    number: int
    """Number of prompts that were handed in before it."""
    prompt: FreshPrompt
    num_deferred: int = 0
    """Number of rounds that deferred it."""

    @property
    def prompt_id(self) -> str:
        return self.prompt.prompt_id


@dataclass(frozen=True, slots=True)
class OpenRound:
    """An open round. Its prompts belong to it until it is closed or given up."""

    number: int
    key: str
    """Idempotency key of the client: the same key means the same round."""
    kind: RoundKind
    entries: tuple[Entry, ...]
    """Prompts to run, in order."""
    reserve: tuple[Entry, ...] = ()
    """Prompts to run in place of filtered ones, in order."""
    num_wanted: int = 0
    """Complete groups that end the round."""

    @property
    def wants_all(self) -> bool:
        """True if the round ends with the last of its prompts, so that the order of their start matters."""
        return self.num_wanted == len(self.entries)

    @property
    def all_entries(self) -> tuple[Entry, ...]:
        return self.entries + self.reserve


Fate = Literal["returned", "filtered", "deferred", "unstarted"]
"""Outcome of a prompt in a round. `unstarted`: no candidate of it has run, also for an unused reserve."""


@dataclass(frozen=True, slots=True)
class EntryOutcome:
    fate: Fate
    max_tokens: int = 0
    """Tokens of the prompt's longest trajectory, if it was returned or filtered."""


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """Statistics of a round that is over."""

    number: int
    key: str
    kind: RoundKind
    num_returned: int
    num_filtered: int
    num_deferred: int
    max_tokens: int
    """Tokens of the longest returned trajectory."""
    latency_s: float = 0.0
    generated_tokens: int = 0
    returned_tokens: int = 0


@dataclass(slots=True)
class Run:
    """The rounds of one training run."""

    terms: RunTerms
    num_handed_in: int = 0
    num_rounds: int = 0
    """Number of closed rounds."""
    queue: list[Entry] = field(default_factory=list)
    """Deferred prompts, oldest first."""
    carried: list[Entry] = field(default_factory=list)
    """Prompts that their short rounds did not start."""
    open: OpenRound | None = None
    num_returned: int = 0
    num_filtered: int = 0
    num_deferred: int = 0
    """Number of deferrals. A prompt counts once for each."""
    generated_tokens: int = 0
    returned_tokens: int = 0
    latency_s: float = 0.0
    """Sum over closed rounds, in seconds. The token counts are sums as well."""
    history: list[RoundRecord] = field(default_factory=list)
    """Statistics of closed rounds, newest last."""
    savings: Savings = field(default_factory=Savings)
    receipt: Receipt | None = None
    """Sum of the receipts of closed rounds. None if no round has one."""

    @property
    def next_kind(self) -> RoundKind:
        """ "long" when the queue has as many entries as a round returns prompts.

        Two entries of one prompt never run in the same round, so that a long round may return fewer.
        """
        return "long" if len(self.queue) >= self.terms.prompts_per_round else "short"

    @property
    def num_fresh(self) -> int:
        """Number of prompts that the next round takes from the trainer."""
        return 0 if self.next_kind == "long" else max(0, self.terms.num_prompts - len(self.carried))

    @property
    def num_waiting(self) -> int:
        """Number of prompts that wait, without those of an open round."""
        return len(self.queue) + len(self.carried)

    def plan(
        self,
        key: str,
        fresh: Sequence[FreshPrompt],
        reserve: Sequence[FreshPrompt] = (),
        kind: RoundKind | None = None,
        predicted: Mapping[str, float] | None = None,
    ) -> OpenRound:
        """Plan the next round, without any change to the run. `predicted`: mean length of prompts, by id, where known.

        `kind` may be "long" before its time, for the end of an epoch. The round then takes all waiting prompts and the
        fresh ones, without speculation.

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
        """Open a round that was just planned, and take its prompts."""
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
        """Close the open round. `outcomes`: one for each entry, by entry number."""
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
        """Put back the prompts of the open round, as if it had never begun."""
        opened = self.open
        assert opened is not None, "no round is open"
        self._put_back(opened.all_entries)
        self.open = None
        return opened

    def _put_back(self, entries: Sequence[Entry]) -> None:
        """Put entries back to the front of the queue, or of the carried prompts if they were never deferred."""
        self.queue = [*(entry for entry in entries if entry.num_deferred), *self.queue]
        self.carried = [*(entry for entry in entries if not entry.num_deferred), *self.carried]

    def _in_order(self, predicted: Mapping[str, float]) -> list[Entry]:
        """The queue in the order in which a long round takes from it.

        A prompt of unknown length counts as the longest, since it was cut.
        """
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
