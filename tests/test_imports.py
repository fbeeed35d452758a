"""Every name that a file imports from this repository is there, also in files that mypy doesn't read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.imports import imported_modules

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "conformance", "docs_tools", "examples", "kernels", "tests", "vllm_rollout")
OURS = ("benchmarks", "docs_tools", "tests", "vllm_rollout")


def file_of(module: str) -> Path | None:
    """The file of a module, or the folder of one without `__init__.py`."""
    path = ROOT.joinpath(*re.sub(r"^vllm_rollout\.kernels\b", "kernels.triton", module).split("."))  # as in setup.py
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py", path) if each.exists()), None)


@cache
def defined_in(path: Path) -> frozenset[str] | None:
    """Names that a module's statements define. None if it makes names when they are asked for."""
    found = {"__doc__"}
    for node in ast.walk(ast.parse(path.read_text())) if path.is_file() else ():
        match node:
            case ast.FunctionDef(name="__getattr__"):
                return None
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found.update(alias.asname or alias.name.partition(".")[0] for alias in names)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
    return frozenset(found)


def missing(source: str) -> Iterator[str]:
    for name in sorted(imported_modules(source)):
        module, _, attribute = name.rpartition(".")
        if name.partition(".")[0] not in OURS or file_of(name) is not None:
            continue
        path = file_of(module)
        defined = frozenset[str]() if path is None else defined_in(path)
        if defined is not None and attribute not in defined:
            yield name


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_imported_name_is_there(folder: str):
    found = {path.relative_to(ROOT): [*missing(path.read_text())] for path in sorted((ROOT / folder).rglob("*.py"))}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_name_that_is_gone_is_found():
    assert [*missing("from vllm_rollout.kernel.parts import Part, Gone")] == ["vllm_rollout.kernel.parts.Gone"]
    assert [*missing("from vllm_rollout.gone import name")] == ["vllm_rollout.gone.name"]
    assert [*missing("from vllm_rollout import RolloutClient\nfrom torch import Gone")] == []
