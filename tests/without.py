"""Checks that the package works without some of its parts: `python -m tests.without PART...`, or `make without`.

Copies the checkout without the parts' folders, without what needs them in other parts (`with_PART`), without the parts
that need them, and without tests that need any of them (tests/needs.py). In the copy it builds the C++ extension if a
part has sources of it. Then it looks for imports of what is gone, and runs ruff, mypy and tests. Only tests that can
notice run: those that reach the list of parts by their imports or fixtures, and start no engine. Tests of pages and
tools for contributors stay out, since pages name all parts.

Tools that import a part go with it. `--of-the-day N` takes N parts, others on the next day.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.needs import left_out
from tests.support.imports import imported_modules
from vllm_rollout.kernel import parts

ROOT = Path(__file__).parents[1]
PACKAGE = "vllm_rollout"
EXTENSION = "_C.abi3.so"

TESTED = ("tests/kernel", "tests/parts", "tests/tools", "tests/test_architecture.py", "tests/test_parts.py")
ABOUT_THE_WHOLE = (
    "tests/test_architecture.py::test_docs_and_docstrings_cite_files_that_are_there",
    "tests/test_architecture.py::test_functions_that_the_docs_name_are_there",
    "tests/test_architecture.py::test_what_works_from_outside_imports_neither_torch_nor_vllm",
    "tests/test_architecture.py::test_the_kernel_names_no_part_and_parts_name_those_that_they_need",
)
"""Tests that name the files of every part."""
KIND = "not engine and not slow and not thorough"
MOST_SECONDS = 1800
"""Upper bound of one command."""
LIST_OF_PARTS = "vllm_rollout.kernel.parts"


class Check(NamedTuple):
    """One check in the copy."""

    name: str
    said: str
    """Last line of its output, or its complaints."""
    succeeded: bool
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="a part that is left out, together with the others")
    parser.add_argument("--of-the-day", type=int, metavar="N", help="N parts, each by itself")
    parser.add_argument("--all", action="store_true", help="all parts together: the kernel alone")
    parser.add_argument("--no-tests", action="store_true", help="only imports, ruff and mypy: a minute, not ten")
    parser.add_argument("--keep", action="store_true", help="do not delete the copy")
    options = parser.parse_args()
    every = [part.name for part in parts.parts()]
    if unknown := set(options.parts) - set(every):
        parser.error(f"there is no part {sorted(unknown)[0]!r}")
    alone = of_the_day(every, options.of_the_day or 0, datetime.date.today())
    together = every if options.all else options.parts
    runs = [*([together] if together else []), *([name] for name in alone)]
    if not runs:
        parser.error("name a part, or say --all or --of-the-day")
    failed = [names for names in runs if not succeeds(names, options.keep, tested=not options.no_tests)]
    sys.exit(f"failed without {', '.join(map(' '.join, failed))}" if failed else 0)


def of_the_day(names: Sequence[str], num: int, day: datetime.date) -> list[str]:
    """`num` of the names, the next ones on the next day."""
    return [names[(day.toordinal() * num + place) % len(names)] for place in range(min(num, len(names)))]


def succeeds(names: list[str], keep: bool, *, tested: bool) -> bool:
    """Say what is left out, run the checks, and sum up."""
    gone, tests, start = with_dependents(names), left_out(*names), time.monotonic()
    print(f"without {', '.join(gone)}:", *(f"  {path.relative_to(ROOT)}" for path in tests), sep="\n", flush=True)
    folder = Path(tempfile.mkdtemp(prefix=f"without-{'-'.join(names)}-"))
    try:
        copy(folder, gone, tests)
        checks = [*checks_of(folder, gone, tested=tested)]
    finally:
        if keep:
            print(f"the copy: {folder}")
        else:
            shutil.rmtree(folder)
    for check in checks:
        print(f"{check.name:<10} {'ok' if check.succeeded else 'FAILED':<6} {check.seconds:4.0f} s  {check.said}")
    succeeded = all(check.succeeded for check in checks)
    outcome = "succeeded" if succeeded else "FAILED"
    print(f"without {', '.join(names)}: {outcome} in {time.monotonic() - start:.0f} s", flush=True)
    return succeeded


def with_dependents(names: Iterable[str]) -> list[str]:
    """These parts, and those that need them."""
    gone = set(names)
    for part in parts.parts():  # in this list, parts come after those that they need
        if not gone.isdisjoint(part.needs):
            gone.add(part.name)
    return sorted(gone)


def copy(target: Path, gone: Iterable[str], tests: Iterable[Path]) -> None:
    """Copy the files that git knows, or would add, and what was built: the extension, and what mypy knows."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True, timeout=MOST_SECONDS,
    ).stdout.split("\0")  # fmt: skip
    dropped = [*folders_of(gone), *tools_with(gone), *tests]
    for name in filter(None, listed):
        source = ROOT / name
        if source.is_file() and not any(source.is_relative_to(each) for each in dropped):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    shutil.copy2(ROOT / PACKAGE / EXTENSION, target / PACKAGE / EXTENSION)
    if (known := ROOT / ".mypy_cache").exists():
        shutil.copytree(known, target / known.name)


def folders_of(names: Iterable[str]) -> Iterator[Path]:
    """Folders of parts, and folders of other parts that are there only with one of them."""
    folder = ROOT / PACKAGE / "parts"
    for name in names:
        yield folder / name
        yield from folder.glob(f"*/with_{name}")


def tools_with(gone: Iterable[str]) -> Iterator[Path]:
    """Tools that import one of these parts: folders and files beside kernel and parts."""
    for place in sorted((ROOT / PACKAGE).iterdir()):
        if place.name not in ("adapter", "kernel", "parts") and imports_of_what_is_gone(place, gone):
            yield place


