"""Every knob once, with unit and range. Invariant: a default is stated here and nowhere else."""

from __future__ import annotations

SUPPORTED_VLLM = "0.32"
"""vLLM minor version whose seams the adapter uses."""

MAX_GROUP_SIZE = 4096
"""Largest accepted `group_size`; the server's `max_num_seqs` is usually the tighter bound."""

MAX_PROMPTS = 16_384
"""Prompts in one rollout."""

MAX_BODY_BYTES = 64 * 1024 * 1024
"""Largest request body of our endpoints, in bytes: 16k prompts of 500 token ids fit."""

OUTPUT_INTERVAL_TOKENS = 64
"""A candidate nobody streams reports to the API process once per this many tokens and at its end.
Small enough that throughput counters move, large enough that a message per token is gone."""

CPU_BLOCK_SIZE_TOKENS = 32
"""KV block size on CPU when the user names none: vLLM's default there, 128, shares nothing between short prompts."""

MAX_IDLE_GROUPS = 4096
"""Groups without a running candidate that the engine remembers while it waits for late siblings."""
