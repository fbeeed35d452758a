"""Names of vLLM that our code uses, read out of the kernel's and parts' source, and what each version says of them.

`names.txt` has one row for each different answer: `path` of an attribute, `path(parameters)` of a callable, and
`path: absent` of a name that a version lacks. A row that only some versions say names them behind a mark. Names are
read with the preferred version's types.

Run from the repository root: make snapshot, or python -m tests.versions.vllm_snapshot for the installed vLLM."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import vllm.config  # noqa: F401  # first: vLLM's modules cannot be imported in just any order

import vllm_rollout
from tests.support.imports import imported_modules
from tests.versions.vllm_types import (
    MIXED_INTO,
    Box,
    Instance,
    Itself,
    Scope,
    imported,
    imports_of,
    is_vllms,
    node_of,
    said_in,
    scope_of,
)
from vllm_rollout.adapter.compat import CONTRACT, vllm_version
from vllm_rollout.versions import PREFERRED_VLLM, SUPPORTED_VLLM, minor_of

PACKAGE = Path(vllm_rollout.__file__).parent


def may_use_vllm(path: Path) -> bool:
    """True for files of the rooms that know vLLM, for those that its processes share, and for all that import it."""
    ring, *where = path.relative_to(PACKAGE).with_suffix("").parts
    rooms = {"kernel": where[:1], "parts": where[1:2]}.get(ring, [])
    is_shared = rooms == ["wire"] or ring == "adapter"
    is_known = any(name.partition(".")[0] == "vllm" for name in imported_modules(path.read_text()))
    return is_shared or is_known or not {"api", "core", "worker"}.isdisjoint(rooms)


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if may_use_vllm(path) and path.name != "compat.py"]
NAMES = Path(__file__).with_name("names.txt")
MARK = "  # "
"""Stands before the versions of a row that not every version says."""
ABSENT = ": absent"

RUNNERS = "vllm.v1.worker.gpu_model_runner.GPUModelRunner", "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
WORKERS = "vllm.v1.worker.gpu_worker.Worker", "vllm.v1.worker.cpu_worker.CPUWorker"
STANDS_BEFORE = {
    "kernel.core.scheduler.GroupSchedulerMixin": ("vllm.v1.core.sched.scheduler.Scheduler",),
    "kernel.worker.runner.RunnerMixin": RUNNERS,
    "kernel.worker.runner.RunnerV1Mixin": RUNNERS[:1],
    "kernel.worker.runner.CPURunnerV1Mixin": ("vllm.v1.worker.cpu_model_runner.CPUModelRunner",),
    "kernel.worker.runner.RunnerV2Mixin": RUNNERS[1:],
    "kernel.worker.worker.RolloutWorker": WORKERS,
    "parts.emulation.worker.worker.EmulatedWorker": WORKERS[:1],
    "parts.observing.worker.runner.ObservingMixin": RUNNERS,
    "parts.observing.worker.runner.ObservingV1Mixin": RUNNERS[:1],
    "parts.observing.worker.runner.ObservingV2Mixin": RUNNERS[1:],
    "parts.observing.worker.runner.SamplerMixin": ("vllm.v1.worker.gpu.sample.sampler.Sampler",),
    "kernel.api.endpoints.RolloutEndpoints": ("vllm.plugins.endpoint_plugins.interface.EndpointPlugin",),
}
"""The vLLM classes that a class of ours stands before, or for, without saying so."""


class Call(NamedTuple):
    """A call of vLLM in our code."""

    path: str
    num_positional: int
    keywords: tuple[str, ...]
    is_whole: bool
    """Nothing else is passed: no `*args`, no `**kwargs`."""


class Override(NamedTuple):
    """A method of ours that takes the place of one of vLLM's."""

    path: str
    by: str
    positional: tuple[str, ...]
    keywords: frozenset[str]
    """Names that the function takes out of its `**kwargs`, or puts there."""


# -- our code


