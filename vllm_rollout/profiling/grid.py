"""Chooses the points that a profile measures.

Invariant: a point of the plan fits into the engine. A point that does not fit is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_rollout.parts.shaping.profile_file import EngineFacts

PROFILE_SHORTEST_CONTEXT_TOKENS = 128
"""Shortest context of a profile. The other two are half of the longest and the longest."""
PROFILE_STEPS = 32
"""Decode steps per point of a profile, which takes their median."""
PROFILE_WARMUP_STEPS = 8
"""Decode steps before the measured ones, not counted."""
PROFILE_CHUNK_TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192)
"""Prompt tokens of a profile's prefill steps, as far as the engine computes them in one step."""
PROFILE_QUICK_BATCH_SIZE = 32
"""Largest batch of a quick profile."""
PROFILE_QUICK_CONTEXT_TOKENS = (128, 512)
"""Contexts of a quick profile, in tokens."""
PROFILE_QUICK_STEPS = 12
"""Decode steps per point of a quick profile, which takes their median."""
PROFILE_QUICK_WARMUP_STEPS = 3
"""Decode steps before the measured ones in a quick profile, not counted."""


class GridPoint(NamedTuple):
    """Decode steps with `batch_size` candidates of `context_tokens` each."""

    batch_size: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """The user's choices. None: the default."""

    batch_sizes: tuple[int, ...] | None = None
    contexts: tuple[int, ...] | None = None
    quick: bool = False
    num_steps: int | None = None

    @property
    def steps(self) -> tuple[int, int]:
        """Warm-up and measured steps of a point."""
        if self.quick:
            return PROFILE_QUICK_WARMUP_STEPS, self.num_steps or PROFILE_QUICK_STEPS
        return PROFILE_WARMUP_STEPS, self.num_steps or PROFILE_STEPS


@dataclass(frozen=True, slots=True)
class Plan:
    """Points in the order in which they are measured."""

    points: tuple[GridPoint, ...]
    left_out: tuple[GridPoint, ...]
    """Wanted points that do not fit into the KV cache."""
    chunks: tuple[int, ...]
    """Prompt tokens of the prefill steps."""


def make_plan(wanted: Wanted, engine: EngineFacts) -> Plan:
    """Plan the points of one engine.

    Contexts ascend, so that each finds the one before in the prefix cache. The largest batch comes first, and fills the
    cache for the others.

    Raises: ValueError for a batch size or context that the engine does not allow, or if no point is left.
    """
    room = sum(wanted.steps)
    batch_sizes = wanted.batch_sizes or default_batch_sizes(
        min(engine.max_num_seqs, PROFILE_QUICK_BATCH_SIZE) if wanted.quick else engine.max_num_seqs
    )
    longest = engine.max_model_len - room
    contexts = wanted.contexts or default_contexts(longest, wanted.quick)
    for size in batch_sizes:
        if not 1 <= size <= engine.max_num_seqs:
            raise ValueError(
                f"--batch-sizes: {size} must be in [1, {engine.max_num_seqs}], the engine's max_num_seqs. Leave it "
                f"out, or profile and serve with --max-num-seqs {size}."
            )
    for context in contexts:
        if not 1 <= context <= longest:
            raise ValueError(
                f"--contexts: {context} must be in [1, {longest}]: max_model_len ({engine.max_model_len}) less the "
                f"{room} steps of a point."
            )
    points, left_out = [], []
    for context in sorted(set(contexts)):
        for size in sorted(set(batch_sizes), reverse=True):
            blocks = -(-(context + room) // engine.block_size)
            fits = size * blocks * engine.block_size <= engine.kv_capacity_tokens
            (points if fits else left_out).append(GridPoint(size, context))
    if not points:
        raise ValueError(
            f"no point fits into the KV cache of {engine.kv_capacity_tokens:,} tokens. Give the engine more memory "
            "(VLLM_CPU_KVCACHE_SPACE, --gpu-memory-utilization) or ask for shorter --contexts."
        )
    most = min(engine.max_num_batched_tokens - 1, longest)
    chunks = [chunk for chunk in PROFILE_CHUNK_TOKENS if chunk <= most and not (wanted.quick and chunk > 512)]
    return Plan(tuple(points), tuple(left_out), tuple(chunks))


def default_batch_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes 1, 2, 3, 4, 6, 8, 12, …: two per doubling, and the largest."""
    sizes = {1, 2, 3, largest}
    power = 4
    while power <= largest:
        sizes |= {power, power * 3 // 2}
        power *= 2
    return tuple(sorted(size for size in sizes if size <= largest))


def default_contexts(longest: int, quick: bool) -> tuple[int, ...]:
    """A short context, half of the longest, and the longest. A quick profile has two short ones."""
    if quick:
        wanted: Sequence[int] = PROFILE_QUICK_CONTEXT_TOKENS
    else:
        wanted = (PROFILE_SHORTEST_CONTEXT_TOKENS, longest // 2, longest)
    return tuple(sorted({min(context, longest) for context in wanted}))
