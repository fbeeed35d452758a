"""`vllm-rollout serve --rollout-emulate FILE`: what it sets, and what does not go with it."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm import envs

from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.kernel.parts import WITHOUT
from vllm_rollout.kernel.platform import choose_platform
from vllm_rollout.parts.emulation import options as emulation
from vllm_rollout.parts.emulation.options import EmulationOptions
from vllm_rollout.parts.emulation.worker.executor import is_asynchronous


@pytest.fixture
def device(tmp_path: Path) -> str:
    """A file that says what an emulated device does."""
    path = tmp_path / "device.json"
    path.write_text('{"sizes": {"1": {}, "2": {}}}')
    return str(path)


def test_a_flag_of_a_device_needs_a_device(refusal):
    for flag, value in (("--rollout-emulate-speed", "2"), ("--rollout-emulate-log", "here")):
        assert "name one with --rollout-emulate FILE" in refusal(flag, value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--enable-lora",), "--enable-lora does not go with --rollout-emulate"),
        (("--tensor-parallel-size", "4"), "it has no tensor-parallel size 4, but 1, 2. Say what a step costs there"),
        (("--pipeline-parallel-size", "2"), "--pipeline-parallel-size does not go"),
        (("--enable-prompt-embeds",), "Send prompts as text or tokens"),
        (("--distributed-executor-backend", "mp"), "--distributed-executor-backend does not go"),
        (("--speculative-config", '{"method": "ngram"}'), "Leave it out, or take --enable-rollout-drafts"),
        (("--rollout-emulate-speed", "0"), "must be in [0.001, 1000], got '0'"),
    ],
)
def test_what_cannot_be_emulated_is_refused_with_a_remedy(refusal, device, flags, said):
    assert said in refusal("--rollout-emulate", device, *flags)


def test_a_broken_device_is_refused(refusal, device):
    Path(device).write_text('{"step": {"ms": 0}}')
    assert "step.ms: input should be greater than 0, got 0" in refusal("--rollout-emulate", device)


def test_settings_of_a_device_reach_the_engine_cores(parsed, device, tmp_path):
    log = str(tmp_path / "log")
    flags = ("--rollout-emulate-speed", "0.5", "--rollout-emulate-log", log, "--data-parallel-size", "4")
    args = parsed("--rollout-emulate", device, *flags)
    assert (args.worker_cls, args.distributed_executor_backend) == (emulation.WORKER_CLS, emulation.EXECUTOR_CLS)
    assert EmulationOptions.of(args) == EmulationOptions(device, 0.5, log, async_scheduling=True, num_ranks=4)
    assert not EmulationOptions.of(parsed("--rollout-emulate", device, "--no-async-scheduling")).async_scheduling


@pytest.mark.parametrize(
    ("arguments", "platform"),
    [
        (["m", "--rollout-emulate", "f"], "cpu"),
        (["--rollout-emulate=f"], "cpu"),
        (["m"], None),
        (["--rollout-emulate-log", "x"], None),
    ],
)
def test_an_emulated_device_needs_no_platform_of_its_own(restored, arguments, platform):
    choose_platform(arguments)
    assert os.environ.get("VLLM_TARGET_DEVICE") == platform


def test_an_engine_with_drafts_steps_synchronously(parsed, device):
    args = parsed("--rollout-emulate", device)
    config = SimpleNamespace(additional_config=args.additional_config, speculative_config=None)
    assert is_asynchronous(config)
    config.speculative_config = object()
    assert not is_asynchronous(config)


def test_no_model_runs_so_engine_cores_are_copies(parsed, device):
    options = ServeOptions.of(parsed("--rollout-emulate", device, "--tensor-parallel-size", "2"))
    assert (options.has_model, options.forks) == (False, True)


def test_without_the_part_its_command_is_not_there(tmp_path):
    refused = subprocess.run(
        [sys.executable, "-m", "vllm_rollout.cli", "emulation-report", str(tmp_path)],
        env={**os.environ, WITHOUT: "emulation"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "No such command 'emulation-report'" in refused.stderr


def test_a_device_is_emulated_after_an_engine_of_the_same_process(monkeypatch, tmp_path):
    """An engine core in this process lets vLLM keep the variables that it has read."""
    monkeypatch.delenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", raising=False)
    envs.enable_envs_cache()
    assert not envs.VLLM_ALLOW_LONG_MAX_MODEL_LEN
    emulation.emulate(SimpleNamespace(data_parallel_size=1, additional_config={}), file=str(tmp_path / "device.json"))
    assert envs.VLLM_ALLOW_LONG_MAX_MODEL_LEN
