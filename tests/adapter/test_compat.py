"""The contract with vLLM: its rows against the installed vLLM, and the adapter's code against its rows."""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import vllm.config  # noqa: F401  # first: vLLM's modules cannot be imported in just any order

import vllm_rollout.adapter
from vllm_rollout.adapter.compat import (
    CONTRACT,
    CPU_WORKER,
    FEATURES,
    GPU_WORKER,
    LOGGING_FLAGS,
    MIXED_INTO,
    SUPPORTED_VLLM,
    Fact,
    check_vllm_version,
    lacking,
    vllm_version,
)

ADAPTER = Path(vllm_rollout.adapter.__file__).parent
FILES = sorted(ADAPTER.rglob("*.py"))


@pytest.mark.parametrize("fact", CONTRACT, ids=lambda fact: f"{fact.kind}-{fact.of}.{fact.name}")
def test_vllm_is_as_the_contract_says(fact):
    if fact.holds_for(vllm_version):
        assert problem(fact) is None
    else:
        assert problem(fact) is not None, f"vLLM {vllm_version} has it"


def problem(fact: Fact) -> str | None:
    """What is wrong with a row, measured by the installed vLLM."""
    if fact.kind == "flag":
        return None if fact.name in serve_flags() else "no such setting"
    if fact.kind == "replaces":
        return None if looks_up(thing(fact.of), fact.name) else "the name is not looked up when it is called"
    if (owner := thing(fact.of)) is None:
        return f"there is no {fact.of}"
    if fact.kind == "adds":
        return "the name is taken" if has(owner, fact.name) else None
    if fact.kind in ("uses", "imports"):
        return None if has(owner, fact.name) else "no such attribute"
    if (function := getattr(owner, fact.name, None)) is None:
        return "no such function"
    if fact.kind == "does":
        return None if fact.parameters in inspect.getsource(function) else "its source does not say so"
    parameters = fact.parameters.split()
    if fact.kind == "calls":
        return unbound(function, parameters, is_method=is_method(owner, fact.name))
    first, keywords = [p for p in parameters if p[-1] != "="], {p[:-1] for p in parameters if p[-1] == "="}
    if positional(function)[: len(first)] != first or not keywords <= set(inspect.signature(function).parameters):
        return f"its signature is {inspect.signature(function)}"
    return None


def thing(path: str) -> Any:
    """A module, or what is in it, by its dotted path; None when it is not there."""
    for cut in range(len(path.split(".")), 0, -1):
        module, names = ".".join(path.split(".")[:cut]), path.split(".")[cut:]
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        for name in names:
            found = getattr(found, name, None)
        return found
    return None


@cache
def serve_flags() -> set[str]:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    return {action.dest for action in parser._actions}


def looks_up(function: Any, name: str) -> bool:
    """Whether a function imports `name` in its own body, or calls it as a name of its own module."""
    module, _, last = name.rpartition(".")
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    if function.__module__ == module:
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        return any(isinstance(called, ast.Name) and called.id == last for called in calls)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == module]
    return any(alias.name == last for node in imports for alias in node.names)


def has(owner: Any, name: str) -> bool:
    """Whether a module or class has a name: as an attribute, an annotated field or one that a method sets."""
    try:
        if hasattr(owner, name):
            return True
    except ImportError:
        return False
    if isinstance(owner, ModuleType):
        return name in owner.__dict__.get("environment_variables", {})
    if name == "__dict__":
        return hasattr(owner, "__dictoffset__") and owner.__dictoffset__ != 0
    return any(name in inspect.get_annotations(cls) or name in set_in_methods(cls) for cls in owner.__mro__)


@cache
def set_in_methods(cls: type) -> frozenset[str]:
    """Attributes that the methods of a class set on `self`."""
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):  # a class without Python source
        return frozenset()
    return frozenset(
        node.attr
        for node in ast.walk(ast.parse(textwrap.dedent(source)))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def positional(function: Any) -> list[str]:
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]
    return names[1:] if names[:1] == ["self"] else names


def is_method(owner: Any, name: str) -> bool:
    return inspect.isclass(owner) and inspect.isfunction(inspect.getattr_static(owner, name))


def unbound(function: Any, parameters: list[str], *, is_method: bool) -> str | None:
    """Why a call with these arguments would not reach the parameters they are meant for."""
    by_position = [name for name in parameters if not name.endswith("=")]
    by_name = {name.rstrip("="): None for name in parameters if name.endswith("=")}
    try:
        bound = inspect.signature(function).bind(*[None] * is_method, *by_position, **by_name)
    except TypeError as error:
        return f"{error}: {inspect.signature(function)}"
    for name, value in bound.arguments.items():
        if isinstance(value, str) and name not in (value, "args") and value in by_position:
            return f"{value} goes to the parameter {name}"
    return None