def modules() -> list[ModuleType]:
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in FILES]
    return [importlib.import_module(name.removesuffix(".__init__")) for name in names]


@cache
def our_classes() -> dict[type, tuple[type, ...]]:
    """Each class of these files, with those of vLLM's that it, or what is made of it, stands before."""
    found = [
        cls for module in modules() for cls in vars(module).values() if inspect.isclass(cls) and is_ours(cls, module)
    ]
    bases = {}
    for cls in found:
        name = f"{cls.__module__.removeprefix('vllm_rollout.')}.{cls.__qualname__}"
        inherited = [base for base in cls.__mro__ if is_vllms(base)][:1]
        bases[cls] = [*inherited, *map(imported, STANDS_BEFORE.get(name, ()))]
    for cls in found:
        if not bases[cls]:  # a part of others
            bases[cls] = [base for other in found if cls in other.__mro__ for base in bases[other]]
    return {cls: tuple(dict.fromkeys(each)) for cls, each in bases.items()}


def is_ours(cls: type, module: ModuleType) -> bool:
    return cls.__module__ == module.__name__


@cache
def our_names(cls: type) -> frozenset[str]:
    """Names that a class of ours defines. A mere annotation does not count if a base class of vLLM's follows."""
    said = {
        name
        for name, statements in said_in(cls).items()
        if not statements or not our_classes()[cls] or any(statement.value is not None for statement, _ in statements)
    }
    return frozenset(vars(cls)) | said


@cache
def all_our_names() -> frozenset[str]:
    return frozenset().union(*map(our_names, our_classes()))


@cache
def read() -> tuple[set[str], set[Call], set[Override]]:
    """The paths of all that our code uses of vLLM, how it calls them, and what it puts in their place."""
    MIXED_INTO.update(our_classes())
    paths, calls = set(), set()
    for module in modules():
        paths |= {
            f"{source}.{name}" if name else source
            for source, name in imports_of(module).values()
            if source.partition(".")[0] == "vllm"
        }
        for node, cls in parts(module):
            scope = scope_of(node, module, cls)
            for each in ast.walk(node):
                if isinstance(each, ast.Attribute):
                    paths |= set(paths_of(each, scope))
                elif isinstance(each, ast.Call):
                    calls |= set(calls_of(each, scope))
    replaced = overrides()
    return paths | {call.path for call in calls} | {each.path for each in replaced}, calls, replaced


def parts(module: ModuleType) -> Iterator[tuple[ast.AST, type | None]]:
    """The functions and methods of a module, each with its class, and what stands outside of them."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    tree = ast.parse(inspect.getsource(module))
    rest = [node for node in tree.body if not isinstance(node, functions | ast.ClassDef)]
    yield ast.Module(rest, []), None
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from ((each, getattr(module, node.name)) for each in node.body)
        elif isinstance(node, functions):
            yield node, None


def paths_of(node: ast.Attribute, scope: Scope) -> Iterator[str]:
    """Paths of vLLM that an attribute may be: in each class that has it, or else in the first class."""
    name, types = node.attr, scope.infer(node.value)
    if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", None) == "super":
        types = frozenset(Instance(base) for base in our_classes().get(scope.cls, ()))
    owners: list[Any] = []
    for owner in (each.cls if isinstance(each, Instance) else each.it for each in types if not isinstance(each, Box)):
        if inspect.isclass(owner) and owner in our_classes():
            owners += our_classes()[owner]
        elif is_vllms(owner) and not isinstance(owner, FunctionType):
            owners.append(owner)
    found = [owner for owner in owners if has(owner, name)]
    if not found:
        found = [sub for owner in owners if inspect.isclass(owner) for sub in subclasses(owner) if has(sub, name)][:1]
    is_told = all(isinstance(each, Itself) or (isinstance(each, Instance) and is_vllms(each.cls)) for each in types)
    if not found and name not in all_our_names() and is_told:
        found = owners[:1]
    yield from (f"{path_of(owner)}.{name}" for owner in found)


def subclasses(cls: type) -> Iterator[type]:
    """vLLM's subclasses, nearest first."""
    for sub in sorted(filter(is_vllms, cls.__subclasses__()), key=lambda each: each.__qualname__):
        yield sub
        yield from subclasses(sub)


