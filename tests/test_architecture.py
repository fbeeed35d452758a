"""Allowed imports: deciding, observing and speaking HTTP stay apart from vLLM."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.imports import imported_modules
from tests.support.waiting import WAIT_S
from tests.wired import wiring

PACKAGE = Path(__file__).parents[1] / "vllm_rollout"
KERNELS = PACKAGE.parent / "kernels" / "triton"
NOT_FOR_DECISIONS = {"random", "time", "logging"}

KNOWS_VLLM = {"api", "core", "worker"}
"""Rooms that import vllm: one per process."""
MAY_KNOW_VLLM = {"adapter", "options", "plugin", "wire"}
"""Modules that several of these processes share: the folder `adapter/`, and three files of a part."""


def room(path: Path) -> str:
    """The room of a module: the folder or file of the kernel or of a part that says its process. Outside of both: its
    top folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts[0] == "kernel":
        return parts[1] if len(parts) > 2 else "kernel"
    if parts[0] == "parts":
        rooms = parts[3:] if len(parts) > 3 and parts[2].startswith("with_") else parts[2:]
        return rooms[0] if rooms else "parts"
    return parts[0]


def modules_of(*rooms: str) -> list[Path]:
    found = [path for path in sorted(PACKAGE.rglob("*.py")) if room(path) in rooms]
    assert found, rooms
    return found


def is_within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def vllm(module: str) -> bool:
    return is_within(module, "vllm")


def torch_or_vllm(module: str) -> bool:
    return is_within(module, "torch", "vllm")


def not_for_rules(module: str) -> bool:
    if is_within(module, "vllm_rollout.kernel.rules", "vllm_rollout.config", "vllm_rollout.checks"):
        return False
    if re.match(r"vllm_rollout\.parts\.\w+(\.with_\w+)?\.rules\b", module):
        return False
    top = module.partition(".")[0]
    return top not in sys.stdlib_module_names or top in NOT_FOR_DECISIONS


def offences(paths: Iterable[Path], forbidden: Callable[[str], bool]) -> list[str]:
    found = []
    for path in paths:
        package = ".".join(path.relative_to(PACKAGE.parent).parts[:-1]) if PACKAGE in path.parents else ""
        names = sorted(imported_modules(path.read_text(), package))
        found += [f"{path.relative_to(PACKAGE.parent)}: {name}" for name in names if forbidden(name)]
    return found


def test_one_room_per_process_imports_vllm():
    allowed = KNOWS_VLLM | MAY_KNOW_VLLM
    paths = [path for path in PACKAGE.rglob("*.py") if room(path) not in allowed]
    assert offences([*paths, *KERNELS.glob("*.py")], vllm) == []


def test_rules_import_the_standard_library_and_rules_only():
    assert offences([*modules_of("rules"), PACKAGE / "checks.py"], not_for_rules) == []


def test_http_and_clients_import_neither_torch_nor_vllm():
    assert offences(modules_of("http", "client", "grading", "recording", "watching"), torch_or_vllm) == []


@pytest.mark.parametrize("tool", ["demo", "integrations", "simulator"])
def test_what_works_from_outside_imports_neither_torch_nor_vllm(tool):
    assert offences(modules_of(tool), torch_or_vllm) == []


def test_the_kernel_names_no_part_and_parts_name_those_that_they_need():
    assert wiring(PACKAGE) == {}


def test_docs_and_docstrings_cite_files_that_are_there():
    root = PACKAGE.parent
    places = [*PACKAGE.rglob("*.py"), *(root / "docs").rglob("*.md"), root / "README.md"]
    cited = {(path.name, name) for path in places for name in re.findall(r"\bdocs/[a-z_/]+\.md", path.read_text())}
    assert {(path, name) for path, name in cited if not (root / name).exists()} == set()


Arrows = dict[str, dict[str, list[str]]]
"""Imports between places: importer, imported, then `file: name`."""


def arrows() -> Arrows:
    """Imports between rooms: one of the kernel and that of the same name in all parts are one room."""
    found: Arrows = defaultdict(lambda: defaultdict(list))
    files = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    for importer, path in files.items():
        for name in sorted(imported_modules(path.read_text(), importer.rpartition(".")[0])):
            imported = name if name in files else name.rpartition(".")[0]
            if imported in files and room(files[imported]) != room(path):
                found[room(path)][room(files[imported])].append(f"{importer}: {name}")
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
    assert found["vllm_rollout.kernel.http.service"].keys() > {"vllm_rollout.kernel.http.engine"}
    assert cycle(found) == []


def test_a_cycle_is_shown_by_its_imports():
    found = {"a": {"b": ["a/x.py: b.y"]}, "b": {"c": ["b/y.py: c.z"]}, "c": {"a": ["c/z.py: a.x"]}}
    assert sorted(cycle(found)) == ["a/x.py: b.y", "b/y.py: c.z", "c/z.py: a.x"]
    assert cycle({"a": {"b": []}, "c": {"b": []}}) == []


@pytest.mark.parametrize(
    ("importer", "others"),
    [
        ("api", {"core", "worker", "simulator"}),
        ("core", {"api", "worker", "http", "client"}),
        ("worker", {"api", "core", "http", "client"}),
        ("http", {"api", "core", "worker", "client", "simulator", "profiling"}),
        ("client", {"api", "core", "worker"}),
        ("rules", {"adapter", "api", "core", "worker", "http", "client", "kernel", "wire"}),
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


def not_for_training(module: str) -> bool:
    top = module.partition(".")[0]
    return top not in sys.stdlib_module_names | {"torch", "safetensors"} and not is_within(
        module, "vllm_rollout.training"
    )


def test_training_imports_torch_safetensors_and_itself_only():
    assert (PACKAGE / "training" / "stream.py").exists()
    assert offences(modules_of("training"), not_for_training) == []


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
        ("from ...config import MAX_GROUP_SIZE", True),
        ("from vllm_rollout import config", True),
        ("from ..http import protocol", False),
        ("from vllm_rollout.kernel.wire import CandidateTag", False),
        ("import numpy", False),
        ("import random", False),
        ("from time import monotonic", False),
        ("import logging.config", False),
    ],
)
def test_the_rule_for_rules_tells_allowed_from_forbidden(source, allowed):
    modules = imported_modules(source, "vllm_rollout.kernel.rules")
    assert any(map(not_for_rules, modules)) != allowed


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
    folder = PACKAGE.parent / package.replace(".", "/")
    if folder.is_dir() and folder != PACKAGE:
        names += [
            ".".join([package, *path.relative_to(folder).with_suffix("").parts]) for path in folder.rglob("[!_]*.py")
        ]
    code = f"import importlib, sys; [importlib.import_module(name) for name in {names}]; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert forbidden.isdisjoint(done.stdout.split())
