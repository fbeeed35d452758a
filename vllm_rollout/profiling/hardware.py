"""Devices of this machine, without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from vllm_rollout.process import runs_on_cpu

CPU_BINDING = "VLLM_CPU_OMP_THREADS_BIND"


def num_devices() -> int | None:
    """Number of devices for an engine: GPUs, or NUMA nodes with the CPU build. None if it is unknown.

    `VLLM_CPU_OMP_THREADS_BIND=0-7|8-15` names the cores of each rank, and so the number of devices.
    """
    if runs_on_cpu():
        binding = os.environ.get(CPU_BINDING, "")
        if "|" in binding:
            return len(binding.split("|"))
        return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip()])
    if shutil.which("nvidia-smi") is None:
        return None
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return listed.stdout.count("GPU ") if listed.returncode == 0 else None
