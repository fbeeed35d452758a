"""The watch of ranks, with made-up parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.time_limit import end_within
from tests.support.waiting import eventually
from vllm_rollout.kernel.api import life
from vllm_rollout.kernel.api.group_routes import GroupRoutes
from vllm_rollout.kernel.api.life import Life
from vllm_rollout.kernel.api.life_port import Death, LifePart
from vllm_rollout.kernel.rules.ranks import Ranks

pytestmark = pytest.mark.anyio


class Failing(LifePart):
    def deaths(self) -> list[Death]:
        raise RuntimeError("planted")

    def died(self, death: Death) -> None:
        raise RuntimeError("planted")

    def requests_of(self, rank: int) -> list[str]:
        raise RuntimeError("planted")


class Seeing(LifePart):
    """Sees rank 1 die, with one request."""

    def __init__(self) -> None:
        self.heard: list[Death] = []

    def deaths(self) -> list[Death]:
        return [Death(1, -9)]

    def died(self, death: Death) -> None:
        self.heard.append(death)

    def requests_of(self, rank: int) -> list[str]:
        return [f"request of {rank}"]


class Client:
    """As much of an engine client as the watch needs."""

    num_ranks = 2
    errored = False
    logger_manager = None
    engine_core = None

    def __init__(self) -> None:
        self.routes = GroupRoutes(Ranks(2))
        self.lost: dict[str, Any] = {}
        self.output_processor = SimpleNamespace(propagate_error=lambda error: None)

    def lose(self, requests: list[str], error: Exception) -> None:
        self.lost |= dict.fromkeys(requests, error)


async def test_parts_see_a_rank_die_and_an_exception_stays_with_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "LOOK_S", 0.01)
    end_within(30)
    seeing, client = Seeing(), Client()
    makers = [("failing", lambda client: Failing()), ("idle", lambda client: None), ("seeing", lambda client: seeing)]
    monkeypatch.setattr(life, "faces", lambda face: iter(makers if face == "life" else []))
    watch = Life(client)
    watch.watch()
    await eventually(lambda: client.lost, every_s=0.01)
    assert (seeing.heard, watch.dead, watch.living_ranks) == ([Death(1, -9)], {1: Death(1, -9)}, [0])
    assert (client.lost.keys(), client.routes.held) == ({"request of 1"}, {1})
    client.errored = True


def test_without_a_part_all_ranks_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "faces", lambda face: iter(()))
    assert Life(Client()).living_ranks == [0, 1]
