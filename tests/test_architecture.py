"""Allowed imports: deciding, observing and speaking HTTP stay apart from vLLM."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.imports import imported_modules
from tests.support.waiting import WAIT_S

PACKAGE = Path(__file__).parents[1] / "vllm_rollout"
KERNELS = PACKAGE.parent / "kernels" / "triton"
NOT_FOR_DECISIONS = {"random", "time", "logging"}


def is_within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def vllm(module: str) -> bool:
    return is_within(module, "vllm")


def torch_or_vllm(module: str) -> bool:
    return is_within(module, "torch", "vllm")


def not_for_group(module: str) -> bool:
    if is_within(module, "vllm_rollout.kernel.rules", "vllm_rollout.config"):
        return False
    top = module.partition(".")[0]
    return top not in sys.stdlib_module_names or top in NOT_FOR_DECISIONS


def offences(folder: Path, forbidden: Callable[[str], bool]) -> list[str]:
    found = []
    for path in sorted(folder.rglob("*.py")):
        where = path.relative_to(folder.parent)
        package = ".".join(["vllm_rollout", *path.relative_to(PACKAGE).parts[:-1]]) if PACKAGE in path.parents else ""
        found += [f"{where}: {name}" for name in sorted(imported_modules(path.read_text(), package)) if forbidden(name)]
    return found


def test_only_the_adapter_imports_vllm():
    folders = [path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "adapter"]
    assert {"group", "tracker", "server"} <= {folder.name for folder in folders}
    assert [line for folder in [*folders, KERNELS] for line in offences(folder, vllm)] == []
    top_level = [path for path in PACKAGE.glob("*.py") if any(map(vllm, imported_modules(path.read_text())))]
    assert top_level == []


def test_group_imports_the_standard_library_and_itself_only():
    assert offences(PACKAGE / "group", not_for_group) == []


def test_server_imports_neither_torch_nor_vllm():
    assert offences(PACKAGE / "server", torch_or_vllm) == []


@pytest.mark.parametrize(
    "folder", ["client", "demo", "emulation", "integrations", "profiling", "rewards", "simulator", "trace", "watching"]
)
def test_what_works_from_outside_imports_neither_torch_nor_vllm(folder):
    assert offences(PACKAGE / folder, torch_or_vllm) == []


def test_docs_and_docstrings_cite_files_that_are_there():
    root = PACKAGE.parent
    places = [*PACKAGE.rglob("*.py"), *(root / "docs").rglob("*.md"), root / "README.md"]
    cited = {(path.name, name) for path in places for name in re.findall(r"\bdocs/[a-z_/]+\.md", path.read_text())}
    assert {(path, name) for path, name in cited if not (root / name).exists()} == set()


Arrows = dict[str, dict[str, list[str]]]
"""Imports between places: importer, imported, then `file: name`."""


def place(parts: tuple[str, ...]) -> str:
    """The place of a module of ours: its folder, or itself when it stands in none. Each process of the adapter is one,
    what they share is another, and the plugin, which starts them, stands outside."""
    if parts[0] != "adapter":
        return parts[0]
    if len(parts) > 1 and ((PACKAGE / "adapter" / parts[1]).is_dir() or parts[1] == "plugin"):
        return f"adapter/{parts[1]}"
    return "adapter"


def arrows() -> Arrows:
    found: Arrows = defaultdict(lambda: defaultdict(list))
    for path in sorted(PACKAGE.rglob("*.py")):
        where = path.relative_to(PACKAGE)
        importer = place(where.with_suffix("").parts)
        for name in sorted(imported_modules(path.read_text(), ".".join(["vllm_rollout", *where.parts[:-1]]))):
            if is_within(name, "vllm_rollout") and name != "vllm_rollout":
                imported = place(tuple(name.split(".")[1:]))
                if imported != importer:
                    found[importer][imported].append(f"{where}: {name}")
    return found


def cycle(arrows: Arrows) -> list[str]:
    """Imports that lead from a folder back to itself; none when there is no such way."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        way = error.args[1]
        return [line for imported, importer in pairwise(way) for line in arrows[importer][imported]]
    return []


def file_arrows() -> Arrows:
    """Imports between single files, those for types only included."""
    files = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    found: Arrows = defaultdict(lambda: defaultdict(list))
    for importer, path in files.items():
        for name in sorted(imported_modules(path.read_text(), importer.rpartition(".")[0])):
            imported = name if name in files else name.rpartition(".")[0]
            if imported in files and imported != importer:
                found[importer][imported].append(f"{importer}: {name}")
    return found


def test_files_form_no_cycle():
    found = file_arrows()
    assert found["vllm_rollout.kernel.http.service"].keys() > {
        "vllm_rollout.kernel.http.engine",
        "vllm_rollout.kernel.http.answers",
    }
    assert cycle(found) == []


def test_folders_form_no_cycle():
    assert cycle(arrows()) == []


@pytest.mark.parametrize("house", ["vllm_rollout.kernel.rules", "vllm_rollout.kernel.api"])
def test_rooms_form_no_cycle(house):
    found: Arrows = defaultdict(lambda: defaultdict(list))
    for importer, imported in file_arrows().items():
        for name, lines in imported.items():
            places = [".".join(each.split(".")[: house.count(".") + 2]) for each in (importer, name)]
            if importer.startswith(house) and name.startswith(house) and places[0] != places[1]:
                found[places[0]][places[1]] += lines
    assert len(found) >= 5
    assert cycle(found) == []


