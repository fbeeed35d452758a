"""vLLM's client of several engine cores, in whose place a part has its own."""

import pytest
from vllm.v1.engine import core_client

from vllm_rollout.adapter import plugin


class Ours(core_client.DPLBAsyncMPClient):
    """The client of a made-up part."""


@pytest.mark.parametrize("there", [True, False])
def test_vllm_builds_the_client_of_a_part(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(core_client, "DPLBAsyncMPClient", before := core_client.DPLBAsyncMPClient)
    monkeypatch.setattr(plugin, "faces", lambda face: iter([("a part", Ours)] if there else []))
    plugin.replace_engine_client()
    assert core_client.DPLBAsyncMPClient is (Ours if there else before)