def calls_of(node: ast.Call, scope: Scope) -> Iterator[Call]:
    if isinstance(node.func, ast.Attribute):
        paths = list(paths_of(node.func, scope))
    else:
        called = [type.it for type in scope.infer(node.func) if isinstance(type, Itself) and is_vllms(type.it)]
        paths = [path_of(each) for each in called]
    positional = [each for each in node.args if not isinstance(each, ast.Starred)]
    keywords = tuple(each.arg for each in node.keywords if each.arg is not None)
    is_whole = len(positional) == len(node.args) and len(keywords) == len(node.keywords)
    for path in paths:
        if inspect.isclass(imported(path)):
            path += ".__init__"
        yield Call(path, len(positional), keywords, is_whole)


@cache
def our_paths() -> dict[Any, str]:
    """Classes and functions of vLLM's -> where our code imports them from."""
    sources = {source for module in modules() for source in imports_of(module).values() if source[1]}
    return {
        found: ".".join(source)
        for source in sorted(sources, reverse=True)
        if source[0].partition(".")[0] == "vllm"
        and isinstance(found := imported(".".join(source)), type | FunctionType)
    }


def path_of(found: Any) -> str:
    if isinstance(found, ModuleType):
        return found.__name__
    return our_paths().get(found) or f"{found.__module__}.{found.__qualname__}"


def overrides() -> set[Override]:
    found = set()
    for cls, bases in our_classes().items():
        for name, function in vars(cls).items():
            for base in bases if isinstance(function, FunctionType) else ():
                if any(name in vars(each) for each in base.__mro__ if each is not object):
                    names = tuple(positional(inspect.signature(function)))
                    path = f"{path_of(base)}.{name}"
                    found.add(Override(path, f"{cls.__name__}.{name}", names, keywords_of(node_of(function))))
    return found


def keywords_of(function: ast.FunctionDef) -> frozenset[str]:
    """The constants by which a function looks into its `**kwargs`."""
    found = set()
    for node in ast.walk(function):
        match node:
            case (
                ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=key))
                | ast.Call(
                    func=ast.Attribute(value=ast.Name(id=name), attr="get" | "pop"), args=[ast.Constant(value=key), *_]
                )
            ) if function.args.kwarg is not None and name == function.args.kwarg.arg:
                found.add(key)
    return frozenset(found)


# -- what a vLLM says


def has(owner: Any, name: str) -> bool:
    """True if a module or class has a name: as an attribute, an annotated field or one that a method sets."""
    try:
        if hasattr(owner, name):
            return True
    except ImportError:
        return False
    if isinstance(owner, ModuleType):
        if name in owner.__dict__.get("environment_variables", {}):
            return True
        is_package = hasattr(owner, "__path__")  # of whose modules those are attributes that somebody has imported
        return is_package and importlib.util.find_spec(f"{owner.__name__}.{name}") is not None
    if name == "__dict__":
        return hasattr(owner, "__dictoffset__") and owner.__dictoffset__ != 0
    return any(name in inspect.get_annotations(cls) or name in said_in(cls) for cls in owner.__mro__)


class Given:
    """A default, of which only that there is one counts."""

    def __repr__(self) -> str:
        return "..."


def line(path: str) -> str:
    """Snapshot line of a name for the installed vLLM."""
    parent, _, name = path.rpartition(".")
    owner = imported(path) if parent == "" else imported(parent)
    if owner is None or (parent and not has(owner, name)):
        return path + ABSENT
    found = owner if name == "__init__" else getattr(owner, name, None)
    if not (inspect.isroutine(found) or name == "__init__"):
        return path
    parameters = list(inspect.signature(found).parameters.values())
    is_method = inspect.isclass(owner) and not isinstance(
        inspect.getattr_static(owner, name, None), classmethod | staticmethod
    )
    plain = [
        each.replace(annotation=each.empty, default=each.default if each.default is each.empty else Given())
        for each in parameters[is_method and name != "__init__" :]
    ]
    return path + str(inspect.Signature(plain))


