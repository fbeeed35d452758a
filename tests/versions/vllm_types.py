"""Types of expressions, as far as annotations, assignments and vLLM's running classes tell them.

Invariant: nothing is guessed. What cannot be told has no type, and a name that is bound several times has all the types
that it is bound to, wherever in its function that is.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable
from enum import Enum
from functools import cache, cached_property
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, get_args


class Instance(NamedTuple):
    cls: type


class Itself(NamedTuple):
    """A module, class or function by its name."""

    it: Any


class Box(NamedTuple):
    """A container, iterator or awaitable of other types."""

    contents: frozenset[Any]


Types = frozenset[Instance | Itself | Box]
NONE: Types = frozenset()
UNKNOWN: Types = frozenset({Box(NONE)})
"""Types of an unknown value."""
TRANSPARENT = {"Optional", "Union", "ClassVar", "Annotated", "Final", "Required", "NotRequired"}
OPAQUE = {"Literal", "Callable"}
PASSES_ON = {"list", "tuple", "set", "dict", "sorted", "reversed", "iter", "copy", "values", "aclosing"}
"""Functions that give what they get, or a container of the same."""
PICKS = {"next", "min", "max"}
PAIRS = {"zip", "enumerate", "items"}


def union(types: Iterable[Types]) -> Types:
    return frozenset(chain.from_iterable(types))


def contents(types: Types) -> Types:
    return union(each.contents for each in types if isinstance(each, Box))


# -- modules and names


@cache
def tree_of(module: ModuleType) -> ast.Module:
    try:
        return ast.parse(inspect.getsource(module))
    except (OSError, TypeError):  # there is no Python source
        return ast.Module([], [])


@cache
def imports_of(module: ModuleType) -> dict[str, tuple[str, str]]:
    """Local name -> module and name in it (empty for the module), of every import, also of those for types only."""
    found = {}
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or name] = (name, "")
        elif isinstance(node, ast.ImportFrom):
            package = module.__name__ if module.__spec__.submodule_search_locations else module.__package__
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
    return found


def imported(path: str) -> Any:
    """A module, or what is in it, by its dotted path; None when it is not there."""
    names = path.split(".")
    for cut in range(len(names), 0, -1):
        try:
            found = importlib.import_module(".".join(names[:cut]))
        except ImportError:
            continue
        for name in names[cut:]:
            found = getattr(found, name, None)
        return found
    return None


def named(name: str, module: ModuleType) -> Any:
    """Object of a name in a module, or None if it is unknown."""
    if name in vars(module):
        return vars(module)[name]
    if name in imports_of(module):
        return imported(".".join(filter(None, imports_of(module)[name])))
    return None


def meaning(name: str, module: ModuleType) -> Types:
    """The types of a name of a module: what it is declared to be, or is."""
    found = named(name, module)
    if isinstance(found, ModuleType | FunctionType | type) or not is_vllms(type(found)):
        return itself(found)
    source, there = imports_of(module).get(name, ("", ""))
    home = imported(source) if there else None
    for node in tree_of(home).body if isinstance(home, ModuleType) and is_vllms(home) else ():
        for each in ast.walk(node) if isinstance(node, ast.If) else ():  # `if TYPE_CHECKING:`
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id == there:
                return declared(each.annotation, home)
    return itself(found)


def is_vllms(found: Any) -> bool:
    name = found.__name__ if isinstance(found, ModuleType) else getattr(found, "__module__", None) or ""
    return name.partition(".")[0] == "vllm"


def itself(found: Any) -> Types:
    if isinstance(found, ModuleType | FunctionType | type):
        return frozenset({Itself(found)})
    return NONE if found is None else frozenset({Instance(type(found))})


# -- annotations


def declared(annotation: ast.AST | None, module: ModuleType) -> Types:
    """Types of an annotation in a module."""
    match annotation:
        case ast.Constant(value=str(text)):
            return declared(ast.parse(text, mode="eval").body, module)
        case ast.BinOp(left=left, right=right):
            return declared(left, module) | declared(right, module)
        case ast.Name() | ast.Attribute():
            found = static(annotation, module)
            instances = [found] if isinstance(found, type) else get_args(found)
            return frozenset(Instance(cls) for cls in instances if isinstance(cls, type) and cls is not Any)
        case ast.Subscript(value=value, slice=inner):
            word = value.attr if isinstance(value, ast.Attribute) else value.id
            if word in OPAQUE:
                return NONE
            inside = union(declared(arg, module) for arg in (inner.elts if isinstance(inner, ast.Tuple) else [inner]))
            if word in TRANSPARENT:
                return inside
            if word == "type":
                return frozenset(Itself(each.cls) for each in inside if isinstance(each, Instance))
            return frozenset({Box(inside)})
    return NONE


def static(node: ast.AST, module: ModuleType) -> Any:
    """Object of a dotted name."""
    if isinstance(node, ast.Name):
        return named(node.id, module)
    owner = static(node.value, module) if isinstance(node, ast.Attribute) else None
    return None if owner is None else of_itself(owner, node.attr)


def of_itself(owner: Any, name: str) -> Any:
    """An attribute, unless vLLM has put it into another's module, where it is not for us."""
    found = getattr(owner, name, None)
    return None if isinstance(owner, ModuleType) and is_vllms(found) and not is_vllms(owner) else found


