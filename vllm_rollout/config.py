"""Constants that users and several modules share, with unit and range. A constant of one module is in that module.

Invariant: a default is stated once.
"""

from __future__ import annotations

MAX_GROUP_SIZE = 4096
"""Largest accepted `group_size`. The server's `max_num_seqs` is usually the tighter bound."""

DEFAULT_AUDIT_RATIO = 0.05
"""Share of groups that are audited if the server learns.

After some 1,300 groups of 8 a success rate of 0.3 is known to 0.02. A training step loses 5 % of the time that
redundancy saves.
"""

MAX_PATIENCE = 1000.0
"""Largest `patience` of a dual-end selection. A larger one would have no effect."""

MAX_TRADEOFF = 1000.0
"""Largest `tradeoff` of redundancy "auto". From there on no prompt gets a spare candidate."""

MAX_PROMPTS = 16_384
"""Largest number of prompts in one rollout, and of prompts that a round returns."""

MAX_SPECULATION = 16.0
"""Largest speculation factor of a run. RollPacker recommends 1.1 to 1.4."""

DEFAULT_SPECULATION = 1.25
"""Default speculation factor (eta) of a run, for prompts and for responses (RollPacker 6.3)."""

MAX_CANDIDATES = 262_144
"""Largest number of candidates in one rollout, spare ones too: 16 for each of the largest number of prompts.

Until it is over, a rollout holds 1.5 KB for a prompt. Unless it streams, it also holds 0.4 KB for a candidate that
ended, and 26 bytes for a token to return (7 without log probabilities). The most candidates take 0.13 GB without their
tokens.
"""

MAX_BODY_BYTES = 64 * 1024 * 1024
"""Largest request body of our endpoints, in bytes: 16k prompts of 500 token ids fit."""

MAX_HELD_BYTES = 4 * MAX_BODY_BYTES
"""Largest sum of request bodies that one API process holds, in bytes.

A request that waits for its turn waits in memory, where it takes several times as much.
"""

OUTPUT_INTERVAL_TOKENS = 64
"""Tokens per report of a candidate without streaming to the API process. It also reports at its end.

The number is small enough that throughput counters move, and large enough to avoid a message per token.
"""

CPU_BLOCK_SIZE_TOKENS = 32
"""KV block size on CPU if the user sets none. vLLM's default there, 128, shares nothing between short prompts."""

MAX_IDLE_GROUPS = 4096
"""Groups without a running candidate that the engine remembers while it waits for late siblings."""

MAX_IDLE_S = 600.0
"""Seconds for which the engine remembers a group without a running candidate.

Siblings are sent together, or after the environment of each has been set up. A trainer may die amid a group and come
back with the same names. It must not find the old group for ever.
"""

UNMET_S = 30.0
"""Seconds without a running or a new sibling after which the siblings of a joined group count as never meeting."""

RECORD_MAX_MIB = 1024
"""Size of a recording on disk, in MiB: some 5,000 rollouts of 2,048 candidates."""

MAX_PRIORITY = 2**31 - 1
"""Largest absolute priority of a rollout. vLLM accepts 32 bits."""

MAX_TURNS = 10_000
MAX_SESSION_TOKENS = 1 << 24
SESSION_IDLE_S = 600.0
"""Seconds of silence between two turns after which a session is void: as long as joined groups wait for siblings."""
MAX_SESSION_IDLE_S = 86_400.0
MAX_OPEN_SESSIONS = 65_536
"""Largest number of sessions of all clients whose groups are not over."""
MAX_DETECTION_LENGTH = 4096
"""Largest `detection_length`, in tokens: the worker keeps a trace of that many numbers for each candidate."""

MAX_ADAPTERS = 8
"""LoRA adapters for which one server learns, beside the base model: as many as it may serve at a time, and a few more.

The learning state of one adapter takes at most eight heads, of 72 MB each at hidden size 4,096, and 60 MB of prompts.
"""

MAX_TRIAL_LENGTHS = 6
"""Detection lengths that one rollout compares. Two of the learned lengths are left to other rollouts."""

TRIAL_LENGTHS = (16, 48, 128)
"""Detection lengths that "auto" compares until one is known to be best."""

CONFIDENCE_WINDOW_TOKENS = 16
"""Window of trace confidence, in tokens. DeepConf takes 1,024 and more for whole traces. Ours end at
`detection_length`."""

MAX_REMEMBERED_CANDIDATES = 65_536
"""Candidates of rollouts with pruning for which rewards are accepted. The oldest are forgotten first."""

REWARD_THRESHOLD = 0.5
"""A posted reward above it is positive: right for rewards of 0 and 1, of -1 and 1, and for scores in [0, 1]."""

MAX_REWARD_S = 86_400.0
"""Largest time limit, in seconds, of a reward of one trajectory."""

MAX_STATE_BYTES = 1024 * 1024 * 1024
"""Largest learning state that can be sent back, in bytes.

A head of hidden size 8192 takes 25 MB with its optimizer and the labelled states saved with it. Each of nine names may
have four.
"""

MAX_REWARD = 1e100
"""Largest absolute reward: sums of squares over any number of rewards stay finite."""

REPORT_INTERVAL_S = 5.0
"""Least seconds between two updates of the gauges of calibration and head by posted rewards."""

CALIBRATION_WINDOW = 2048
"""Newest labels, of both kinds together, that calibrate a score.

They cover a few training steps, so that calibration follows the policy. Their number gives an error of about 0.03.
"""

MIN_STEP_S = 1e-6
"""Shortest predicted decode step, in seconds: a floor under extrapolated profiles."""

MAX_TRACED_TOKENS = 10_000_000
"""Largest length in a trace, in tokens. It exceeds any model's context, so a larger one is a broken row."""

HISTORY_KEY_CHARS = 512
"""Longest key of a remembered prompt, in characters. Prompt ids have at most 256."""

DEFAULT_TRADEOFF = 1.0
"""Weight lambda of DARTS Eq. 8, in units of the rollout without redundancy: a gain of 1 in rho ln M is worth its
time."""

CALL_BUDGET_S = 0.002
"""Largest time, in seconds, for calls of an API process to an engine core between two steps.

One more piece of work of at most 3 ms is allowed (docs/development/log.md). The rest waits for the next step.
"""
