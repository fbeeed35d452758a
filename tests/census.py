"""Counts the project: how much there is of it, how its files import each other, how many of them a reward passes.

- **Parts**: files, lines, and statements (nodes of the syntax tree; a docstring is none) of everything in Python; for
  docs the words.
- **Rooms**: each folder of the package. `units` are the files and folders that stand directly in it, `arrows` the pairs
  of units of which one imports the other, `floors` the units on the longest chain of arrows (units that import each
  other in a circle are one floor).
- **Circles**: files that import each other in a circle; once counting imports for type checkers, once without.
- **Hops**: files that the tables "The journey of ..." of docs/contributing/architecture.md name.
- **Twins**: pairs of functions of at least 40 words, of which four in five triples of words that follow each other are
  the same. Words are nodes of the syntax tree; names of variables, constants, docstrings and `await` count for nothing.
- **Privates**: lines of tests that touch `x._y` (x is not self), and tests in which there are such.

Run from the repository root: make census, or python -m tests.census --json
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.support.imports import imported_modules

ROOT = Path(__file__).parents[1]
PACKAGE = "vllm_rollout"
PARTS = (PACKAGE, "kernels", "benchmarks", "conformance", "tests", "examples")
JOURNEYS = ("candidate", "reward")
MIN_TWIN_WORDS = 40
TWIN_LIKENESS = 0.8
Graph = Mapping[str, Collection[str]]
"""Imports: path of a file or unit -> paths that it imports."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.census", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="Print all of it as JSON instead of tables.")
    found = census(ROOT)
    if parser.parse_args().json:
        json.dump(found, sys.stdout, indent=1)
    else:
        show(found, Console())


def census(root: Path) -> dict[str, Any]:
    """All counts of the project in `root`, by the names in the module's docstring."""
    graph, at_run_time = imports(root), imports(root, with_types=False)
    folders = sorted({path.parent for path in (root / PACKAGE).rglob("*.py")})
    return {
        "parts": {name: part(root / name) for name in PARTS} | {"docs": docs(root)},
        "rooms": {str(folder.relative_to(root)): room(str(folder.relative_to(root)), graph) for folder in folders},
        "circles": {"with types": circles(graph), "at run time": circles(at_run_time)},
        "hops": {name: hops(root / "docs" / "contributing" / "architecture.md", name) for name in JOURNEYS},
        "twins": twins(root / PACKAGE),
        "privates": privates(root / "tests"),
    }


def part(folder: Path) -> dict[str, int]:
    """Files, lines and statements of a folder's Python."""
    sources = [path.read_text() for path in folder.rglob("*.py")]
    statements = sum(1 for source in sources for _ in statements_of(ast.parse(source)))
    return {"files": len(sources), "lines": sum(source.count("\n") for source in sources), "statements": statements}


def docs(root: Path) -> dict[str, int]:
    texts = [path.read_text() for path in (*root.glob("*.md"), *(root / "docs").rglob("*.md"))]
    return {
        "files": len(texts),
        "lines": sum(text.count("\n") for text in texts),
        "words": sum(len(text.split()) for text in texts),
    }


