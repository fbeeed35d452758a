"""Numbers of rounds at `/metrics`."""

from tests.kernel.http.fake_engine import FakeEngine
from tests.kernel.http.test_metrics import samples
from tests.parts.rounds.steps import races_of
from tests.parts.rounds.test_runs import interrupt, make, prompts
from vllm_rollout.kernel.http.gauges import FreshGauges


async def test_races_are_seen_without_a_rollout(app, http, engine: FakeEngine):
    app.add_middleware(FreshGauges)
    for race_id in "ab":
        races_of(engine.steps).widen(race_id, 1)
    assert (await samples(http))["races_held"] == 2


async def test_a_client_that_leaves_its_round_is_counted(http, engine: FakeEngine):
    await make(http)
    await interrupt(http, engine, prompts=prompts(0, 6))
    assert (await samples(http))["clients_left_total.rollout"] == 1