# -- is the contract complete?


def test_every_name_imported_from_vllm_is_in_the_contract():
    known = {f"{fact.of}.{fact.name}" for fact in CONTRACT if fact.kind != "flag"} | {fact.of for fact in CONTRACT}
    known |= {fact.name for fact in CONTRACT if fact.kind == "replaces"}
    imported = {name: path.name for path in FILES for name in imports_of_vllm(ast.parse(path.read_text()))}
    unknown = {name: where for name, where in imported.items() if not ({name} | aliases(name)) & known}
    assert unknown == {}


def imports_of_vllm(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "vllm")
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module.partition(".")[0] == "vllm":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def aliases(name: str) -> set[str]:
    """Where the class that a name stands for is defined; a module stands for what of it is used."""
    found = thing(name)
    if isinstance(found, ModuleType):
        return {fact.of for fact in CONTRACT if fact.of == name or fact.name.startswith(f"{name}.")} or {
            fact.name.rpartition(".")[0] for fact in CONTRACT if fact.name.rpartition(".")[0] == name
        }
    return {f"{found.__module__}.{found.__qualname__}"} if inspect.isclass(found) else set()


def our_classes() -> list[type]:
    modules = [".".join(["vllm_rollout.adapter", *path.relative_to(ADAPTER).with_suffix("").parts]) for path in FILES]
    found = [importlib.import_module(module) for module in modules if not module.endswith("__init__")]
    return [
        cls for module in found for cls in vars(module).values() if inspect.isclass(cls) and cls.__module__ in modules
    ]


def bases_of(cls: type) -> list[type]:
    """The vLLM classes that a class of ours stands before."""
    inherited = [base for base in cls.__mro__ if base.__module__.partition(".")[0] == "vllm"][:1]
    bases = inherited + [thing(path) for path in MIXED_INTO.get(cls.__name__, ())]
    # The platform's worker is one of two, and both must be as we need them.
    workers = thing(CPU_WORKER), thing(GPU_WORKER)
    return [*bases, *workers] if any(base in workers for base in bases) else bases


def test_every_override_is_in_the_contract_and_names_the_parameters_it_says():
    overrides = [fact for fact in CONTRACT if fact.kind == "overrides" and fact.holds_for(vllm_version)]
    rows = {(fact.of, fact.name): fact.parameters.split() for fact in overrides}
    seen = set()
    for cls in our_classes():
        for base in bases_of(cls):
            for name, function in vars(cls).items():
                of = next((c for c in base.__mro__ if c is not object and name in vars(c)), None)
                if of is None or not inspect.isfunction(function):
                    continue
                place = (path_of(base), name)
                assert place in rows, f"{cls.__name__}.{name} overrides {place[0]}.{name}: not in the contract"
                assert positional(function) == [name for name in rows[place] if name[-1] != "="], place
                seen.add(place)
    assert seen == set(rows)


def path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def test_nothing_that_ours_set_on_themselves_hides_something_of_vllms():
    meant = {(fact.of, fact.name) for fact in CONTRACT}
    hidden = [
        f"{cls.__name__}.{name} hides {path_of(base)}.{name}"
        for cls in our_classes()
        for base in bases_of(cls)
        for name in set_in_methods(cls)
        if has(base, name) and (path_of(base), name) not in meant
    ]
    assert hidden == []


def test_every_attribute_that_ours_read_of_themselves_is_ours_or_in_the_contract():
    ours = {name for cls in our_classes() for name in (*vars(cls), *set_in_methods(cls), *inspect.get_annotations(cls))}
    rows = [(thing(fact.of), fact.name) for fact in CONTRACT if fact.kind in ("calls", "uses", "overrides")]
    unknown = set()
    for cls in our_classes():
        bases = [parent for base in bases_of(cls) for parent in base.__mro__]
        known = ours | {name for owner, name in rows if owner in bases}
        unknown |= {
            f"{cls.__name__}.{node.attr}"
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls))))
            if bases
            and isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
            if node.attr not in known
        }
    assert unknown == set()


