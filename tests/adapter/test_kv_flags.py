"""`vllm-rollout serve --rollout-move-kv`: what it sets, and what is refused before anything starts."""

import os
import sys

import pytest

from vllm_rollout.adapter import plugin
from vllm_rollout.adapter.api.start import serve
from vllm_rollout.adapter.options import KEY, RolloutOptions


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """What `parse` sets for the process."""
    monkeypatch.setenv("VLLM_PLUGINS", os.environ.get("VLLM_PLUGINS", ""))
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(plugin, "register", lambda: None)  # vLLM's classes stay as they are


def options(tiny_model: str, *flags: str) -> RolloutOptions:
    parsed = serve.parse([tiny_model, *flags], "vllm-rollout serve", "")
    return RolloutOptions(**(parsed.additional_config or {}).get(KEY, {}))


@pytest.mark.parametrize(
    ("chosen", "moves", "by_nixl"), [("auto", True, False), ("off", False, False), ("nixl", True, True)]
)
def test_what_the_flag_sets(tiny_model, chosen, moves, by_nixl):
    found = options(tiny_model, "--rollout-move-kv", chosen)
    assert (found.moves_kv, found.moves_kv_by_nixl) == (moves, by_nixl)


def test_a_missing_nixl_is_said_with_the_command_that_helps(tiny_model, capsys, monkeypatch):
    monkeypatch.setattr(serve, "is_nixl_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        options(tiny_model, "--rollout-move-kv", "nixl")
    assert ended.value.code == 2
    assert "pip install 'vllm-rollout[nixl]'" in capsys.readouterr().err
