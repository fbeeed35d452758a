"""Griffe extension for methods made from the description of a call, such as `rollout = _awaited(calls.rollout)`.

Invariant: a method has the name, arguments and words that `help` shows for it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from copy import copy
from typing import Any, NamedTuple

from griffe import Attribute, Class, Extension, Function, Module, Parameter, ParameterKind, Parameters


class Maker(NamedTuple):
    """A function that makes a method from a description."""

    is_async: bool = False
    events: str | None = None
    """Return type of the method if the description is one of events."""


MAKERS: Mapping[str, Maker] = {
    "_awaited": Maker(is_async=True),
    "awaited": Maker(is_async=True),
    "_streamed": Maker(events="AsyncGenerator[Event, None]"),
    "async_streamed": Maker(events="AsyncGenerator[Event, None]"),
    "blocking": Maker(),
    "done": Maker(),
    "blocking_generator": Maker(events="Generator[Event, None, None]"),
    "streamed": Maker(events="Generator[Event, None, None]"),
}
CLASSES = (
    "client.client.AsyncRolloutClient",
    "client.client.RolloutClient",
    "adapter.in_process.async_llm.AsyncLLM",
    "adapter.in_process.llm.LLM",
)
"""Classes with such methods. A class comes after the classes that it is made of."""
CONNECTION = "client.connection.Connection"
"""The class whose `__init__` the clients take over."""


class DescribedCalls(Extension):
    def __init__(self) -> None:
        self._words: list[tuple[Class, str, str]] = []
        """Methods that take another function's docstring: class, method, path of that function."""

    def on_class_members(self, *, node: Any, cls: Class, **_: Any) -> None:
        for statement in getattr(node, "body", ()):
            match statement:
                case ast.Assign(
                    targets=[ast.Attribute(value=ast.Name(id=method), attr="__doc__")],
                    value=ast.Attribute(value=source, attr="__doc__"),
                ):
                    self._words.append((cls, method, ast.unparse(source)))

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        for cls, method, source in self._words:
            if method in cls.members and (words := _found(source, cls, pkg)) is not None:
                cls[method].docstring = words.docstring
        for name in CLASSES:
            for member in list(pkg[name].members.values()):
                if isinstance(member, Attribute) and (made := _made(member, pkg)) is not None:
                    pkg[name].set_member(member.name, made)
        for name in CLASSES[:2]:
            pkg[name].set_member("__init__", copy(pkg[CONNECTION]["__init__"]))


def _made(attribute: Attribute, pkg: Module) -> Function | None:
    """The method that the attribute's value makes, or None if it makes none."""
    match ast.parse(str(attribute.value), mode="eval").body:
        case ast.Call(func=ast.Name(id=maker), args=[source]) if maker in MAKERS:
            described = _found(ast.unparse(source), attribute.parent, pkg)
            return None if described is None else _method(described, attribute, MAKERS[maker])
        case ast.Name(id=name):
            described = _found(name, attribute.module, pkg)
            return None if described is None else _method(described, attribute, MAKERS["awaited"])
    return None


def _found(path: str, scope: Any, pkg: Module) -> Function | None:
    """The function of this package that a name means in a scope, or None."""
    first, dot, rest = path.partition(".")
    try:
        found: Any = pkg[f"{scope.resolve(first)}{dot}{rest}".removeprefix(f"{pkg.path}.")]
    except Exception:  # a name of another package, or none
        return None
    found = found.final_target if found.is_alias else found
    return found if isinstance(found, Function) else None


def _method(described: Function, attribute: Attribute, maker: Maker) -> Function:
    method = Function(attribute.name, lineno=attribute.lineno, endlineno=attribute.endlineno)
    own = [each for each in described.parameters if each.name not in ("self", "client")]
    method.parameters = Parameters(Parameter("self", kind=ParameterKind.positional_or_keyword), *own)
    returns: Any = described.returns
    method.returns = maker.events or (returns.slice if str(returns).startswith("Call[") else returns)
    method.docstring = copy(described.docstring)
    if maker.is_async:
        method.labels.add("async")
    return method
