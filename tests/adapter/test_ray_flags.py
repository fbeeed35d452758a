"""`vllm-rollout serve` with Ray: refused before anything starts where vLLM would fail later."""

import os
import sys

import pytest

from vllm_rollout.adapter import plugin
from vllm_rollout.adapter.api.start import serve

BACKENDS = ["--data-parallel-backend", "--distributed-executor-backend"]


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """What `parse` sets for the process."""
    monkeypatch.setenv("VLLM_PLUGINS", os.environ.get("VLLM_PLUGINS", ""))
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(plugin, "register", lambda: None)  # vLLM's classes stay as they are


@pytest.fixture
def device_key(monkeypatch):
    """Sets what vLLM's platform calls its devices in Ray."""
    return lambda name: monkeypatch.setattr(type(serve.current_platform), "ray_device_key", name)


def parsed(tiny_model: str, *flags: str):
    return serve.parse([tiny_model, *flags], "vllm-rollout serve", "")


@pytest.mark.parametrize("flag", BACKENDS)
def test_a_platform_that_ray_has_no_devices_of_is_refused(tiny_model, device_key, capsys, flag):
    device_key("")
    with pytest.raises(SystemExit) as ended:
        parsed(tiny_model, flag, "ray")
    assert ended.value.code == 2
    assert f"{flag} ray needs devices that Ray hands out" in capsys.readouterr().err


@pytest.mark.parametrize("flag", BACKENDS)
def test_a_missing_ray_is_said_with_the_command_that_helps(tiny_model, device_key, capsys, monkeypatch, flag):
    device_key("GPU")
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        parsed(tiny_model, flag, "ray")
    assert ended.value.code == 2
    assert "pip install 'vllm-rollout[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize("flag", BACKENDS)
def test_devices_of_a_gpu_platform_are_rays(tiny_model, device_key, monkeypatch, flag):
    device_key("GPU")
    monkeypatch.setattr(serve, "find_spec", lambda name: object())
    args = parsed(tiny_model, flag, "ray")
    assert getattr(args, flag.removeprefix("--").replace("-", "_")) == "ray"
    assert (args.scheduler_cls, args.worker_cls) == (serve.SCHEDULER_CLS, serve.WORKER_CLS)


@pytest.mark.parametrize("flag", BACKENDS)
def test_another_backend_asks_nothing_of_ray(tiny_model, device_key, monkeypatch, flag):
    device_key("")
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    parsed(tiny_model, flag, "mp")
