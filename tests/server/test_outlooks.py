"""What several ranks are told to expect of a rollout's groups."""

import pytest

from vllm_rollout.group.lengths.history import LengthHistory
from vllm_rollout.server.engine import Outlook

from .test_shaping import body, rollout, seen

pytestmark = pytest.mark.anyio


async def test_several_ranks_are_told_what_to_expect_of_each_group(engine, http):
    engine.moves.num_ranks = 2
    seen(engine, "a", 30, 34, 38)
    of_a, dataset = engine.learning.judge.memory.lengths.of("id:a"), engine.learning.judge.memory.lengths.dataset()
    for redundancy in (0, "auto"):
        engine.learning.judge.memory.lengths = LengthHistory()
        seen(engine, "a", 30, 34, 38)
        await rollout(http, body("a", "b", redundancy=redundancy, sampling={"seed": 3, "max_tokens": 90}))
        tokens = {id: len(f"prompt {id}") for id in "ab"}
        assert engine.outlooks == {
            "a": Outlook(of_a, tokens["a"], 90, "off"),
            "b": Outlook(dataset, tokens["b"], 90, "off"),
        }


async def test_what_a_rollout_teaches_does_not_predict_its_own_groups(engine, http):
    engine.moves.num_ranks, engine.num_launch_places = 2, 6
    await rollout(http, body("a", "b", "c"))
    assert [its.lengths for its in engine.outlooks.values()] == [None] * 3
    await rollout(http, body("a", "b", "c"))
    assert all(its.lengths is not None for its in engine.outlooks.values())


async def test_one_rank_needs_no_predictions(engine, http):
    seen(engine, "a", 30, 34, 38)
    await rollout(http, body("a", redundancy=0))
    assert engine.outlooks == {"a": None}
