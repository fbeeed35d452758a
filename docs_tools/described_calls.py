"""Griffe extension for methods made from the description of a call, such as `rollout = awaited(calls.rollout)`.

Invariant: a method has the name, arguments and words that `help` shows for it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any, NamedTuple

from griffe import Attribute, Class, Extension, Function, Module, Parameter, ParameterKind, Parameters


class Maker(NamedTuple):
    """A function that makes a method from a description."""

    is_async: bool = False
    events: str | None = None
    """Return type of the method if the description is one of events."""


MAKERS: Mapping[str, Maker] = {
    "awaited": Maker(is_async=True),
    "async_streamed": Maker(events="AsyncGenerator[Event, None]"),
    "blocking": Maker(),
    "done": Maker(),
    "blocking_generator": Maker(events="Generator[Event, None, None]"),
    "streamed": Maker(events="Generator[Event, None, None]"),
}
CLIENTS = ("AsyncRolloutClient", "RolloutClient")
"""Classes of the package's stub, which only names the classes that have their methods."""
OTHERS = ("parts.rounds.client.run.AsyncRun", "parts.in_process.api.async_llm.AsyncLLM", "parts.in_process.api.llm.LLM")
"""Classes some of whose methods need another part. These stand in the first of their bases."""
CONNECTION = "kernel.client.connection.Connection"
"""The class whose words the `__init__` of the clients takes over."""


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
        for cls in _classes(pkg):
            for member in list(cls.members.values()):
                _made(member, pkg)
        for name in CLIENTS:
            pkg[name]["__init__"].docstring = pkg[CONNECTION]["__init__"].docstring
            _take_over(pkg[name], pkg[name].resolved_bases)
        for name in OTHERS:
            _take_over(pkg[name], pkg[name].resolved_bases[0].resolved_bases)


def _take_over(cls: Class, bases: list[Class]) -> None:
    """Show the methods of these classes as those of the class."""
    for method in (member for base in reversed(bases) for member in base.members.values()):
        if isinstance(method, Function) and not method.name.startswith("_"):
            cls.set_member(method.name, copy(method))


def _classes(module: Module) -> Iterator[Class]:
    yield from (cls for cls in module.classes.values() if not cls.is_alias)
    for each in module.modules.values():
        if not each.is_alias:
            yield from _classes(each)


def _made(member: Any, pkg: Module) -> Function | None:
    """The method that a member of a class is. A call of a maker is replaced by the method that it makes."""
    if isinstance(member, Function):
        return member
    if not isinstance(member, Attribute) or not isinstance(member.parent, Class) or member.value is None:
        return None
    match ast.parse(str(member.value), mode="eval").body:
        case ast.Call(func=ast.Name(id=name), args=[source]) if name in MAKERS:
            described, maker = _found(ast.unparse(source), member.module, pkg), MAKERS[name]
        case ast.Name(id=source):
            described, maker = _found(source, member.module, pkg), MAKERS["awaited"]
        case _:
            return None
    if described is not None:
        member.parent.set_member(member.name, method := _method(described, member, maker))
        return method
    return None


def _found(path: str, scope: Any, pkg: Module) -> Function | None:
    """The function of this package that a name means in a scope, or None."""
    first, dot, rest = path.partition(".")
    try:
        found: Any = pkg[f"{scope.resolve(first)}{dot}{rest}".removeprefix(f"{pkg.path}.")]
    except Exception:  # a name of another package, or none
        return None
    return _made(found.final_target if found.is_alias else found, pkg)


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