def test_every_attribute_of_an_argument_that_is_vllms_is_in_the_contract():
    known = {(fact.of, fact.name) for fact in CONTRACT}
    unknown = set()
    for path in FILES:
        tree = ast.parse(path.read_text())
        names = {name.rpartition(".")[2]: name for name in imports_of_vllm(tree)}
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        for function, argument, annotation in ((f, a.arg, a.annotation) for f in functions for a in f.args.args):
            classes = {names[word] for word in words_in(annotation) if word in names}
            read = {
                node.attr
                for node in ast.walk(function)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == argument
            }
            places = {place for name in classes for place in aliases(name) | {name}}
            unknown |= {
                f"{path.name}: {argument}.{attribute} of {'|'.join(sorted(classes))}"
                for attribute in (read if classes else ())
                if not any((place, attribute) in known for place in places)
            }
    assert unknown == set()


def words_in(annotation: ast.AST | None) -> set[str]:
    """Names in an annotation, as in `Request | None`; not those inside of brackets, as in `list[Request]`."""
    if isinstance(annotation, ast.BinOp):
        return words_in(annotation.left) | words_in(annotation.right)
    return {annotation.id} if isinstance(annotation, ast.Name) else set()


@pytest.mark.parametrize("fact", CONTRACT, ids=lambda fact: f"{fact.kind}-{fact.of}.{fact.name}")
def test_what_the_contract_names_is_used_where_it_says(fact):
    for place in fact.by.split():
        paths = [path for path in FILES if path.relative_to(ADAPTER).with_suffix("").parts[0] == place]
        words = {word for path in paths for word in words_of(path)}
        assert fact.name.rpartition(".")[2] in words, f"{place} does not use it"


@cache
def words_of(path: Path) -> frozenset[str]:
    """Names, attributes, keywords and constants of a file."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    words = [getattr(node, field, None) for node in nodes for field in ("id", "attr", "arg", "name", "value")]
    return frozenset(word for word in words if isinstance(word, str))


def test_a_row_that_is_not_true_is_found():
    scheduler = "vllm.v1.core.sched.scheduler.Scheduler"
    assert problem(Fact("uses", scheduler, "rollouts")) == "no such attribute"
    assert problem(Fact("uses", "vllm.v1.nowhere.Scheduler", "running")) == "there is no vllm.v1.nowhere.Scheduler"
    assert problem(Fact("overrides", scheduler, "add_request", "step"))
    assert problem(Fact("overrides", scheduler, "add_request", "request priority="))
    assert problem(Fact("calls", scheduler, "finish_requests", "request_ids reason="))
    assert problem(Fact("calls", scheduler, "finish_requests", "finished_status request_ids"))
    assert problem(Fact("adds", scheduler, "add_request")) == "the name is taken"
    assert problem(Fact("does", scheduler, "add_request", "race(")) == "its source does not say so"
    assert problem(Fact("flag", "vllm serve", "rollouts")) == "no such setting"


# -- versions


def test_what_every_supported_version_has_in_common_is_most_of_the_contract():
    differing = [fact for fact in CONTRACT if (fact.since, fact.until) != (SUPPORTED_VLLM[0], SUPPORTED_VLLM[-1])]
    assert 0 < len(differing) < len(CONTRACT) / 10


def test_a_row_holds_from_the_version_that_brings_it_to_the_last_that_has_it():
    fact = Fact("uses", "vllm.a.B", "c", since="0.30", until="0.31")
    assert [version for version in SUPPORTED_VLLM if fact.holds_for(f"{version}.0")] == ["0.30", "0.31"]
    assert LOGGING_FLAGS.holds_for("0.31.2rc1")
    assert not LOGGING_FLAGS.holds_for("0.30.9")


def test_the_row_of_every_feature_is_in_the_contract():
    assert all(feature.row in CONTRACT for feature in FEATURES)


def test_what_a_version_lacks_is_said_with_the_version_that_brings_it():
    assert [line.partition(" (")[0] for line in lacking("0.29.0")] == [feature.name for feature in FEATURES]
    assert lacking("0.32.1") == [
        "refusing requests while paused (since 0.33; they wait until generation is resumed)",
    ]
    assert lacking("0.33.0") == []


@pytest.mark.parametrize("version", ["0.24.0", "0.28.1", "0.34.0", "1.0.0", "0.3.2"])
def test_another_vllm_is_refused_with_the_command_that_helps(version):
    with pytest.raises(RuntimeError, match=rf"0\.29 to 0\.33, found {version}.*vllm==0\.32"):
        check_vllm_version(version)


@pytest.mark.parametrize("version", [f"{minor}.7" for minor in SUPPORTED_VLLM])
def test_every_patch_of_a_supported_version_is_taken(version):
    check_vllm_version(version)
