"""Time limits in a file."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.waiting import eventually
from vllm_rollout.parts.rewards.grading import kept_limits
from vllm_rollout.parts.rewards.grading.kept_limits import KeptLimits
from vllm_rollout.parts.rewards.rules.time_limits import LimitTerms, TimeLimits

pytestmark = pytest.mark.anyio


async def test_limits_go_on_where_another_grader_stopped_and_two_never_lower_each_others(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(kept_limits, "SAVE_INTERVAL_S", 0.0)
    path = tmp_path / "limits.json"
    for seconds in (4.0, 3.0):
        limits = TimeLimits(LimitTerms())
        kept = KeptLimits(path, limits)
        limits.observe("both", seconds, is_correct=True)
        limits.observe(f"{seconds}", seconds, is_correct=True)
        kept.changed()
        kept.changed()
        await eventually(
            lambda name=f"{seconds}": path.exists() and name in KeptLimits(path, TimeLimits())._limits.export()
        )
    found = TimeLimits(LimitTerms())
    KeptLimits(path, found)
    assert found.export() == {"both": 4.0, "4.0": 4.0, "3.0": 3.0}


async def test_two_that_write_at_once_lose_nothing(tmp_path: Path, monkeypatch):
    path, both_read = tmp_path / "limits.json", threading.Barrier(2)
    write_whole = kept_limits.write_whole

    def late(path: Path, content: bytes) -> None:
        with suppress(threading.BrokenBarrierError):  # nobody else has read meanwhile
            both_read.wait(0.2)
        write_whole(path, content)

    monkeypatch.setattr(kept_limits, "write_whole", late)
    kept = KeptLimits(path, TimeLimits())
    await asyncio.gather(*(asyncio.to_thread(kept._merge, {name: 1.0}) for name in "xy"))
    assert kept._read() == {"x": 1.0, "y": 1.0}


@pytest.mark.parametrize("content", ["", "[]", '{"a": "b"}', '{"a": -1}'])
def test_a_file_that_is_none_of_ours_is_named(tmp_path: Path, content: str):
    path = tmp_path / "limits.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"limits\.json|anchor"):
        KeptLimits(path, TimeLimits())


async def test_what_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr(kept_limits, "SAVE_INTERVAL_S", 0.0)
    kept = KeptLimits(tmp_path / "none" / "limits.json", TimeLimits())
    kept.changed()
    await eventually(lambda: "not written" in caplog.text, every_s=0.001)
