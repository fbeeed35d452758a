"""Groups that wait at the door for the weights of an engine that was rebuilt."""

from __future__ import annotations

from vllm_rollout.parts.rounds.with_shaping.api import lost_weights
from vllm_rollout.parts.rounds.with_shaping.api.lost_weights import LostWeights


async def test_a_group_that_waits_for_the_next_engine_waits_for_its_weights_too(new_cluster, monkeypatch):
    monkeypatch.setattr(lost_weights, "LOOK_S", 0.0)
    cluster = new_cluster()
    llm, said = cluster.llm, ["default"]

    async def get_weight_version() -> str:
        return said[0]

    llm.get_weight_version = get_weight_version
    llm.door.shut()
    cluster.start("g", [5, 5], 2)
    await cluster.turn()
    LostWeights(llm).version = "step-7"  # the engine behind the door is another one
    llm.door.open()
    for _ in range(3):
        await cluster.turn()
    assert not cluster.cores_of("g")
    assert llm.door.num_inside == 2  # so that no other engine comes in between
    said[0] = "step-8"
    await cluster.done(*cluster.readers.values())
    assert cluster.ends == {("g", 0): ["finished"], ("g", 1): ["finished"]}
