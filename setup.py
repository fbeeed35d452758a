"""Builds the C++ operators with CMake; the metadata is in pyproject.toml.

Needs torch in the environment that builds: pip install --no-build-isolation -e .
"""

import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()

MIN_TORCH = (2, 10)
"""First torch whose stable ABI has all that csrc uses (TORCH_TARGET_VERSION in CMakeLists.txt)."""


class CMakeExtension(Extension):
    """An extension that CMakeLists.txt knows how to build."""

    def __init__(self, name: str) -> None:
        super().__init__(name, sources=[], py_limited_api=True)


class cmake_build_ext(build_ext):
    """Builds every CMakeExtension in one CMake run and copies the results into place."""

    def build_extensions(self) -> None:
        check_torch()
        cmake = find_program("cmake", "pip install 'cmake>=3.25'")
        ninja = find_program("ninja", "pip install ninja")
        build_dir = Path(self.build_temp).resolve()
        build_dir.mkdir(parents=True, exist_ok=True)
        run(
            [
                cmake,
                *("-G", "Ninja", "-S", str(ROOT), "-B", str(build_dir)),
                f"-DCMAKE_MAKE_PROGRAM={ninja}",
                f"-DCMAKE_BUILD_TYPE={os.environ.get('CMAKE_BUILD_TYPE', 'Release')}",
                f"-DVLLM_ROLLOUT_PYTHON_EXECUTABLE={sys.executable}",
            ],
            "cmake could not configure the build. It needs cmake 3.25 or later, a C++20 compiler "
            "(g++ 11 or clang 14 and later; Debian: apt install g++) and Python's headers "
            "(Debian: apt install python3-dev).",
        )
        num_jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count())
        run(
            [cmake, "--build", str(build_dir), "-j", num_jobs],
            "The C++ operators in csrc/ did not compile; the compiler's message is above.",
        )
        for extension in self.extensions:
            built = build_dir / f"{extension.name.rpartition('.')[2]}.abi3.so"
            target = Path(self.get_ext_fullpath(extension.name)).resolve()
            target.parent.mkdir(parents=True, exist_ok=True)
            # Replaced, not written over: a process that has it loaded would run what is half written.
            fresh = target.with_name(f".{target.name}.new")
            shutil.copy2(built, fresh)
            os.replace(fresh, target)


def check_torch() -> None:
    try:
        found = version("torch")
    except PackageNotFoundError:
        raise RuntimeError(
            "torch is not installed in the environment that builds. Install it first, then "
            "pip install --no-build-isolation -e ."
        ) from None
    if tuple(int(part) for part in found.split(".")[:2]) < MIN_TORCH:
        raise RuntimeError(f"csrc needs torch 2.10 or later, found {found}. Install torch>=2.10.")


def find_program(name: str, how_to_install: str) -> str:
    """Path of a build tool, first beside this Python: a venv's bin need not be on PATH."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        raise RuntimeError(f"{name} is not installed: {how_to_install}")
    return path


def run(command: list[str], failure: str) -> None:
    try:
        subprocess.check_call(command)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(failure) from error


setup(
    packages=[*find_packages(include=["vllm_rollout*"]), "vllm_rollout.kernels"],
    # A top-level package named kernels would shadow Hugging Face's, which transformers imports.
    package_dir={"vllm_rollout.kernels": "kernels/triton"},
    package_data={
        "vllm_rollout": ["py.typed", "*.pyi"],
        "vllm_rollout.parts.page.http": ["assets/*", "assets/vendor/*"],
    },
    ext_modules=[CMakeExtension("vllm_rollout._C")],
    cmdclass={"build_ext": cmake_build_ext},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
