"""Settings for an engine on this machine's CPU: number type, threads, memory. Needs neither torch nor vLLM.

vLLM's own defaults suit servers with AVX-512 and nothing else running. docs/development/log.md, "The first ten
minutes", has their cost on other machines.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

BINDING = "VLLM_CPU_OMP_THREADS_BIND"
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
STOCK_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""vLLM's executor that runs the worker inside the engine core.

By default a CPU worker is a process of its own, and the engine core spins on a core while it waits for that process.
"""
WAIT_POLICY = ("OMP_WAIT_POLICY", "passive")
"""An environment variable that OpenMP reads when torch is imported: threads sleep at the end of a parallel region.

Spinning threads take the core from the thread for which they wait. If another program runs, that is 20 times slower.
"""
COMPILE_NOTHING = ("TORCH_COMPILE_DISABLE", "1")
"""An environment variable that torch reads when it is imported. It turns compiling off.

vLLM's CPU build compiles parts of its sampler at the first request. If torch finds no compiler, the engine would die.
"""
NO_COMPILER = (
    "no C++ compiler is found (g++, or the one that CXX names), so torch compiles nothing: vLLM runs as with "
    "--enforce-eager. To compile, install one (Debian: apt install g++)."
)
FAST_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""CPU flags of instructions that multiply bfloat16 (x86, x86, ARM). Without these, float32 is five times faster."""
GIB = 2**30
KV_CACHE_GIB = 2
"""KV cache in GiB: enough for 128 candidates of SmolLM2-135M with 360 tokens each in float32."""
SMALL_SERVER_GIB = 2.5
"""Memory of a SmolLM2-135M server in float32 without its KV cache, in GiB: API process 0.8, engine core 1.5."""

CGROUP_FILES = (
    ("sys/fs/cgroup", "memory.max", "memory.current"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""(folder, limit, usage) files of a container's memory: cgroup version 2, version 1."""


class Cpu(NamedTuple):
    """The CPU as this process may use it."""

    name: str
    flags: frozenset[str]
    num_cores: int
    """Physical cores that a container allows. Two threads of one core multiply no faster than one."""

    @property
    def dtype(self) -> str:
        """The faster number type for a model with bfloat16 weights."""
        return "bfloat16" if self.flags & FAST_BFLOAT16 else "float32"

    @property
    def summary(self) -> str:
        """Name, cores and the number type, with the reason for it."""
        why = "has" if self.dtype == "bfloat16" else "lacks"
        return f"{self.name} with {self.num_cores} cores: {self.dtype}, as it {why} AVX512-BF16 or AMX"


def this_cpu(root: Path = Path("/")) -> Cpu:
    """The CPU of this machine. `root`: folder of /proc and /sys."""
    cpuinfo = root / "proc/cpuinfo"
    fields: dict[str, str] = {}
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features") or ""
    name = fields.get("model name") or platform.processor() or platform.machine()
    topology = root / "sys/devices/system/cpu"
    siblings = {_read(topology / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in allowed_cpus()}
    return Cpu(name, frozenset(flags.split()), min(len(siblings), _quota(root)))


def compiler() -> str | None:
    """The C++ compiler that torch.compile calls on a CPU, or None."""
    return shutil.which(os.environ.get("CXX") or "g++")


def _quota(root: Path) -> int:
    """Number of cores in a container's limit of CPU time, at least 1. `sys.maxsize` without a limit."""
    version_2 = _read(root / "sys/fs/cgroup/cpu.max").split()
    version_1 = [_read(root / "sys/fs/cgroup/cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    for limit in (version_2, version_1):
        if len(limit) == 2 and all(number.isdecimal() for number in limit):  # else "max" or -1
            return max(1, int(limit[0]) // int(limit[1]))
    return sys.maxsize


def allowed_cpus() -> set[int]:
    """Logical CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that a new process can have, also under its container's limits."""
    free: list[int] = [psutil.virtual_memory().available]
    for folder, limit, usage in CGROUP_FILES:
        limit_bytes, used_bytes = (_read(root / folder / name) for name in (limit, usage))
        if limit_bytes.isdecimal() and used_bytes.isdecimal():
            free.append(max(0, int(limit_bytes) - int(used_bytes)))
    return min(free)


def kv_cache_gib(available_bytes: int) -> int:
    """The KV cache of a small model's server, in GiB. Raises: RuntimeError if memory is too little."""
    room = int(available_bytes / GIB - SMALL_SERVER_GIB)
    if room < 1:
        raise RuntimeError(
            f"a server of the embedded model needs {SMALL_SERVER_GIB + 1} GiB of memory, and "
            f"{available_bytes / GIB:.1f} GiB are available. End other programs, or set {KV_SPACE}=1 to try with less."
        )
    return min(room, KV_CACHE_GIB)


def embedded_settings(cpu: Cpu, environment: Mapping[str, str]) -> dict[str, Any]:
    """vLLM's engine arguments for a small model of the catalogue. Raises: RuntimeError if memory is too little."""
    settings: dict[str, Any] = {"dtype": cpu.dtype, "enforce_eager": True}
    if KV_SPACE not in environment:  # vLLM prefers the variable
        settings["kv_cache_memory_bytes"] = kv_cache_gib(available_memory()) * GIB
    return settings


def advice(cpu: Cpu, dtype: str, enforce_eager: bool) -> str | None:
    """Flags that would make a server with these settings faster, with reasons. None if there are none."""
    flags, reasons = [], []
    if cpu.dtype == "float32" and dtype != "float32":
        flags.append("--dtype float32")
        reasons.append("16-bit numbers are about five times slower here than float32, which takes twice the memory")
    if not enforce_eager:
        flags.append("--enforce-eager")
        reasons.append("compiling takes a minute or more of the start")
    if not flags:
        return None
    return f"on this CPU ({cpu.name}) add {' '.join(flags)}: {' and '.join(reasons)}."


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
