"""A virtual environment for each vLLM version: its own packages first, those of the environment that runs this behind.

Invariant: nothing outside of its folder changes. It is made whole or not at all.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements" / "versions"
PACKAGES = Path(sysconfig.get_paths()["purelib"])
"""Of the environment that runs this."""
WITHOUT_WHEEL = {"0.33": "vllm==0.33.0"}
"""Versions without a CPU wheel, by whose CUDA wheel their Python sources come."""


def python_of(version: str, folder: Path, installed: str) -> Path:
    """The interpreter of a version's environment, which is made when it is not there; `installed` runs this already."""
    if version == installed:
        return Path(sys.executable)
    place = folder / version
    requirements = REQUIREMENTS / f"{version}.txt"
    stamp = place / "made"
    if not stamp.exists() or stamp.stat().st_mtime < requirements.stat().st_mtime:
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
        (packages,) = place.glob("lib/python*/site-packages")
        pip("install", "--target", str(packages), "-r", str(requirements))
        if version in WITHOUT_WHEEL:
            take_sources(WITHOUT_WHEEL[version], packages)
        # Last: pip must not see, and replace, what lies behind. As site does it: an editable install is found too.
        (packages / "behind.pth").write_text(f"import site; site.addsitedir({str(PACKAGES)!r})\n")
        stamp.touch()
    return place / "bin" / "python"


def pip(command: str, *arguments: str) -> None:
    quietly = ("--disable-pip-version-check", "-qq", "--no-deps")
    subprocess.run([sys.executable, "-m", "pip", command, *quietly, *arguments], check=True)


def take_sources(requirement: str, packages: Path) -> None:
    """vLLM's Python sources out of a CUDA wheel, with the compiled CPU libraries that are installed here.

    Its metadata say `+cpu`, by which vLLM finds its platform.
    """
    with tempfile.TemporaryDirectory() as downloads:
        pip("download", "--dest", downloads, requirement)
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            archive.extractall(packages, [name for name in names if name.startswith("vllm/") and name[-3:] != ".so"])
            (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
            entry_points = archive.read(metadata.replace("METADATA", "entry_points.txt"))
    version = requirement.partition("==")[2]
    info = packages / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (info / "entry_points.txt").write_bytes(entry_points)
    for library in (PACKAGES / "vllm").glob("*.so"):
        shutil.copy2(library, packages / "vllm")
