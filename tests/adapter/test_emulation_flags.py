"""`vllm-rollout serve --emulate`: what goes with it, what does not, and what it sets."""

import os
import sys

import pytest

from vllm_rollout.adapter import plugin
from vllm_rollout.adapter.api.client.emulate import EXECUTOR_CLS, WORKER_CLS
from vllm_rollout.adapter.api.start.serve import parse
from vllm_rollout.adapter.options import EmulationOptions, RolloutOptions
from vllm_rollout.adapter.platform import choose_platform


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """What `parse` sets for the process."""
    for name in ("VLLM_PLUGINS", "VLLM_TARGET_DEVICE", "VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(plugin, "register", lambda: None)  # vLLM's classes stay as they are


@pytest.fixture
def device(tmp_path) -> str:
    path = tmp_path / "device.json"
    path.write_text("{}")
    return str(path)


def parsed(tiny_model: str, *flags: str):
    return parse([tiny_model, *flags], "vllm-rollout serve", "")


class _Config:
    def __init__(self, additional_config) -> None:
        self.additional_config = additional_config


def options_of(args) -> RolloutOptions:
    return RolloutOptions.of(_Config(args.additional_config))


def test_without_it_nothing_changes(tiny_model):
    args = parsed(tiny_model)
    assert options_of(args).emulation is None
    assert args.distributed_executor_backend is None
    assert args.worker_cls != WORKER_CLS


def test_settings_reach_the_engine_cores(tiny_model, device, tmp_path):
    log = str(tmp_path / "log")
    flags = ("--emulate-speed", "0.5", "--emulate-log", log, "--data-parallel-size", "4")
    args = parsed(tiny_model, "--emulate", device, *flags)
    assert (args.worker_cls, args.distributed_executor_backend) == (WORKER_CLS, EXECUTOR_CLS)
    assert options_of(args).emulation == EmulationOptions(device, 0.5, log, async_scheduling=True, num_ranks=4)


def test_the_loop_that_was_asked_for_is_kept(tiny_model, device):
    args = parsed(tiny_model, "--emulate", device, "--no-async-scheduling")
    assert not options_of(args).emulation.async_scheduling


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--enable-lora",), "--enable-lora does not go with --emulate"),
        (
            ("--tensor-parallel-size", "2"),
            "it has no tensor-parallel size 2, but 1. Say what a step costs there in sizes",
        ),
        (("--pipeline-parallel-size", "2"), "--pipeline-parallel-size does not go"),
        (("--enable-prompt-embeds",), "Send prompts as text or tokens"),
        (("--distributed-executor-backend", "mp"), "--distributed-executor-backend does not go"),
        (("--emulate-speed", "0"), "must be in [0.001, 1000], got '0'"),
        (("--worker-cls", "other.Worker"), "would replace the worker"),
    ],
)
def test_what_cannot_be_emulated_is_refused_with_a_remedy(tiny_model, device, capsys, flags, said):
    with pytest.raises(SystemExit) as ended:
        parsed(tiny_model, "--emulate", device, *flags)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_broken_file_is_refused(tiny_model, device, capsys):
    with open(device, "w") as file:
        file.write('{"step": {"ms": 0}}')
    with pytest.raises(SystemExit):
        parsed(tiny_model, "--emulate", device)
    assert "step.ms: input should be greater than 0, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--emulate-speed", "2"), ("--emulate-log", "here")])
def test_its_other_flags_need_it(tiny_model, capsys, flags):
    with pytest.raises(SystemExit):
        parsed(tiny_model, *flags)
    assert "name one with --emulate FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "platform"),
    [(["m", "--emulate", "f"], "cpu"), (["--emulate=f"], "cpu"), (["m"], None), (["--emulate-log", "x"], None)],
)
def test_an_emulated_device_needs_no_platform_of_its_own(arguments, platform):
    choose_platform(arguments)
    assert os.environ.get("VLLM_TARGET_DEVICE") == platform