def checks_of(folder: Path, gone: list[str], *, tested: bool) -> Iterator[Check]:
    if any((ROOT / PACKAGE / "parts" / name / "csrc").exists() for name in gone):
        yield run("C++", folder, build_command(folder))
    start = time.monotonic()
    imports = imports_of_what_is_gone(folder / PACKAGE, gone)
    yield Check("imports", "".join(f"\n  {each}" for each in imports), not imports, time.monotonic() - start)
    if imports:
        return  # nearly every test would say the same
    yield run("names", folder, [sys.executable, "-m", "docs_tools.stub", "--write"])
    yield run("ruff", folder, ["ruff", "check", "--quiet", "."])
    yield run("mypy", folder, ["mypy", *typed_files(folder)])
    if tested:
        yield run_tests(folder)


def build_command(folder: Path) -> list[str]:
    build, python = folder / "build" / "without", f"-DVLLM_ROLLOUT_PYTHON_EXECUTABLE={sys.executable}"
    commands = [
        f"cmake -G Ninja -S {folder} -B {build} -DCMAKE_BUILD_TYPE=Release {python}",
        f"cmake --build {build} -j {os.cpu_count()}",
        f"cp {build / EXTENSION} {folder / PACKAGE / EXTENSION}",
    ]
    return ["sh", "-ec", "\n".join(commands)]


def imports_of_what_is_gone(place: Path, gone: Iterable[str]) -> list[str]:
    """Imports in a file, or below a folder, that nothing answers. Those for types only count, too."""
    modules = tuple(f"{PACKAGE}.parts.{name}" for name in gone)
    return [
        f"{path.relative_to(place.parent)}: {name}"
        for path in ([place] if place.suffix == ".py" else sorted(place.rglob("*.py")))
        for name in sorted(imported_modules(path.read_text()))
        if name.startswith(tuple(f"{module}." for module in modules)) or name in modules
    ]


def typed_files(folder: Path) -> list[str]:
    """The files and folders that pyproject.toml has for mypy and that are there."""
    patterns = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    return [path.relative_to(folder).as_posix() for pattern in patterns for path in sorted(folder.glob(pattern))]


def run_tests(folder: Path) -> Check:
    """Run the tests that can notice, in two processes."""
    files = [path.relative_to(folder).as_posix() for path in affected_tests(folder)]
    options = ["-q", "--no-header", "--numprocesses", "2", "--dist", "loadfile", "-m", KIND]
    options += ["-o", "empty_parameter_set_mark=skip"]  # a set may be that of the parts
    deselected = [f"--deselect={test}" for test in ABOUT_THE_WHOLE]
    return run("tests", folder, [sys.executable, "-m", "pytest", *options, *deselected, *files])


def affected_tests(folder: Path) -> list[Path]:
    """Test files that reach the list of parts by their imports and fixtures, the tests of the list among them."""
    places = [folder / place for place in TESTED]
    files = [path for place in places for path in ([place] if place.is_file() else sorted(place.rglob("test_*.py")))]
    return [path for path in files if reaches_the_list(folder, path)]


def reaches_the_list(folder: Path, path: Path) -> bool:
    found: set[Path] = set()
    left = [path, *(conftest for conftest in conftests_above(path) if gives_fixtures_to(conftest, path))]
    while left:
        file = left.pop()
        if file in found:
            continue
        found.add(file)
        if file == module_at(folder, LIST_OF_PARTS):
            return True
        is_part = file.name == "__init__.py" and file.parents[1].name == "parts"  # it says what the part is
        left += () if is_part else imported_files(folder, file)
    return False


def conftests_above(path: Path) -> Iterator[Path]:
    return (folder / "conftest.py" for folder in path.parents if (folder / "conftest.py").exists())


def gives_fixtures_to(conftest: Path, path: Path) -> bool:
    """True if a test file asks for a name that a `conftest.py` has, or if that has fixtures that nobody asks for."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    asked = {argument.arg for node in nodes if isinstance(node, ast.arguments) for argument in node.args}
    asked |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return "autouse" in conftest.read_text() or not asked.isdisjoint(names_of(conftest))


@cache
def names_of(path: Path) -> frozenset[str]:
    """Names that the body of a file defines or imports."""
    body = ast.parse(path.read_text()).body
    defined = (node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(
        [*defined, *(alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names)]
    )


@cache
def imported_files(folder: Path, path: Path) -> tuple[Path, ...]:
    """Files of the copy that a file imports."""
    names = imported_modules(path.read_text(), ".".join(path.relative_to(folder).parts[:-1]))
    found = (module_at(folder, name) or module_at(folder, name.rpartition(".")[0]) for name in names)
    return tuple(file for file in found if file is not None)


@cache
def module_at(folder: Path, name: str) -> Path | None:
    place = folder.joinpath(*name.split("."))
    files = (place.with_suffix(".py"), place / "__init__.py") if name else ()
    return next((file for file in files if file.exists()), None)


def run(name: str, folder: Path, command: list[str]) -> Check:
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # ruff, mypy, cmake, ninja
        "PYTHONPATH": str(folder),
        "HF_HUB_OFFLINE": "1",
        "MPLCONFIGDIR": str(ROOT / ".pytest_cache" / "matplotlib"),
        "VLLM_CACHE_ROOT": str(ROOT / ".pytest_cache" / "vllm"),  # what vLLM knows of models
    }
    start = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=MOST_SECONDS,
    )  # fmt: skip
    succeeded = done.returncode == 0
    if not succeeded:
        print(f"-- {name}:", done.stdout, sep="\n", flush=True)
    return Check(name, (done.stdout.strip().splitlines() or [""])[-1], succeeded, time.monotonic() - start)


if __name__ == "__main__":
    main()
