"""What --compat needs beside itself is said at the start."""

import os
import sys

import pytest

from vllm_rollout.adapter import plugin
from vllm_rollout.adapter.api.start.serve import parse


@pytest.fixture
def compat(monkeypatch, tiny_model):
    """`compat(FLAGS, dev_mode=...)`: the trainers of a server with these flags."""
    monkeypatch.setenv("VLLM_PLUGINS", os.environ.get("VLLM_PLUGINS", ""))
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(plugin, "register", lambda: None)  # vLLM's classes stay as they are

    def parsed(*flags: str, dev_mode: str = "1") -> list[str]:
        monkeypatch.setenv("VLLM_SERVER_DEV_MODE", dev_mode)
        return parse([tiny_model, *flags], "vllm-rollout serve", "").compat

    return parsed


def test_trainers_are_named_one_by_one(compat):
    assert compat() == []
    assert compat("--compat", "prime-rl") == ["prime-rl"]
    assert compat("--compat", "trl-legacy", "--compat", "prime-rl") == ["trl-legacy", "prime-rl"]
    assert compat("--compat", "trl", dev_mode="0") == ["trl"]


@pytest.mark.parametrize("trainer", ["prime-rl", "trl-legacy"])
def test_trainers_that_need_vllm_s_development_mode(compat, capsys, trainer):
    with pytest.raises(SystemExit) as exit:
        compat("--compat", trainer, dev_mode="0")
    assert exit.value.code == 2
    assert "VLLM_SERVER_DEV_MODE=1" in capsys.readouterr().err


def test_a_trainer_that_is_not_known_is_refused_with_those_that_are(compat, capsys):
    with pytest.raises(SystemExit):
        compat("--compat", "nobody")
    assert "prime-rl" in capsys.readouterr().err
