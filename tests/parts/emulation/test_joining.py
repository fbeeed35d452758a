"""Lengths of an emulated device in requests that reach the engine core themselves."""

from __future__ import annotations

from collections.abc import Callable

from vllm.v1.engine import FinishReason

from tests.kernel.core.scheduler_runs import TracedRun
from tests.kernel.core.test_joining import add
from vllm_rollout.parts.emulation.fate import LENGTHS_FIELD
from vllm_rollout.parts.emulation.options import EmulationOptions


def test_an_emulated_device_is_not_asked_for_a_length_that_is_none(new_run: Callable[..., TracedRun]) -> None:
    emulation = EmulationOptions("device.json")
    run = new_run(options=emulation)
    add(run, [9], {LENGTHS_FIELD: "long"}, "bad")
    add(run, [9], {LENGTHS_FIELD: 9}, "good")
    run.run()
    assert run.last("bad0").finish_reason == FinishReason.ERROR
    assert run.last("bad0").stop_reason.startswith(f"{LENGTHS_FIELD}")
    assert run.last("good0").finish_reason == FinishReason.STOP
