"""Seconds of rollouts and training on a fixed number of devices, from numbers of tokens.

The constants are of a model of 8 B parameters on eight GPUs, data parallel. Each step reads 16 GB of weights per device
at 3.35 TB/s, and 128 KiB of KV per token of context. A sampled token stands for `World.scale` tokens.

Invariant: no function reads a real clock, and all arms of a world have the same devices.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_TOKENS = 512
"""Longest sampled answer."""
SLOTS = 512
"""Most candidates that run at a time."""
CONTEXT_S = 5e-9
"""Seconds of a step per token of context, if all devices roll out."""
PREFILL_S = 5e-6
"""Seconds to compute the KV of a token, if all devices roll out."""


@dataclass(frozen=True, slots=True)
class World:
    training: float
    """Share of training in a step of waiting."""
    scale: int = 16
    """Tokens for which a sampled token stands: 16 for answers of at most 8k tokens, 64 for 32k."""
    transfer_s: float = 1.0
    """Seconds of a weights update. Rollouts and training pause."""
    step_s: float = 5.2e-3
    """Seconds of a decoding step, of any number of candidates on any number of devices."""
    candidate_s: float = 6e-6
    """Seconds of a decoding step per candidate, if all devices roll out."""


ARITHMETIC = {"step_s": 1e-3, "candidate_s": 4e-5}
WORLDS = {
    "quarter": World(0.25),
    "tenth": World(0.1),
    "half": World(0.5),
    "long": World(0.25, scale=64),
    "fast-transfer": World(0.25, transfer_s=0.2),
    "slow-transfer": World(0.25, transfer_s=10.0),
    "arithmetic": World(0.25, **ARITHMETIC),
}


@dataclass(frozen=True, slots=True)
class Clock:
    world: World
    trained_tokens_s: float
    """Tokens per second if all devices train."""
    rollout_share: float = 1.0
    training_share: float = 1.0
    """Shares of the devices. Both are 1 if the devices alternate between rollouts and training."""

    def split(self, rollout_share: float) -> Clock:
        """The clock of devices that do not alternate."""
        return Clock(self.world, self.trained_tokens_s, rollout_share, 1 - rollout_share)

    def rollout_s(self, num_running: int, num_context: int) -> float:
        """Seconds in which each running candidate gets a sampled token. `num_context`: sampled tokens of context."""
        world = self.world
        work = num_running * world.candidate_s + num_context * world.scale * CONTEXT_S
        return world.scale * (world.step_s + work / self.rollout_share)

    def work_s(self, num_running: int, num_context: int) -> float:
        """Seconds of all devices for the same tokens, if SLOTS candidates shared each step."""
        world = self.world
        candidate_s = world.step_s / SLOTS + world.candidate_s
        return world.scale * (num_running * candidate_s + num_context * world.scale * CONTEXT_S)

    def training_s(self, num_tokens: int) -> float:
        return num_tokens * self.world.scale / (self.trained_tokens_s * self.training_share)

    def update_s(self, num_recomputed: int) -> float:
        """Seconds of a weights update. `num_recomputed`: sampled tokens whose KV is computed again."""
        return self.world.transfer_s + num_recomputed * self.world.scale * PREFILL_S / self.rollout_share
