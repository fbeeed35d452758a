"""Devices that an engine can use."""

import pytest

from vllm_rollout.profiling import hardware


@pytest.mark.parametrize(("binding", "expected"), [("0|1", 2), ("0-7|8-15|16-23", 3)])
def test_cores_named_for_each_rank_are_devices_of_the_cpu_build(monkeypatch, binding, expected):
    monkeypatch.setattr(hardware, "runs_on_cpu", lambda: True)
    monkeypatch.setenv(hardware.CPU_BINDING, binding)
    assert hardware.num_devices() == expected


@pytest.mark.parametrize("binding", ["auto", "0-7", ""])
def test_without_them_numa_nodes_are(monkeypatch, binding):
    monkeypatch.setattr(hardware, "runs_on_cpu", lambda: True)
    monkeypatch.delenv(hardware.CPU_BINDING, raising=False)
    num_nodes = hardware.num_devices()
    monkeypatch.setenv(hardware.CPU_BINDING, binding)
    assert hardware.num_devices() == num_nodes >= 1


@pytest.mark.parametrize(("visible", "expected"), [("0,1,3", 3), ("0", 1), ("", 0)])
def test_gpus_are_those_that_are_visible(monkeypatch, visible, expected):
    monkeypatch.setattr(hardware, "runs_on_cpu", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.num_devices() == expected
