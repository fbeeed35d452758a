"""What users and several modules need to agree on, with unit and range; a constant of one module lives in it.

Invariant: a default is stated once.
"""

from __future__ import annotations

MAX_GROUP_SIZE = 4096
"""Largest accepted `group_size`; the server's `max_num_seqs` is usually the tighter bound."""

DEFAULT_AUDIT_RATIO = 0.05
"""Share of groups that are audited where something is learned: a success rate of 0.3 is then known to 0.02 after some
1,300 groups of 8, and a step of training takes 5 % of what redundancy saves it longer."""

MAX_PATIENCE = 1000.0
"""Largest `patience` of a dual-end selection; more is as good as none."""

MAX_TRADEOFF = 1000.0
"""Largest `tradeoff` of redundancy "auto"; from there on nobody gets a spare candidate."""

MAX_PROMPTS = 16_384
"""Prompts in one rollout, and prompts that a round returns."""

MAX_SPECULATION = 16.0
"""Largest speculation factor of a run; RollPacker recommends 1.1 to 1.4."""

DEFAULT_SPECULATION = 1.25
"""eta of a run, for prompts and for responses (RollPacker 6.3)."""

MAX_CANDIDATES = 262_144
"""Candidates of one rollout, spare ones too: 16 for each of the most prompts there may be. Until it is over a rollout
holds 1.5 KB for a prompt and, unless it streams, 0.4 KB for a candidate that ended and 26 bytes for a token that will
be returned (7 without log probabilities): 0.13 GB for the most candidates without their tokens."""

MAX_BODY_BYTES = 64 * 1024 * 1024
"""Largest request body of our endpoints, in bytes: 16k prompts of 500 token ids fit."""

MAX_HELD_BYTES = 4 * MAX_BODY_BYTES
"""Bodies of requests on their way in one API process, in bytes: what waits for its turn waits in memory, where it takes
several times as much."""

OUTPUT_INTERVAL_TOKENS = 64
"""A candidate nobody streams reports to the API process once per this many tokens and at its end.
Small enough that throughput counters move, large enough that a message per token is gone."""

CPU_BLOCK_SIZE_TOKENS = 32
"""KV block size on CPU when the user names none: vLLM's default there, 128, shares nothing between short prompts."""

MAX_IDLE_GROUPS = 4096
"""Groups without a running candidate that the engine remembers while it waits for late siblings."""

MAX_IDLE_S = 600.0
"""How long, in seconds: siblings are sent together, or after the environment of each has been set up. A trainer that
died amid a group, and comes back with the same names, must not find it for ever."""

UNMET_S = 30.0
"""After how many seconds without a running or a new sibling a joined group counts as one whose siblings do not meet."""

RECORD_MAX_MIB = 1024
"""What a recording takes on disk, in MiB: of 2,048 candidates a rollout, some 5,000 rollouts."""

MAX_PRIORITY = 2**31 - 1
"""How far a rollout's priority may go either way; vLLM takes 32 bits."""

MAX_TURNS = 10_000
MAX_SESSION_TOKENS = 1 << 24
SESSION_IDLE_S = 600.0
"""Silence, in seconds, after which a session between two turns is void: as long as joined groups wait for siblings."""
MAX_SESSION_IDLE_S = 86_400.0
MAX_OPEN_SESSIONS = 65_536
"""Sessions of all clients whose groups are not over."""
MAX_SESSION_HISTORY = 1 << 25
"""Tokens of sessions that a server holds at most: 128 MiB, twice that with log probabilities."""
MAX_ENDED_SESSIONS = 65_536
"""Sessions of groups that are over, which may still be read and answered."""

MAX_DETECTION_LENGTH = 4096
"""Largest `detection_length`, in tokens: the worker keeps a trace of that many numbers for each candidate."""

MAX_DETECTION_LENGTHS = 8
"""Detection lengths that one server learns at for each served name; each has its own head and calibration."""

MAX_ADAPTERS = 8
"""LoRA adapters that one server learns of, beside the base model: as many as it may serve at a time, with some to
spare. What is learned of one takes at most eight heads, of 72 MB each at hidden size 4,096, and 60 MB of prompts."""

MAX_TRIAL_LENGTHS = 6
"""Detection lengths that one rollout compares; two of those that are learned at are left to others."""

TRIAL_LENGTHS = (16, 48, 128)
"""Detection lengths that "auto" compares until it can tell which one is best."""

CONFIDENCE_WINDOW_TOKENS = 16
"""Window of trace confidence. DeepConf takes 1,024 and more for whole traces; ours end at `detection_length`."""

DRAFT_MEMORY_BYTES = 256 * 2**20
"""Host memory for tokens that serve as drafts: about 25 million of them."""

FEATURE_RING_BYTES = 256 * 1024 * 1024
"""Host memory for hidden states that wait for their reward: 32,768 candidates at hidden size 4,096 in bfloat16."""

MAX_REMEMBERED_CANDIDATES = 65_536
"""Candidates of rollouts with pruning for which rewards are accepted; the oldest rollouts are forgotten first."""

TRAIN_BUDGET_S = 0.004
"""Training between two engine steps: as many optimizer steps as fit, and at least one."""

QUALITY_HEAD_HIDDEN = 128
"""Width of the quality head (ARRoL 4.2)."""

REWARD_THRESHOLD = 0.5
"""A posted reward above it is positive: right for rewards of 0 and 1, of -1 and 1, and for scores in [0, 1]."""

MAX_STATE_BYTES = 1024 * 1024 * 1024
"""Largest learning state that can be sent back, in bytes: a head of hidden size 8192 with its optimizer and the
labelled states that are saved with it takes 25 MB, so that there may be four for each of nine names."""

MAX_REWARD = 1e100
"""Largest reward, up or down: sums of squares over any number of them stay finite."""

REPORT_INTERVAL_S = 5.0
"""Posted rewards refresh the gauges of calibration and head at most this often, in seconds."""

CALIBRATION_WINDOW = 2048
"""Newest labels, of both kinds together, that calibrate a score: a few training steps, so that calibration follows the
policy, and enough for an error of about 0.03."""

MAX_LABEL_WEIGHT = 20.0
"""A label weighs 1 / survival probability, clipped here: nothing is clipped at the default `min_survival` of 0.05."""

MIN_STEP_S = 1e-6
"""No decode step is predicted to be quicker, in seconds: a floor under extrapolated profiles."""

MAX_TRACED_TOKENS = 10_000_000
"""Largest length in a trace, in tokens: longer than any model's context, so that more is a broken row."""

HISTORY_KEY_CHARS = 512
"""Longest key of a remembered prompt; prompt ids have at most 256 characters."""

LOG_STD_PRIOR_WEIGHT = 4.0
"""Observations that the data set's log standard deviation counts for in the fit of a group with censored lengths.
Fewer leave the standard deviation of cut groups too wild, more take away what prompts differ in."""

DEFAULT_TRADEOFF = 1.0
"""lambda of DARTS Eq. 8, in units of the rollout without redundancy: a gain of 1 in rho ln M is worth its time."""

CALL_BUDGET_S = 0.002
"""What an API process asks of an engine core between two steps takes at most this long, in seconds, plus one piece of
work of at most 3 ms (docs/development/log.md); the rest waits for the next step."""
