"""Load of each rank, the predicted end of its work, and the price of a group that moves there.

Invariants: a prediction is the sum of `CostModel.ptl` over the expected steps, plus the price of arriving groups. The
price of KV transfers is a moving average of measured transfers. It starts with an assumption, and is never 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vllm_rollout.parts.shaping.rules.cost import CostModel, rollout_time
from vllm_rollout.parts.shaping.rules.moments import LengthMoments, expected_remaining, late_remaining

ASSUMED_BYTES_PER_S = 1e9
"""Assumed transfer speed before the first transfer: a tenth of two copies through the memory of a quiet host."""
NEWEST_WEIGHT = 0.25
"""Weight of the newest transfer in the moving average. A transfer on a busy host does not decide the next four
moves."""


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Cost of arriving KV for the rank that receives it, while all of its candidates stand still."""

    s_per_token: float
    """Seconds per token, moving average."""
    block_size: int
    """Tokens per block. Only whole blocks are sent. The rest of each candidate, half a block on average, is computed
    again."""

    @classmethod
    def assumed(cls, bytes_per_token: float, block_size: int) -> TransferCost:
        """The cost before any transfer. bytes_per_token: of one worker, since all workers of an engine copy at once."""
        return cls(bytes_per_token / ASSUMED_BYTES_PER_S, block_size)

    def after(self, num_tokens: int, seconds: float) -> TransferCost:
        """The cost after a transfer of `num_tokens` in `seconds`."""
        newest = seconds / num_tokens
        return replace(self, s_per_token=self.s_per_token + NEWEST_WEIGHT * (newest - self.s_per_token))

    def num_computed(self, num_candidates: int) -> float:
        """Expected number of tokens that these candidates compute again."""
        return num_candidates * self.block_size / 2


class RunningGroup(NamedTuple):
    """A group as its engine core reports it, without predictions."""

    group_id: str
    prompt_tokens: int
    num_tokens: list[int]
    """Output tokens of each candidate that has not ended."""
    max_tokens: int | None


class EngineLoad(NamedTuple):
    """Load of one engine core, and what has happened to it since its start."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    """Used share of its KV blocks, from 0 to 1."""
    num_preemptions: int
    groups: list[RunningGroup]
    """Groups with candidates that have not ended."""
    num_internal_errors: int = 0
    """Exceptions of our own code that were caught, and failed candidates or groups."""
    num_weight_changes: int = 0
    """Number of weights updates. `weight_version` is the newest."""
    weight_version: str = ""


class ArrivedKV(NamedTuple):
    """KV that arrived in one engine core with groups, since its start."""

    num_groups: int = 0
    num_blocks: int = 0
    num_fallbacks: int = 0
    """Groups whose KV should have been sent to or from this engine core, but was computed again."""
    transfer: TransferCost | None = None
    """Cost of the next transfer. None if KV is not sent, or the last transfer failed."""


class RankState(NamedTuple):
    """Load of one rank, and its moves since its engine core started."""

    load: EngineLoad
    is_held: bool = False
    """True if the rank is kept empty."""
    num_moved_in: int = 0
    num_moved_out: int = 0
    """`num_moved_in` and `num_moved_out` count groups."""
    moving_s: float = 0.0
    """Seconds that its engine core spent on groups that leave and come, between two steps."""
    kv: ArrivedKV = ArrivedKV()
    is_dead: bool = False
    """True if its engine core has died."""

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return self.load.num_running + self.load.num_waiting


DEAD = RankState(EngineLoad(0, 0, 0.0, 0, []), is_held=True, is_dead=True)
"""A rank that has died: it gets no groups, and its counts are unknown."""


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """Candidates of a group that have not ended, running or waiting."""

    group_id: str
    num_candidates: int
    prompt_tokens: int
    generated_tokens: int
    """Output tokens of all these candidates together."""
    longest_remaining: float
    """Predicted remaining output tokens of the candidate that ends last."""
    total_remaining: float
    """Predicted remaining output tokens of all candidates together."""
    late_remaining: float = 0.0
    """Remaining output tokens of each candidate, if all go on for long (`late_remaining`)."""

    @classmethod
    def of(
        cls,
        group_id: str,
        prompt_tokens: int,
        num_tokens: Sequence[int],
        lengths: LengthMoments | None = None,
        max_tokens: int | None = None,
    ) -> GroupLoad:
        """The load of candidates with these output tokens. `lengths`: of the prompt, or else of the data set."""
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
        """Tokens in the KV cache. Siblings share their prompt."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def peak_kv_tokens(self) -> float:
        """Upper bound of the tokens in the KV cache, as if all candidates stayed until the last one has ended."""
        return self.kv_tokens + self.total_remaining

    @property
    def lengths(self) -> list[int]:
        """Predicted remaining output tokens of each candidate: the longest one's, and the mean of the others."""
        num_others = self.num_candidates - 1
        others = [max(1, math.ceil((self.total_remaining - self.longest_remaining) / num_others))] if num_others else []
        return [max(1, math.ceil(self.longest_remaining)), *others * num_others]

    @property
    def late(self) -> GroupLoad:
        """This group, if all of its candidates go on for long."""
        late = max(self.late_remaining, self.longest_remaining)
        return replace(self, longest_remaining=late, total_remaining=self.num_candidates * late)

    @property
    def mean_context(self) -> int:
        return self.prompt_tokens + round(self.generated_tokens / self.num_candidates)


