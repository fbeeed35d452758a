"""Calls to an engine core about groups that race each other (`kernel/call_table.py`)."""

from __future__ import annotations

from typing import NamedTuple

from vllm_rollout.kernel.call_table import Operation


class WiderRace(NamedTuple):
    race_id: str
    num_wanted: int


CUT_RACE: Operation[str, None] = Operation("cut_race", str, None)
"""Stop the other groups of a race as `deferred` in the next step: enough groups are complete on all ranks."""
WIDEN_RACE: Operation[WiderRace, None] = Operation("widen_race", WiderRace, None)
"""Raise the number of groups that have to complete, because some complete ones were filtered."""
NUM_RACES: Operation[None, int] = Operation("num_races", None, int)
FORGET_RACE: Operation[str, None] = Operation("forget_race", str, None)
"""Forget a race whose round is over."""