# -- members of classes


@cache
def node_of(found: type | FunctionType) -> ast.AST | None:
    """AST node of a class or function, or None without a Python source."""
    found = inspect.unwrap(found)
    module = sys.modules.get(found.__module__)
    return None if module is None else definitions(module).get(found.__qualname__)


@cache
def definitions(module: ModuleType) -> dict[str, ast.AST]:
    """Classes and functions of a module by their qualified names; of overloads, the last."""
    found: dict[str, ast.AST] = {}

    def look(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found[inside + child.name] = child
                if isinstance(child, ast.ClassDef):
                    look(child, f"{inside}{child.name}.")
            elif isinstance(child, ast.If | ast.Try | ast.With):
                look(child, inside)

    look(tree_of(module), "")
    return found


def members(owner: Instance | Itself | Box, name: str) -> Types:
    if isinstance(owner, Instance):
        return members_of_class(owner.cls, name)
    if isinstance(owner, Itself) and isinstance(owner.it, ModuleType):
        if not owner.it.__name__.startswith("vllm"):
            return itself(of_itself(owner.it, name))
        return meaning(name, owner.it) or itself(imported(f"{owner.it.__name__}.{name}"))
    return members_of_class(owner.it, name) if isinstance(owner, Itself) and inspect.isclass(owner.it) else NONE


_asked: set[tuple[type, str]] = set()
_known: dict[tuple[type, str], Types] = {}


def members_of_class(cls: type, name: str) -> Types:
    if (cls, name) in _known:
        return _known[cls, name]
    if (cls, name) in _asked:  # an attribute that is made of itself
        return NONE
    _asked.add((cls, name))
    found = next((types for base in lookup_order(cls) if (types := _of_one_class(base, name))), NONE)
    _asked.remove((cls, name))
    _known[cls, name] = found
    return found


MIXED_INTO: dict[type, tuple[type, ...]] = {}
"""By a class of ours: the classes that it stands before, which its own bases do not say."""


def lookup_order(cls: type) -> list[type]:
    bases = chain.from_iterable(base.__mro__ for base in (cls, *MIXED_INTO.get(cls, ())))
    return [base for base in dict.fromkeys(bases) if base is not object]


def _of_one_class(cls: type, name: str) -> Types:
    found = vars(cls).get(name)
    found = getattr(found, "func", None) or getattr(found, "__func__", found)
    if isinstance(found, property):
        return result(Itself(found.fget))
    if isinstance(vars(cls).get(name), cached_property):
        return result(Itself(found))
    if isinstance(found, FunctionType | type):
        return frozenset({Itself(found)})
    if issubclass(cls, Enum) and isinstance(found, cls):
        return frozenset({Instance(cls)})
    module = sys.modules.get(cls.__module__)
    said = [
        declared(statement.annotation, module)
        if isinstance(statement, ast.AnnAssign)
        else scope_of(part, module, cls).infer_all(statement.value)
        for statement, part in said_in(cls).get(name, ())
    ]
    return union(said) if union(said) != UNKNOWN else NONE


@cache
def said_in(cls: type) -> dict[str, list[tuple[ast.AnnAssign | ast.Assign, ast.AST]]]:
    """The statements of a class's own source that declare or set an attribute, by its name, and in which part of it."""
    node = node_of(cls)
    found: dict[str, list[tuple[ast.AnnAssign | ast.Assign, ast.AST]]] = {}
    for part in [] if node is None else node.body:
        for statement in ast.walk(part):
            match statement:
                case ast.AnnAssign(target=ast.Name(id=name)) if statement is part:
                    found.setdefault(name, []).append((statement, part))
                case ast.AnnAssign(target=target) | ast.Assign(targets=[target]) if (name := own(target)) is not None:
                    found.setdefault(name, []).append((statement, part))
                case ast.Attribute(ctx=ast.Store()) if (name := own(statement)) is not None:
                    found.setdefault(name, [])  # perhaps in a tuple, whose types are not told
    return found


def own(node: ast.AST) -> str | None:
    """The `name` of `self.name`."""
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
    return None


def result(called: Instance | Itself | Box) -> Types:
    """Types of a call's result."""
    if isinstance(called, Instance):
        return union(result(each) for each in members(called, "__call__") if isinstance(each, Itself))
    if isinstance(called, Itself) and inspect.isclass(called.it):
        return frozenset({Instance(called.it)})
    node = node_of(called.it) if isinstance(called, Itself) and inspect.isfunction(called.it) else None
    returns = node.returns if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None
    return NONE if returns is None else declared(returns, sys.modules[inspect.unwrap(called.it).__module__])


# -- expressions


BINDING = (
    ast.Assign,
    ast.AnnAssign,
    ast.NamedExpr,
    ast.For,
    ast.AsyncFor,
    ast.comprehension,
    ast.withitem,
    ast.ExceptHandler,
)


class Scope:
    """A function with what is nested in it, or what of a module stands in none."""

    def __init__(self, node: ast.AST, module: ModuleType, cls: type | None) -> None:
        self.node, self.module, self.cls = node, module, cls
        self.names: dict[str, Types] = {}
        for argument in (each for each in ast.walk(node) if isinstance(each, ast.arg)):
            self._bind(argument.arg, declared(argument.annotation, module))
        if cls is not None:
            self.names |= {"self": frozenset({Instance(cls)}), "cls": frozenset({Itself(cls)})}
        binding = [each for each in ast.walk(node) if isinstance(each, BINDING)]
        for _ in range(3):  # what is bound later may be used by what stands before
            for each in binding:
                self._read(each)

    def _bind(self, name: str, types: Types) -> None:
        self.names[name] = self.names.get(name, NONE) | types

    def _assign(self, target: ast.AST, types: Types) -> None:
        match target:
            case ast.Name(id=name):
                self._bind(name, types)
            case ast.Starred(value=inner):
                self._assign(inner, types)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for inner in targets:
                    self._assign(inner, contents(types))

    def _read(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=targets, value=ast.Tuple(elts=values)) if isinstance(targets[0], ast.Tuple):
                for target, value in zip(targets[0].elts, values, strict=False):
                    self._assign(target, self.infer(value))
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, self.infer_all(value))
            case ast.ExceptHandler(type=ast.AST() as caught, name=str(name)):
                for error in caught.elts if isinstance(caught, ast.Tuple) else [caught]:
                    self._bind(name, declared(error, self.module))
            case ast.NamedExpr(target=target, value=value):
                self._assign(target, self.infer(value))
            case ast.AnnAssign(target=target, annotation=annotation):
                self._assign(target, declared(annotation, self.module))
            case ast.For(target=target, iter=items) | ast.AsyncFor(target=target, iter=items):
                self._assign(target, contents(self.infer(items)))
            case ast.comprehension(target=target, iter=items):
                self._assign(target, contents(self.infer(items)))
            case ast.withitem(context_expr=value, optional_vars=ast.AST() as target):
                types = self.infer(value)
                self._assign(target, types | contents(types))

    def infer_all(self, node: ast.AST) -> Types:
        """Says, too, when it may be something else."""
        return self.infer(node) or (NONE if isinstance(node, ast.Constant) else UNKNOWN)

    def infer(self, node: ast.AST) -> Types:
        match node:
            case ast.Name(id=name):
                return self.names[name] if name in self.names else meaning(name, self.module)
            case ast.Attribute(value=value, attr=name):
                return union(members(each, name) for each in self.infer(value))
            case ast.Call(func=ast.Name(id="super")):
                return NONE if self.cls is None else frozenset({Instance(base) for base in lookup_order(self.cls)[1:]})
            case ast.Call(func=ast.Name(id=name), args=args) if name in PASSES_ON:
                return union(map(self.infer, args))
            case ast.Call(func=ast.Name(id=name), args=args) if name in PICKS:
                return contents(union(map(self.infer, args)))
            case ast.Call(func=ast.Name(id=name), args=args) if name in PAIRS:
                return frozenset({Box(frozenset({Box(contents(union(map(self.infer, args))))}))})
            case ast.Call(func=ast.Attribute(value=value, attr=name) as function):
                boxes = frozenset(each for each in self.infer(value) if isinstance(each, Box))
                if name in PAIRS and boxes:
                    return frozenset({Box(frozenset({Box(contents(boxes))}))})
                given = boxes if name in PASSES_ON else contents(boxes)
                return given | union(map(result, self.infer(function)))
            case ast.Call(func=function):
                return union(map(result, self.infer(function)))
            case ast.Await(value=value):
                types = self.infer(value)
                return types | contents(types)
            case ast.Subscript(value=value, slice=place):
                types = self.infer(value)
                return types if isinstance(place, ast.Slice) else contents(types)
            case ast.BoolOp(values=values):
                return union(map(self.infer, values))
            case ast.IfExp(body=one, orelse=other):
                return self.infer(one) | self.infer(other)
            case ast.NamedExpr(value=value) | ast.Starred(value=value):
                return self.infer(value)
            case ast.List(elts=values) | ast.Tuple(elts=values) | ast.Set(elts=values) | ast.Dict(values=values):
                return frozenset({Box(union(map(self.infer, values)))})
            case ast.ListComp(elt=item) | ast.SetComp(elt=item) | ast.GeneratorExp(elt=item) | ast.DictComp(value=item):
                return frozenset({Box(self.infer(item))})
        return NONE


@cache
def scope_of(node: ast.AST, module: ModuleType, cls: type | None) -> Scope:
    return Scope(node, module, cls)
