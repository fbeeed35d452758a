"""Aborts by a client of vLLM's endpoints, as rollouts hear of them."""

import pytest

from tests.kernel.api.stepped_llm import SteppedLLM
from vllm_rollout.kernel.rules.request_names import names_of_request

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


@pytest.mark.parametrize("id", [1, None, ["a"], "", "\ud800"])
async def test_an_id_that_no_request_can_have_is_passed_over(new_run, id):
    llm, heard = SteppedLLM(new_run()), []
    llm.when_aborted = heard.append
    await llm.abort(ids := [id, "rollout-1"])
    await llm.abort(others := [id])
    assert heard == [names_of_request("rollout-1")]
    assert ids == others == []  # vLLM answers with their number
