"""Rules of one group: engine events in, verdicts out.

Events (`launch`, `end`) arrive while an engine step is processed. `settle` closes the step and decides. Decisions at
the end of the step make ties exact: several candidates may end in the step in which the group completes. The winners
among them are the shortest, then those with the lowest index, whatever the order of the engine's loop.

Invariant: each candidate reaches exactly one end state, and no verdict is given on a candidate that has ended. A step
without a decision takes no loop over the candidates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.rules.types import CandidateState, EndReason, StopState


@dataclass(frozen=True, slots=True)
class Settlement:
    """Verdicts of one step on one group."""

    stop: tuple[int, ...] = ()
    """Running candidates to stop, because they are no longer needed."""
    lost_ties: tuple[int, ...] = ()
    """Candidates that ended by themselves in this step, but after `group_size` others: surplus, with all tokens."""
    stop_as: StopState = "surplus"


NOTHING = Settlement()


@dataclass(slots=True)
class _Candidate:
    state: CandidateState = "running"
    truncated: bool = False
    num_tokens: int = 0
    step: int = 0
    """The group's step in which the candidate ended."""
    is_replaced: bool = False


@dataclass(slots=True)
class Group:
    """Candidates of one prompt between launch and verdict (DARTS section 4.3.1: early stop at M of M')."""

    terms: GroupTerms
    closed: bool = False
    """True once `group_size` usable candidates have finished, or the group was cancelled: all others are stopped."""
    cancelled: bool = False
    """True once the rest of the group is not wanted. Candidates that arrive later are deferred too."""
    length_cap: int | None = None
    """Tokens at which a running candidate may be stopped. None until `group_size` valid candidates have finished.

    The cap is `patience` times the longest of them. It limits length, not time, so that it also holds for candidates
    that began late.
    """
    parts: dict[str, Any] = field(default_factory=dict)
    """Values of parts, by part. They go when the group goes."""
    joined: bool = False
    """True if the candidates are separate requests, which a client or a router may have sent to another engine."""
    _candidates: dict[int, _Candidate] = field(default_factory=dict)
    _new: list[int] = field(default_factory=list)
    """Candidates that ended since the last settlement."""
    _settled: list[int] = field(default_factory=list)
    """Candidates that the last settlement decided on."""
    _running: dict[int, None] = field(default_factory=dict)
    """Indices of running candidates, in the order of launch."""
    _num_valid: int = 0
    """Number of candidates that finished by themselves. Counted until the group closes."""
    _num_truncated: int = 0
    """Number of candidates cut at `max_tokens`. Counted until the group closes."""
    _num_replaced: int = 0
    """Number of lost candidates that are replaced by another launch, now or later."""
    _num_steps: int = 0
    """Number of settlements. The group's own clock, which moves with it to another engine."""

    def launch(self, index: int | None = None) -> int:
        """Add a candidate that entered the engine, and return its index: `index`, or else the next one.

        The caller has checked `has(index)`.
        """
        if index is None:
            index, self.joined = len(self._candidates), True
        assert index not in self._candidates, f"candidate {index} launched twice"
        self._candidates[index] = _Candidate()
        self._running[index] = None
        return index

    def end(self, index: int, reason: EndReason, num_tokens: int) -> None:
        """Record that a candidate ended without a verdict. Ignored if it already has a verdict."""
        candidate = self._candidates[index]
        if candidate.state != "running":
            return
        candidate.state = "failed" if reason == "failed" else "finished"
        candidate.truncated = reason == "length"
        candidate.num_tokens = num_tokens
        candidate.step = self._num_steps + 1  # the one that the next settlement closes
        del self._running[index]
        self._num_valid += candidate.state == "finished" and not candidate.truncated
        self._num_truncated += candidate.state == "finished" and candidate.truncated
        self._new.append(index)
        if reason == "failed" and not self.closed and self._num_replaced < self.terms.num_replaceable:
            candidate.is_replaced = True
            self._num_replaced += 1

    def settle(self, without_place: Collection[int] = ()) -> Settlement:
        """Close the step: decide on every candidate that ended since the last call.

        `without_place`: candidates that lose in any case, unless the group is closed. Ended ones become surplus, too.
        A truncated candidate counts only when too few others are left to reach `group_size`
        (docs/contributing/design.md, "Promises").
        """
        new, self._settled, self._new = self._new, self._new, []
        self._num_steps += 1
        if self.closed:
            # A sibling that came late, or ended in flight after the group had closed.
            for index in new:
                if self._candidates[index].state == "finished":
                    self._candidates[index].state = "surplus"
            lost = tuple(i for i in sorted(new) if self._candidates[i].state == "surplus")
            late: StopState = "deferred" if self.cancelled else "surplus"
            return Settlement(self._give_up_rest(late), lost, late)
        if not self.terms.early_stop:
            self._set_length_cap()
            return NOTHING
        ruled_out = self._rule_out(without_place) if without_place else NOTHING
        if self._num_usable < self.terms.group_size:
            return ruled_out
        self.closed = True
        winners = set(self._ranking()[: self.terms.group_size])
        lost = tuple(i for i in sorted(new) if i not in winners and self._candidates[i].state == "finished")
        for index in lost:
            self._candidates[index].state = "surplus"
        return Settlement(ruled_out.stop + self._give_up_rest(), ruled_out.lost_ties + lost)

    def rule_out(self, indices: Iterable[int], state: StopState) -> None:
        """Stop running candidates. Call `settle` again afterwards.

        The verdict belongs to the step that was settled last. If it closes the group, candidates that ended in that
        step tie.
        """
        self._stop(indices, state)
        self._num_steps -= 1
        self._new, self._settled = self._settled + self._new, []

    def too_long(self, num_tokens: Mapping[int, int]) -> list[int]:
        """Stop candidates that have reached `length_cap`, as surplus, and return their indices.

        `num_tokens`: output tokens of running candidates, by index.
        """
        cap = self.length_cap
        reached = [index for index, length in num_tokens.items() if cap is not None and length >= cap]
        self._stop(reached, "surplus")
        return reached

    def cancel(self) -> list[int]:
        """Defer the rest of the group: running candidates, and those that arrive later. Returns the running ones."""
        self.closed = self.cancelled = True
        return list(self._give_up_rest("deferred"))

    def give_up(self, indices: Collection[int]) -> list[int]:
        """Stop those of these candidates that still run, as surplus, and return their indices."""
        given_up = [index for index in self._running if index in indices]
        self._stop(given_up, "surplus")
        return given_up

    def withdraw(self, index: int) -> None:
        """Count a finished candidate as failed. The group must not be closed."""
        assert not self.closed, f"candidate {index} may have decided who won"
        candidate = self._candidates[index]
        if candidate.state == "finished":
            self._uncount(candidate)
        candidate.state = "failed"

    @property
    def indices(self) -> Iterable[int]:
        """Indices of all candidates, in the order of launch."""
        return self._candidates

    @property
    def running(self) -> list[int]:
        """Indices of the running candidates."""
        return list(self._running)

    def has(self, index: int) -> bool:
        """True if a candidate with this index was launched."""
        return index in self._candidates

    def end_step(self, index: int) -> int:
        """The group's step in which a candidate ended. It orders endings also when the group moves to another
        engine."""
        return self._candidates[index].step

    def state(self, index: int) -> CandidateState:
        return self._candidates[index].state

    def is_replaced(self, index: int) -> bool:
        """True if the candidate was lost and another one is launched in its place. Does not change later."""
        return self._candidates[index].is_replaced

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_finished(self) -> int:
        """Number of finished candidates, truncated ones included. Valid until the group closes."""
        return self._num_valid + self._num_truncated

    @property
    def over(self) -> bool:
        """True if no candidate runs and none is still to come."""
        return not self._running and not self.num_to_come

    @property
    def complete(self) -> bool:
        """True if the group has its trajectories.

        With early stop: `group_size` usable candidates have finished. Without: also, no candidate runs or is to come.
        """
        if self.cancelled:
            return False
        if self.terms.early_stop:
            return self.closed
        return self.over and sum(c.state == "finished" for c in self._candidates.values()) >= self.terms.group_size

    @property
    def longest(self) -> int:
        """Tokens of the longest finished candidate. 0 if none has finished."""
        return max((c.num_tokens for c in self._candidates.values() if c.state == "finished"), default=0)

    @property
    def num_launched(self) -> int:
        return len(self._candidates)

    @property
    def num_to_come(self) -> int:
        """Candidates that were announced and have not been launched."""
        return max(0, self.terms.num_candidates + self._num_replaced - len(self._candidates))

    def _rule_out(self, without_place: Collection[int]) -> Settlement:
        """Let candidates lose that have no place, and have not lost yet."""
        ended = tuple(i for i in without_place if self._candidates[i].state == "finished")
        running = tuple(i for i in without_place if self._candidates[i].state == "running")
        for index in ended:
            self._uncount(self._candidates[index])
            self._candidates[index].state = "surplus"
        self._stop(running, "surplus")
        return Settlement(running, ended)

    @property
    def _num_usable(self) -> int:
        """Finished candidates that count now: truncated ones only if too few others are left."""
        num_others = self._num_valid + len(self._running) + self.num_to_come
        return self._num_valid + (self._num_truncated if num_others < self.terms.group_size else 0)

    def _uncount(self, candidate: _Candidate) -> None:
        """Remove a finished candidate from the counts."""
        self._num_valid -= not candidate.truncated
        self._num_truncated -= candidate.truncated

    def _ranking(self) -> list[int]:
        """Usable finished candidates, best first: valid before truncated, then earlier, shorter, lower index."""
        finished = [(i, c) for i, c in self._candidates.items() if c.state == "finished"]
        if self._num_usable == self._num_valid:
            finished = [(i, c) for i, c in finished if not c.truncated]
        return [i for i, _ in sorted(finished, key=lambda ic: (ic[1].truncated, ic[1].step, ic[1].num_tokens, ic[0]))]

    def _set_length_cap(self) -> None:
        """Set the length cap, once, from the first `group_size` valid candidates."""
        if self.terms.patience is None or self.length_cap is not None:
            return
        if self._num_valid >= self.terms.group_size:
            valid = [c for c in self._candidates.values() if c.state == "finished" and not c.truncated]
            first = sorted(valid, key=lambda c: (c.step, c.num_tokens))[: self.terms.group_size]
            self.length_cap = ceil(self.terms.patience * max(c.num_tokens for c in first))

    def _give_up_rest(self, state: StopState = "surplus") -> tuple[int, ...]:
        running = tuple(self._running)
        self._stop(running, state)
        return running

    def _stop(self, indices: Iterable[int], state: StopState) -> None:
        for index in indices:
            candidate = self._candidates[index]
            assert candidate.state == "running", f"verdict on candidate {index} after its end"
            candidate.state, candidate.step = state, self._num_steps
            del self._running[index]
