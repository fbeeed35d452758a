"""`vllm-rollout serve --parallelism auto`: what goes with it, what does not, and what it sets."""

import os
import sys
from types import SimpleNamespace

import pytest

from vllm_rollout.adapter import plugin
from vllm_rollout.adapter.api.start.serve import parse
from vllm_rollout.adapter.options import RolloutOptions


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """What `parse` sets for the process."""
    for name in ("VLLM_PLUGINS", "VLLM_WORKER_MULTIPROC_METHOD"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(plugin, "register", lambda: None)  # vLLM's classes stay as they are


def parsed(tiny_model: str, *flags: str):
    return parse([tiny_model, *flags], "vllm-rollout serve", "")


AUTO = ("--parallelism", "auto", "--parallelism-devices", "4")


def test_engines_are_not_started_as_copies_of_a_server_with_threads(tiny_model, monkeypatch):
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    assert parsed(tiny_model).parallelism == "fixed"
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
    args = parsed(tiny_model, *AUTO, "--tensor-parallel-size", "2")
    assert (args.parallelism, args.parallelism_devices) == ("auto", 4)
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--api-server-count", "2"), "Only one API process can wait for an engine"),
        (("--data-parallel-size", "2"), "--data-parallel-size does not go with --parallelism auto"),
        (("--data-parallel-hybrid-lb",), "an external or hybrid load balancer does not go"),
        (("--data-parallel-external-lb",), "an external or hybrid load balancer does not go"),
        (("--data-parallel-rank", "0"), "an external or hybrid load balancer does not go"),
        (("--headless",), "--headless does not go"),
        (("--nnodes", "2"), "stays within one server"),
        (("--pipeline-parallel-size", "2"), "--pipeline-parallel-size does not go"),
        (("--enable-lora",), "Adapters loaded while it ran would be gone"),
        (("--data-parallel-backend", "ray"), "--data-parallel-backend does not go"),
        (("--distributed-executor-backend", "ray"), "--distributed-executor-backend does not go"),
        (("--max-model-len", "auto"), "say how many tokens"),
        (("--tensor-parallel-size", "8"), "at most --parallelism-devices (4)"),
        (("--parallelism-devices", "1"), "with one device there is nothing to choose"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_with_a_remedy(tiny_model, capsys, flags, said):
    with pytest.raises(SystemExit) as ended:
        parsed(tiny_model, *AUTO, *flags)
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_emulated_engine_that_may_be_rebuilt_is_no_copy_either(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    device = tmp_path / "device.json"
    device.write_text('{"sizes": {"1": {}, "2": {}}}')
    for flags, forks in ((("--tensor-parallel-size", "2"), True), (AUTO, False)):
        args = parsed(tiny_model, "--emulate", str(device), *flags)
        emulation = RolloutOptions.of(SimpleNamespace(additional_config=args.additional_config)).emulation
        assert emulation.forks is forks


def test_devices_alone_and_auto_alone_are_refused(tiny_model, capsys):
    for flags, said in ((AUTO[2:], "add that flag"), (AUTO[:2], "needs --parallelism-devices")):
        with pytest.raises(SystemExit):
            parsed(tiny_model, *flags)
        assert said in capsys.readouterr().err
