"""The device's clock and the price of a step.

Invariant: a step begins when it is launched or when the one before it is over, whichever is later. So a late host shows
as idle time of the device, and lateness does not add up.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

from vllm_rollout.parts.emulation.settings import Settings, StepSettings
from vllm_rollout.parts.shaping.profile_file import Profile
from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve

COST_KNOTS = (1.0, 1024.0)
"""Batch sizes and contexts: a step's cost is linear in each."""


class StepWork(NamedTuple):
    """The amount of work in one step."""

    num_requests: int
    context_tokens: int
    """The context of all requests together, this step's tokens among them."""
    prefilled_tokens: int
    """Tokens beyond one per request and its drafts."""
    num_drafts: int = 0
    """Drafts to verify. Each is computed like a request's token, and reads no context of its own."""

    @property
    def num_decoded(self) -> int:
        return self.num_requests + self.num_drafts


class DeviceSpan(NamedTuple):
    """A step on the device, in seconds of the host's clock."""

    launched: float
    start: float
    end: float


class Device:
    """Carries out one step after the other."""

    def __init__(self, settings: Settings, speed: float = 1.0) -> None:
        self._seconds = step_seconds(settings)
        self._speed = speed
        self._free_at = 0.0

    def launch(self, now: float, work: StepWork) -> DeviceSpan:
        start = max(now, self._free_at)
        self._free_at = start + self._seconds(work) / self._speed
        return DeviceSpan(now, start, self._free_at)


def step_seconds(settings: Settings) -> Callable[[StepWork], float]:
    """Seconds of a step at speed 1. Raises: ValueError for a profile that cannot be read."""
    cost = cost_of(settings)

    def seconds(work: StepWork) -> float:
        prefill_s = work.prefilled_tokens * cost.prefill_s_per_token
        prefill_s += cost.step_prefill_s if work.prefilled_tokens else 0.0
        return cost.ptl(work.num_decoded, work.context_tokens / work.num_decoded) + prefill_s

    return seconds


def cost_of(settings: Settings) -> CostModel:
    """Cost model of the device's steps, for the rules. Raises: ValueError for a profile that cannot be read."""
    if settings.profile is not None:
        return Profile.read(settings.profile).cost(settings.tensor_parallel_size or 1)
    assert settings.sizes is None, "Settings.at() has chosen one"
    step = settings.step or StepSettings()

    def curve(context: float) -> PTLCurve:
        per_request_ms = step.ms_per_request + context * step.ms_per_context_token
        return PTLCurve(COST_KNOTS, tuple((step.ms + per_request_ms * size) / 1e3 for size in COST_KNOTS))

    curves = tuple((context, curve(context)) for context in COST_KNOTS)
    return CostModel(curves, prefill_s_per_token=step.ms_per_prefilled_token / 1e3)


class FlagDevice(NamedTuple):
    """The device that the flags of a server name."""

    file: str
    settings: Settings

    def cost(self, tensor_parallel_size: int) -> CostModel:
        """Cost model of the device's steps. Raises: ValueError."""
        return cost_of(self.settings.at(tensor_parallel_size))


def device_of(flags: Namespace) -> FlagDevice | None:
    """Face `device`. None if the server has a real one. Raises: ValueError for a file that describes none."""
    file = flags.rollout_emulate
    return None if file is None else FlagDevice(file, Settings.read(file))
