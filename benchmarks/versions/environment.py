"""A virtual environment for each vLLM version (or trainer).

Its own packages come first, then those of the environment that runs this program.

Invariant: nothing outside of its folder changes. It is made whole or not at all.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements" / "versions"
PACKAGES = Path(sysconfig.get_paths()["purelib"])
"""Folder of packages of the environment that runs this program."""
WITHOUT_WHEEL = {"0.33"}
"""Versions without a CPU wheel, whose Python sources come out of the CUDA wheel."""


def python_of(version: str, folder: Path, installed: str) -> Path:
    """The interpreter of a version's environment, made if it is missing. `installed`: the version that runs this."""
    if version == installed:
        return Path(sys.executable)

    return environment(folder / version, REQUIREMENTS / f"{version}.txt", partial(finish_version, version))


def finish_version(version: str, packages: Path) -> None:
    """Complete a version's packages: sources if it has no CPU wheel, and the distribution name `vllm`."""
    if version in WITHOUT_WHEEL:
        take_sources(f"vllm=={version}.0", packages)
    name_it_vllm(f"{version}.0+cpu", packages)


def environment(place: Path, requirements: Path, finish: Callable[[Path], None] = lambda packages: None) -> Path:
    """The interpreter of the environment at `place`. The environment is made if it is missing or has other
    requirements.

    Requirements are installed without their dependencies. Other packages come from the environment that runs this
    program. `finish` gets the folder of packages before the other packages are added behind it.
    """
    stamp = place / "made"
    if not stamp.exists() or stamp.read_text() != requirements.read_text():
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
        (packages,) = place.glob("lib/python*/site-packages")
        pip("install", "--target", str(packages), "-r", str(requirements))
        finish(packages)
        # Last: pip must not see, and replace, what lies behind. As site does it: an editable install is found too.
        (packages / "behind.pth").write_text(f"import site; site.addsitedir({str(PACKAGES)!r})\n")
        stamp.write_text(requirements.read_text())
    return place / "bin" / "python"


def pip(command: str, *arguments: str) -> None:
    quietly = ("--disable-pip-version-check", "-qq", "--no-deps")
    subprocess.run([sys.executable, "-m", "pip", command, *quietly, *arguments], check=True)


def take_sources(requirement: str, packages: Path) -> None:
    """Install vLLM's Python sources from a CUDA wheel, with the compiled CPU libraries that are installed here."""
    with tempfile.TemporaryDirectory() as downloads:
        pip("download", "--dest", downloads, requirement)
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            archive.extractall(packages, [name for name in names if name.startswith("vllm/") and name[-3:] != ".so"])
    for library in (PACKAGES / "vllm").glob("*.so"):
        shutil.copy2(library, packages / "vllm")


def name_it_vllm(version: str, packages: Path) -> None:
    """Make it found as the distribution `vllm`, with a version that contains `cpu`.

    vLLM asks for that to find its platform (0.33), and whether Triton is of use on a CPU (0.29 to 0.31, where the
    tests run model runner V2 in Triton's interpreter).
    """
    info = packages / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
