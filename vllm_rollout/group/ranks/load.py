"""What runs on each rank, when it is expected to be done, and what a group that moves there costs.

Invariants: a prediction is the sum of `CostModel.ptl` over the steps that are expected, plus the price of what arrives.
What it costs to take KV along is learned from what it has cost: there is a price before anything has come, and it never
becomes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vllm_rollout.group.lengths.cost import CostModel, rollout_time
from vllm_rollout.group.lengths.moments import LengthMoments, expected_remaining, late_remaining

ASSUMED_BYTES_PER_S = 1e9
"""Speed before the first transfer: a tenth of what two copies through the memory of a quiet host reach."""
NEWEST_WEIGHT = 0.25
"""Weight of the newest transfer in the moving average: one that met a busy host does not decide the next four moves."""


@dataclass(frozen=True, slots=True)
class TransferCost:
    """What KV costs the rank to which it comes, while everybody there stands still."""

    s_per_token: float
    """Seconds; moving average."""
    block_size: int
    """Tokens. Whole blocks come; what is behind a candidate's last one is computed again, half a block on average."""

    @classmethod
    def assumed(cls, bytes_per_token: float, block_size: int) -> TransferCost:
        """bytes_per_token: of one worker, since all of an engine's copy at once."""
        return cls(bytes_per_token / ASSUMED_BYTES_PER_S, block_size)

    def after(self, num_tokens: int, seconds: float) -> TransferCost:
        """So many tokens have come."""
        newest = seconds / num_tokens
        return replace(self, s_per_token=self.s_per_token + NEWEST_WEIGHT * (newest - self.s_per_token))

    def num_computed(self, num_candidates: int) -> float:
        """Tokens that these candidates compute again, expected."""
        return num_candidates * self.block_size / 2


class RunningGroup(NamedTuple):
    """A group as its engine core has it, without predictions."""

    group_id: str
    prompt_tokens: int
    num_tokens: list[int]
    """Output tokens of each candidate that has not ended."""
    max_tokens: int | None


class ArrivedKV(NamedTuple):
    """KV that came along to one engine core, since it started."""

    num_groups: int = 0
    num_blocks: int = 0
    num_fallbacks: int = 0
    """Groups that were to bring KV to here or take it from here, and did not: it was computed again."""
    transfer: TransferCost | None = None
    """What the next one costs; None where none comes along, or the last one failed."""


class EngineLoad(NamedTuple):
    """What one engine core has to do."""

    is_held: bool
    """It is kept empty."""
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    """Share of its blocks that are in use, from 0 to 1."""
    num_preemptions: int
    """Preemptions since it started; the groups below are counted since then, too."""
    num_moved_in: int
    num_moved_out: int
    groups: list[RunningGroup]
    """Those with candidates that have not ended."""
    moving_s: float = 0.0
    """Seconds that it spent on groups that leave and come, between two steps."""
    kv: ArrivedKV = ArrivedKV()
    is_dead: bool = False
    """Nothing runs there any more."""
    num_internal_errors: int = 0
    """Exceptions of our own code that were caught since it started: candidates or groups have failed of them."""
    num_weight_changes: int = 0
    """How often weights have come since it started, and how the newest are called:"""
    weight_version: str = ""


