"""The demo's race, against the app around a FakeEngine."""

import pytest

from tests.server.conftest import app, engine, server_url  # noqa: F401
from vllm_rollout import AsyncRolloutClient
from vllm_rollout.demo.options import Options
from vllm_rollout.demo.phases import run_race
from vllm_rollout.process import ServerError

pytestmark = pytest.mark.anyio
OPTIONS = Options(prompts=3, group_size=2, candidates=4, max_tokens=64)


async def race(url: str, options: Options, on_group=lambda: None):
    async with AsyncRolloutClient(url) as client:
        return await run_race(client, options, on_group)


async def test_the_race_tells_every_candidate_and_every_group(server_url):  # noqa: F811
    groups_over = []
    phase = await race(server_url, OPTIONS, lambda: groups_over.append(True))
    assert len(groups_over) == OPTIONS.prompts
    assert [[c.index for c in group] for group in phase.groups] == [[0, 1, 2, 3]] * OPTIONS.prompts
    assert all(sum(c.state == "kept" for c in group) == OPTIONS.group_size for group in phase.groups)
    assert all(len(c.token_ids) == c.num_tokens for group in phase.groups for c in group if c.state == "kept")


async def test_the_race_fails_with_the_servers_words(server_url, engine):  # noqa: F811
    engine.max_num_seqs = 1
    with pytest.raises(ServerError, match="candidates"):
        await race(server_url, OPTIONS)