def test_a_cycle_is_shown_by_its_imports():
    found = {"a": {"b": ["a/x.py: b.y"]}, "b": {"c": ["b/y.py: c.z"]}, "c": {"a": ["c/z.py: a.x"]}}
    assert sorted(cycle(found)) == ["a/x.py: b.y", "b/y.py: c.z", "c/z.py: a.x"]
    assert cycle({"a": {"b": []}, "c": {"b": []}}) == []


@pytest.mark.parametrize(
    ("importer", "others"),
    [
        ("adapter/api", {"adapter/core", "adapter/worker", "client", "simulator"}),
        ("adapter/core", {"adapter/api", "adapter/worker", "server"}),
        ("adapter/worker", {"adapter/api", "adapter/core", "server"}),
        ("adapter", {"adapter/api", "adapter/core", "adapter/worker"}),
        ("server", {"client", "adapter", "adapter/api", "emulation", "simulator", "profiling"}),
        ("emulation", {"adapter", "adapter/api", "server", "client", "simulator"}),
    ],
)
def test_a_process_does_not_reach_into_another(importer, others):
    found = arrows()[importer]
    assert {imported: found[imported] for imported in found.keys() & others} == {}


def test_functions_that_the_docs_name_are_there():
    root = PACKAGE.parent
    cited = {
        pair
        for path in (root / "docs").rglob("*.md")
        for pair in re.findall(r"`([a-z_/]+\.py)::(\w+)`", path.read_text())
    }
    assert cited
    missing = [
        f"{path}::{name}"
        for path, name in sorted(cited)
        if not any(
            (folder / path).exists() and name in defined_names((folder / path).read_text())
            for folder in (PACKAGE, root)
        )
    ]
    assert missing == []


def defined_names(source: str) -> set[str]:
    """Functions, methods and classes of a module, and what it assigns."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    return names | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def test_tracker_observes_with_torch():
    modules = {name for path in (PACKAGE / "tracker").glob("*.py") for name in imported_modules(path.read_text())}
    assert "torch" in modules
    assert not any(map(vllm, modules))


def not_for_training(module: str) -> bool:
    top = module.partition(".")[0]
    return top not in sys.stdlib_module_names | {"torch"} and not is_within(module, "vllm_rollout.training")


def test_training_imports_torch_and_itself_only():
    assert (PACKAGE / "training" / "stream.py").exists()
    assert offences(PACKAGE / "training", not_for_training) == []


@pytest.mark.parametrize(
    "source",
    [
        "import vllm",
        "import vllm.config as c",
        "import os, vllm",
        "from vllm import SamplingParams",
        "from vllm.v1.request import Request",
        "def f():\n    from vllm import LLM",
        "if TYPE_CHECKING:\n    import vllm",
        "import importlib\nimportlib.import_module('vllm.config')",
        "__import__('vllm')",
    ],
)
def test_the_rule_sees_every_form_of_import(source):
    assert any(map(vllm, imported_modules(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import vllm_rollout",
        "from vllm_rollout.kernel.rules import plan",
        "from . import vllm",
        "a = 'vllm'",
        "import vllmx",
    ],
)
def test_the_rule_does_not_take_our_own_name_for_vllm(source):
    assert not any(map(vllm, imported_modules(source)))


@pytest.mark.parametrize(
    ("source", "allowed"),
    [
        ("from dataclasses import dataclass", True),
        ("from vllm_rollout.config import MAX_GROUP_SIZE", True),
        ("from .types import Ending", True),
        ("from ..config import MAX_GROUP_SIZE", True),
        ("from vllm_rollout import config", True),
        ("from ..server import protocol", False),
        ("from vllm_rollout.kernel.wire import CandidateTag", False),
        ("import numpy", False),
        ("import random", False),
        ("from time import monotonic", False),
        ("import logging.config", False),
    ],
)
def test_the_rule_for_group_tells_allowed_from_forbidden(source, allowed):
    modules = imported_modules(source, "vllm_rollout.kernel.rules")
    assert any(map(not_for_group, modules)) != allowed


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("vllm_rollout.kernel.rules", {"torch", "vllm", "pydantic", "numpy"}),
        ("vllm_rollout.kernel.http", {"torch", "vllm"}),
        ("vllm_rollout.kernel.client", {"torch", "vllm", "fastapi"}),
        ("vllm_rollout.cli", {"torch", "vllm"}),
        ("vllm_rollout", {"torch", "vllm"}),
    ],
)
def test_importing_stays_light(package, forbidden):
    names = [package]
    if (PACKAGE / package.partition(".")[2]).is_dir() and package != "vllm_rollout":
        folder = PACKAGE / package.partition(".")[2]
        names += [
            ".".join([package, *path.relative_to(folder).with_suffix("").parts]) for path in folder.rglob("[!_]*.py")
        ]
    code = f"import importlib, sys; [importlib.import_module(name) for name in {names}]; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert forbidden.isdisjoint(done.stdout.split())