@dataclass(frozen=True, slots=True)
class Room:
    """Free capacity of a rank, if all of its work ran at once up to its predicted peak."""

    kv_tokens: float
    """Free tokens of KV cache. Negative if the rank is too full, as for `candidates`."""
    candidates: float
    remaining_tokens: float
    """Predicted remaining output tokens of the rank's groups."""

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
    """Requests outside of groups. They do not move, so that a rank with any cannot be emptied."""
    other_kv_tokens: int = 0
    """Tokens of these requests in the KV cache."""
    kv_capacity_tokens: int | None = None
    """Capacity of the KV cache in tokens. None: never full."""
    max_num_seqs: int | None = None
    """Largest number of running candidates. None: no limit."""
    is_held: bool = False
    """True if the rank takes no new groups."""
    transfer: TransferCost | None = None
    """Cost of arriving KV. None: KV is not sent, and arriving tokens are computed again."""

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
        """This load, if all of its candidates go on for long."""
        return replace(self, groups=tuple(group.late for group in self.groups))

    def with_group(self, group: GroupLoad) -> RankLoad:
        return replace(self, groups=(*self.groups, group))

    def without_group(self, group_id: str) -> RankLoad:
        return replace(self, groups=tuple(group for group in self.groups if group.group_id != group_id))


def price_s(cost: CostModel, group: GroupLoad, transfer: TransferCost | None = None) -> float:
    """Seconds for which the target stands still when this group moves there.

    Without `transfer`, the target computes the prompt once, and the generated tokens of each candidate. With it, the
    target computes only the tokens behind each candidate's last whole block, and receives the KV of the others.
    """
    if transfer is None:
        return cost.step_prefill_s + group.kv_tokens * cost.prefill_s_per_token
    num_computed = min(transfer.num_computed(group.num_candidates), group.kv_tokens)
    sent_s = (group.kv_tokens - num_computed) * transfer.s_per_token
    return cost.step_prefill_s + num_computed * cost.prefill_s_per_token + sent_s


def end_s(cost: CostModel, load: RankLoad, arrived: Sequence[GroupLoad] = ()) -> float:
    """Predicted seconds until a rank's last candidate has ended. `arrived`: those of its groups that move there."""
    lengths = [length for group in load.groups for length in group.lengths]
    contexts = [group.mean_context for group in load.groups for _ in range(group.num_candidates)]
    decoding = replace(cost, prefill_s_per_token=0.0, step_prefill_s=0.0, max_num_seqs=load.max_num_seqs)
    return sum(price_s(cost, group, load.transfer) for group in arrived) + rollout_time(lengths, decoding, contexts)