def statements_of(tree: ast.AST) -> Iterator[ast.stmt]:
    """Every statement below `tree`, but for strings that stand by themselves: docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield node


def imports(root: Path, with_types: bool = True) -> dict[str, set[str]]:
    """Each file of the package to the files of it that it imports, as paths below `root`. The packages that a file
    stands in do not count: Python imports them before it, whatever it says."""
    files = {module_name(path.relative_to(root)): path for path in (root / PACKAGE).rglob("*.py")}
    graph = {}
    for name, path in files.items():
        package = ".".join(path.relative_to(root).parts[:-1])
        targets = {owner(found, files) for found in imported_modules(path.read_text(), package, with_types)} - {None}
        graph[str(path.relative_to(root))] = {
            str(files[target].relative_to(root)) for target in targets if not f"{name}.".startswith(f"{target}.")
        }
    return graph


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def owner(dotted: str, files: Mapping[str, Path]) -> str | None:
    """The module that `dotted` is, or stands in; none when it is not ours."""
    return next((name for name in (dotted, dotted.rpartition(".")[0]) if name in files), None)


def room(folder: str, graph: Graph) -> dict[str, int]:
    """Files and direct units of a folder, arrows between these units, and floors: the longest chain of arrows."""
    files = [path for path in graph if path.startswith(f"{folder}/")]
    units = {path: path.removeprefix(f"{folder}/").partition("/")[0] for path in files}
    between: dict[str, set[str]] = {unit: set() for unit in units.values() if unit != "__init__.py"}
    for path in files:
        between.get(units[path], set()).update(
            units[target] for target in graph[path] if units.get(target, units[path]) in between.keys() - {units[path]}
        )
    arrows = sum(map(len, between.values()))
    return {"files": len(files), "units": len(between), "floors": floors(between), "arrows": arrows}


def floors(graph: Graph) -> int:
    """Number of units on the longest chain of imports. Units of one circle count once."""
    circle = together(graph)
    below: dict[frozenset[str], set[frozenset[str]]] = defaultdict(set)
    for node, targets in graph.items():
        below[circle[node]] |= {circle[target] for target in targets} - {circle[node]}
    height: dict[frozenset[str], int] = {}
    for members in TopologicalSorter(below).static_order():
        height[members] = 1 + max((height[lower] for lower in below[members]), default=0)
    return max(height.values(), default=0)


def circles(graph: Graph) -> list[list[str]]:
    """Groups of units that import each other, directly or by others."""
    return sorted(sorted(members) for members in set(together(graph).values()) if len(members) > 1)


def together(graph: Graph) -> dict[str, frozenset[str]]:
    """Each to those that it reaches and that reach it, itself among them."""
    reached = {node: reached_from(node, graph) for node in graph}
    return {node: frozenset(other for other in reached[node] if node in reached[other]) for node in graph}


def reached_from(start: str, graph: Graph) -> set[str]:
    found, left = {start}, [start]
    while left:
        left += (new := set(graph[left.pop()]) - found)
        found |= new
    return found


def hops(page: Path, journey: str) -> list[str]:
    """The files that the table of a journey names, in its order; none where the page has no such table."""
    _, _, rest = page.read_text().partition(f"\n## The journey of a {journey}\n")
    rows = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return list(dict.fromkeys(name for row in rows for name in re.findall(r"`([a-z_/]+\.py)", row)))


def twins(folder: Path) -> list[tuple[str, str]]:
    """Pairs of functions that are nearly the same, as `file::function:line`."""
    functions = [pair for path in sorted(folder.rglob("*.py")) for pair in forms(path, folder.parent)]
    functions.sort(key=lambda pair: pair[1].total())
    found = []
    for index, (one, form) in enumerate(functions):
        for other, larger in functions[index + 1 :]:
            if form.total() < TWIN_LIKENESS * larger.total():
                break
            if (form & larger).total() >= TWIN_LIKENESS * larger.total():
                found.append((one, other) if one < other else (other, one))
    return sorted(found)


def forms(path: Path, root: Path) -> Iterator[tuple[str, Counter[tuple[str, ...]]]]:
    """A file's functions that stand in no other, each as the triples of words that follow each other in it."""
    left: list[ast.AST] = [ast.parse(path.read_text())]
    while left:
        for node in ast.iter_child_nodes(left.pop()):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                left.append(node)
                continue
            words = [word for statement in node.body for word in bare(statement)]
            if len(words) >= MIN_TWIN_WORDS:
                triples = Counter(zip(words, words[1:], words[2:], strict=False))
                yield f"{path.relative_to(root)}::{node.name}:{node.lineno}", triples


def bare(node: ast.AST) -> Iterator[str]:
    """The words of a function's syntax tree without names of variables, constants, docstrings and `await`: kinds of
    nodes, and names of attributes and of keywords."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.Attribute | ast.keyword):
        yield f".{node.attr if isinstance(node, ast.Attribute) else node.arg}"
    elif not isinstance(node, ast.Await | ast.expr_context):
        yield type(node).__name__.removeprefix("Async")
    for child in ast.iter_child_nodes(node):
        yield from bare(child)


def privates(folder: Path) -> dict[str, int]:
    lines, tests = 0, 0
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text())
        lines += len({node.lineno for node in ast.walk(tree) if is_private(node)})
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        tests += sum(any(map(is_private, ast.walk(node))) for node in functions if node.name.startswith("test_"))
    return {"lines": lines, "tests": tests}


def is_private(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute) or not re.match(r"_[^_]", node.attr):
        return False
    return not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))


def show(found: Mapping[str, Any], console: Console) -> None:
    """Prints the counts as tables; circles and twins by name."""
    for title, rows in (("part", found["parts"]), ("room", found["rooms"])):
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        table = Table(title, *columns)
        for name, row in rows.items():
            table.add_row(name, *(f"{row[column]:,}" if column in row else "" for column in columns))
        console.print(table)
    for kind, members in found["circles"].items():
        console.print(f"circles of files, {kind}: {len(members)}", *map(" <-> ".join, members), sep="\n  ")
    console.print("files on the way:", ", ".join(f"{name} {len(files)}" for name, files in found["hops"].items()))
    console.print(f"twins: {len(found['twins'])}", *map(" = ".join, found["twins"]), sep="\n  ")
    console.print("tests that touch privates: {tests} ({lines} lines)".format_map(found["privates"]))


if __name__ == "__main__":
    main()