DEAD_LOAD = EngineLoad(True, 0, 0, 0.0, 0, 0, 0, [], is_dead=True)
"""The load of an engine core that has died: it gets nothing, and what it did is not known."""


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """Candidates of a group that have not ended, running or waiting."""

    group_id: str
    num_candidates: int
    prompt_tokens: int
    generated_tokens: int
    """Output tokens of all these candidates together."""
    longest_remaining: float
    """Predicted output tokens still to come of the candidate that ends last."""
    total_remaining: float
    """The same, of all together."""
    late_remaining: float = 0.0
    """Output tokens still to come of each, should it go on for long."""

    @classmethod
    def of(
        cls,
        group_id: str,
        prompt_tokens: int,
        num_tokens: Sequence[int],
        lengths: LengthMoments | None = None,
        max_tokens: int | None = None,
    ) -> GroupLoad:
        """The load of candidates that have so many output tokens; `lengths`: of the prompt, else of the data set."""
        remaining = [expected_remaining(num, lengths, max_tokens) for num in num_tokens]
        late = [late_remaining(num, lengths, max_tokens) for num in set(num_tokens)]
        return cls(
            group_id,
            len(num_tokens),
            prompt_tokens,
            sum(num_tokens),
            max(remaining, default=0.0),
            sum(remaining),
            max(late, default=0.0),
        )

    @property
    def kv_tokens(self) -> int:
        """Siblings share their prompt."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def peak_kv_tokens(self) -> float:
        """An upper bound: as if all were there until the last one has ended."""
        return self.kv_tokens + self.total_remaining

    @property
    def lengths(self) -> list[int]:
        """Predicted output tokens of each: of the longest, and of the others their mean."""
        num_others = self.num_candidates - 1
        others = [max(1, math.ceil((self.total_remaining - self.longest_remaining) / num_others))] if num_others else []
        return [max(1, math.ceil(self.longest_remaining)), *others * num_others]

    @property
    def late(self) -> GroupLoad:
        """The same group, should all of its candidates go on for long."""
        late = max(self.late_remaining, self.longest_remaining)
        return replace(self, longest_remaining=late, total_remaining=self.num_candidates * late)

    @property
    def mean_context(self) -> int:
        return self.prompt_tokens + round(self.generated_tokens / self.num_candidates)


@dataclass(frozen=True, slots=True)
class Room:
    """What a rank has left, if all that is there ran at once up to its predicted peak."""

    kv_tokens: float
    """Free tokens of KV cache; less than nothing where it is too full, as is the next."""
    candidates: float
    remaining_tokens: float
    """Predicted load: what is there has so many output tokens to come."""

    def holds(self, group: GroupLoad) -> bool:
        return group.peak_kv_tokens <= self.kv_tokens and group.num_candidates <= self.candidates

    def after(self, group: GroupLoad) -> Room:
        return Room(
            self.kv_tokens - group.peak_kv_tokens,
            self.candidates - group.num_candidates,
            self.remaining_tokens + group.total_remaining,
        )


@dataclass(frozen=True, slots=True)
class RankLoad:
    """One data-parallel rank: a whole engine, with all of its tensor-parallel group."""

    rank: int
    groups: tuple[GroupLoad, ...] = ()
    other_requests: int = 0
    """Requests outside of groups. They do not move, so a rank that has any cannot be emptied."""
    other_kv_tokens: int = 0
    """Theirs."""
    kv_capacity_tokens: int | None = None
    """None: never full."""
    max_num_seqs: int | None = None
    """None: no limit."""
    is_held: bool = False
    """It takes nothing new."""
    transfer: TransferCost | None = None
    """What KV costs that comes with a group; None: what comes is computed again."""

    @property
    def num_candidates(self) -> int:
        return sum(group.num_candidates for group in self.groups)

    @property
    def peak_kv_tokens(self) -> float:
        return self.other_kv_tokens + sum(group.peak_kv_tokens for group in self.groups)

    @property
    def room(self) -> Room:
        return Room(
            (math.inf if self.kv_capacity_tokens is None else self.kv_capacity_tokens) - self.peak_kv_tokens,
            (math.inf if self.max_num_seqs is None else self.max_num_seqs) - self.other_requests - self.num_candidates,
            sum(group.total_remaining for group in self.groups),
        )

    @property
    def late(self) -> RankLoad:
        """Should everything that is there go on for long."""
        return replace(self, groups=tuple(group.late for group in self.groups))

    def with_group(self, group: GroupLoad) -> RankLoad:
        return replace(self, groups=(*self.groups, group))

    def without_group(self, group_id: str) -> RankLoad:
        return replace(self, groups=tuple(group for group in self.groups if group.group_id != group_id))


def price_s(cost: CostModel, group: GroupLoad, transfer: TransferCost | None = None) -> float:
    """Seconds for which everybody on the target stands still when this group moves there.

    Its prompt is computed once, and what its candidates have generated; where KV comes along (`transfer`), only what is
    behind each candidate's last whole block.
    """
    if transfer is None:
        return cost.step_prefill_s + group.kv_tokens * cost.prefill_s_per_token
    num_computed = min(transfer.num_computed(group.num_candidates), group.kv_tokens)
    sent_s = (group.kv_tokens - num_computed) * transfer.s_per_token
    return cost.step_prefill_s + num_computed * cost.prefill_s_per_token + sent_s


def end_s(cost: CostModel, load: RankLoad, arrived: Sequence[GroupLoad] = ()) -> float:
    """Predicted seconds until a rank's last candidate has ended; `arrived`: those of its groups that move there."""
    lengths = [length for group in load.groups for length in group.lengths]
    contexts = [group.mean_context for group in load.groups for _ in range(group.num_candidates)]
    decoding = replace(cost, prefill_s_per_token=0.0, step_prefill_s=0.0, max_num_seqs=load.max_num_seqs)
    return sum(price_s(cost, group, load.transfer) for group in arrived) + rollout_time(lengths, decoding, contexts)
