"""Aborts by a client of vLLM's endpoints, as rollouts hear of them."""

import pytest

from tests.kernel.api.stepped_llm import SteppedLLM

pytestmark = pytest.mark.anyio


async def test_rollouts_hear_when_everything_is_aborted(new_run):
    """Also rollouts that only wait, so that vLLM knows of no request."""
    llm, heard = SteppedLLM(new_run()), []
    llm.when_all_aborted = lambda: heard.append("all")
    await llm.abort("one-internal", internal=True)
    await llm.abort(["rollout-1"])
    assert heard == []
    await llm.abort([], internal=True)
    assert heard == ["all"]
