"""Chooses the server of the next group, for a client with several servers: the least predicted work per engine.

Lengths of earlier groups predict the work of later ones, by prompt, or else over all prompts.

Invariants: a server that is out gets no group. A group counts at its server until it is over or that server is out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_rollout.kernel.rules.other_requests import OtherRequests
from vllm_rollout.parts.moving.rules.placement import Placement
from vllm_rollout.parts.moving.rules.work import Work
from vllm_rollout.parts.shaping.rules.history import LengthHistory, ObservedLength
from vllm_rollout.parts.shaping.rules.moments import LengthMoments


class NoServerLeft(Exception):
    """All servers are out."""


@dataclass(slots=True, eq=False)
class ServedGroup:
    """A group that was placed on a server and is not over."""

    key: str
    """Key of the group's prompt."""
    num_left: int
    """Candidates that have not ended."""
    lengths: LengthMoments | None
    max_tokens: int | None
    server: int
    work: Work
    age: int = 0
    """Output tokens that each of these has at least."""

    def predict(self) -> Work:
        return Work.of([self.age] * self.num_left, self.lengths, self.max_tokens, 0)


class Servers:
    """Loads of several servers, as one client estimates them."""

    def __init__(self, num_servers: int, first_turn: int = 0) -> None:
        """first_turn: the server that gets the first group of a tie. Different clients should begin with different
        servers."""
        self._placement = Placement(num_servers, first_turn)
        self._others = OtherRequests(num_servers)
        self._lengths = LengthHistory()
        self._counts = [0] * num_servers
        self._groups: set[ServedGroup] = set()

    @property
    def out(self) -> frozenset[int]:
        return self._placement.held

    @property
    def loads(self) -> list[float]:
        return self._placement.loads

    def leaves(self, server: int) -> None:
        """Take a server out: its groups do not count any more."""
        self._placement.held |= {server}
        for group in [group for group in self._groups if group.server == server]:
            self._forget(group)

    def comes(self, server: int) -> None:
        self._placement.held -= {server}

    def saw(self, counts: Sequence[int | None], sizes: Sequence[int], now_s: float) -> None:
        """Record the state of the servers.

        counts: requests at each server, of all clients. None: unknown. sizes: engines of each server.
        """
        self._placement.sizes = [max(1, size) for size in sizes]
        self._counts = [old if new is None else new for old, new in zip(self._counts, counts, strict=True)]
        own = self._placement.num_candidates
        self._placement.others = self._others.look(self._counts, own, now_s)

    def predicted(self, key: str, num_candidates: int, max_tokens: int | None) -> int:
        """Predicted tokens of a group of this prompt, to order groups before they are placed. 0: unknown."""
        return Work.of([0] * num_candidates, self._expected(key), max_tokens, 0).tokens or 0

    def place(self, key: str, num_candidates: int, max_tokens: int | None = None) -> ServedGroup:
        """Choose a server for a group, and count the group there. Raises: NoServerLeft."""
        if len(self.out) == self._placement.num_ranks:
            raise NoServerLeft
        lengths = self._expected(key)
        work = Work.of([0] * num_candidates, lengths, max_tokens, 0)
        server = self._placement.place(work)
        group = ServedGroup(key, num_candidates, lengths, max_tokens, server, work)
        self._groups.add(group)
        return group

    def ended(self, group: ServedGroup, num_tokens: int) -> None:
        """Record that a candidate of the group has ended, with its tokens."""
        if group not in self._groups or not group.num_left:
            return  # candidates may take the place of lost ones: there are more than it began with
        group.num_left -= 1
        group.age = max(group.age, num_tokens)
        before, group.work = group.work, group.predict()
        self._placement.change(group.server, before, group.work)

    def over(self, group: ServedGroup, lengths: Iterable[ObservedLength] = ()) -> None:
        """Record that the group is over, or was given up, with the lengths of its candidates."""
        if group in self._groups:
            self._forget(group)
        self._lengths.observe(group.key, list(lengths))

    def _expected(self, key: str) -> LengthMoments | None:
        """Lengths of this prompt, or else of all prompts."""
        return self._lengths.of(key) or self._lengths.dataset()

    def _forget(self, group: ServedGroup) -> None:
        self._groups.remove(group)
        self._placement.leave(group.server, group.work)