def signature_of(said: str) -> inspect.Signature:
    """Out of what a snapshot says of a path: its parameters in brackets; nothing known, where it has none."""
    return inspect.signature(eval(f"lambda {said[1:-1] if said.startswith('(') else '*_, **__'}: None"))


def called_with(call: Call, said: str) -> list[str] | None:
    """The parameters that positions go to; None where a call does not go through, or a keyword is not among them."""
    signature = signature_of(said)
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    names = {each.name for each in signature.parameters.values() if each.kind not in variable}
    if said == ABSENT or (names and not set(call.keywords) <= names):
        return None
    bind = signature.bind if call.is_whole else signature.bind_partial
    try:
        bound = bind(*[None] * call.num_positional, **dict.fromkeys(call.keywords))
    except TypeError:
        return None
    return list(bound.arguments)[: call.num_positional]


def positional(signature: inspect.Signature) -> list[str]:
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [each.name for each in signature.parameters.values() if each.kind in kinds]
    return names[1:] if names[:1] == ["self"] else names


def lines(asked: set[str]) -> list[str]:
    return sorted(map(line, asked))


# -- the file of names


def matrix() -> dict[str, tuple[str, ...]]:
    """Each row of `names.txt` -> the versions that say it. A row without a mark is said by every version."""
    rows = (row.partition(MARK) for row in NAMES.read_text().splitlines())
    return {row: tuple(versions.split()) or SUPPORTED_VLLM for row, _, versions in rows}


def recorded(version: str) -> dict[str, str]:
    """Path -> parameters in brackets, ': absent' or nothing, as the file says of a version."""
    rows = [row for row, versions in matrix().items() if minor_of(version) in versions]
    return {path: row.removeprefix(path) for row in rows for path in re.findall(r"^[\w.]+", row)}


def record(version: str, said: list[str]) -> None:
    """Replace what the file says of a version."""
    minor = minor_of(version)
    rows = {row: {each for each in versions if each != minor} for row, versions in matrix().items()}
    for row in said:
        rows.setdefault(row, set()).add(minor)
    marked = {row: [each for each in SUPPORTED_VLLM if each in versions] for row, versions in rows.items()}
    written = (
        row if versions == list(SUPPORTED_VLLM) else f"{row}{MARK}{' '.join(versions)}"
        for row, versions in sorted(marked.items())
        if versions
    )
    NAMES.write_text("".join(f"{row}\n" for row in written))


def asked() -> set[str]:
    """Names that a snapshot must have. They are read out of our code with the preferred version. Names of earlier
    snapshots are added while our code still has the word, so that no name that vLLM drops is forgotten."""
    words = {word for path in FILES for word in words_of(path)} | {"__init__"}
    once = {path for path in recorded(PREFERRED_VLLM) if path.rpartition(".")[2] in words}
    rows = {f"{fact.of}.{fact.name}" for fact in CONTRACT if fact.kind in ("has", "takes")}
    now = read()[0] if minor_of(vllm_version) == PREFERRED_VLLM else set()
    return (rows | once | now) - {f"{fact.of}.{fact.name}" for fact in CONTRACT if fact.kind == "adds"}


@cache
def words_of(path: Path) -> frozenset[str]:
    """Names, attributes, keywords and constants of a file."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    words = [getattr(node, field, None) for node in nodes for field in ("id", "attr", "arg", "name", "value")]
    return frozenset(word.rpartition(".")[2] for word in words if isinstance(word, str))


if __name__ == "__main__":
    record(vllm_version, lines(asked()))
    print(f"{NAMES}: {len(recorded(vllm_version))} names of vLLM {vllm_version}")
