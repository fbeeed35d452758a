"""The example of a trainer on freed ranks, over HTTP, with ranks that are not there."""

import pytest

from examples import freed_ranks

from .conftest import serving

pytestmark = pytest.mark.anyio


async def test_a_trainer_starts_when_ranks_are_free_and_the_next_rollout_waits_for_it(engine, app, monkeypatch):
    engine.moves.num_ranks = 2
    engine.step_s = 0.002
    happened = []

    def noted(what, call):
        def wrapper(*args, **kwargs):
            happened.append(what)
            return call(*args, **kwargs)

        return wrapper

    for owner, name in [
        (freed_ranks.StreamTrainer, "begin"), (freed_ranks.StreamTrainer, "add"), (freed_ranks.StreamTrainer, "finish"),
        (freed_ranks.AsyncRolloutClient, "stream"),
    ]:  # fmt: skip
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    monkeypatch.setattr(freed_ranks, "print", lambda line: happened.append(line.split()[0]), raising=False)
    monkeypatch.setattr(freed_ranks, "STEPS", 2)
    with serving(app) as url:
        await freed_ranks.main(url)
    assert happened == ["begin", "stream", "ranks", *["add"] * freed_ranks.PROMPTS, "finish", "step"] * 2
