"""The watch of an engine, with a made-up part."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.time_limit import end_within
from tests.support.waiting import eventually
from vllm_rollout.kernel.api import life
from vllm_rollout.kernel.api.life import Life, life_of

pytestmark = pytest.mark.anyio


class FailsOnce(Life):
    """Sees rank 1 die at the second look. The first one fails."""

    num_looks = 0

    @property
    def living_ranks(self) -> list[int]:
        return [0, 1] if self.num_looks < 2 else [0]

    def look(self) -> None:
        self.num_looks += 1
        if self.num_looks == 1:
            raise RuntimeError("planted")


class Client:
    """As much of an engine client as the watch needs."""

    num_ranks = 2
    errored = False

    def __init__(self) -> None:
        self.told: list[Exception] = []
        self.output_processor = SimpleNamespace(propagate_error=self.told.append)


async def test_a_part_sees_a_rank_die_and_an_exception_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "LOOK_S", 0.01)
    end_within(30)
    monkeypatch.setattr(life, "faces", lambda face: iter([("failing", FailsOnce)] if face == "life" else []))
    client = Client()
    watch = life_of(client)
    watch.watch()
    await eventually(lambda: watch.living_ranks == [0], every_s=0.01)
    assert not client.told
    client.errored = True
    await eventually(lambda: client.told, every_s=0.01)


def test_without_a_part_all_ranks_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "faces", lambda face: iter(()))
    assert list(life_of(Client()).living_ranks) == [0, 1]
