"""Extension of Griffe: methods of our clients that are made of a description, `rollout = _awaited(calls.rollout)`.

Each has the name, arguments and words of what it is made of, as at run time.
"""

from __future__ import annotations

import ast
from copy import copy
from typing import Any

from griffe import Attribute, Class, Extension, Function, Module, Parameter, ParameterKind, Parameters

MAKERS = {"_awaited": "async", "_streamed": "", "blocking": "", "blocking_generator": ""}
"""Function that makes a method -> what the method is."""
EVENTS = {"_streamed": "AsyncGenerator[Event, None]", "blocking_generator": "Generator[Event, None, None]"}


class DescribedCalls(Extension):
    def __init__(self) -> None:
        self.words: list[tuple[Class, str, str]] = []
        """Methods whose docstring is another function's: class, method, the function."""

    def on_class_members(self, *, node: Any, cls: Class, **_: Any) -> None:
        for statement in getattr(node, "body", ()):
            match statement:
                case ast.Assign(
                    targets=[ast.Attribute(value=ast.Name(id=method), attr="__doc__")],
                    value=ast.Attribute(value=source, attr="__doc__"),
                ):
                    self.words.append((cls, method, ast.unparse(source)))

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        client = pkg["client.client"]
        for name in ("AsyncRolloutClient", "RolloutClient"):
            for member in list(client[name].members.values()):
                if isinstance(member, Attribute) and (made := _made(member, pkg)) is not None:
                    client[name].set_member(member.name, made)
        for cls, method, source in self.words:
            if (words := _found(source, cls, pkg)) is not None and method in cls.members:
                cls[method].docstring = words.docstring


def _made(attribute: Attribute, pkg: Module) -> Function | None:
    """The method that the attribute's value makes."""
    try:
        value = ast.parse(str(attribute.value), mode="eval").body
    except SyntaxError:
        return None
    match value:
        case ast.Call(func=ast.Name(id=maker), args=[source]) if maker in MAKERS:
            found = _found(ast.unparse(source), attribute.parent, pkg)
            if isinstance(found, Attribute):
                found = _made(found, pkg)
            return None if found is None else _method(found, attribute, maker)
        case ast.Name():
            found = _found(ast.unparse(value), attribute.parent.module, pkg)
            return None if found is None else _method(found, attribute, "_awaited")
    return None


def _found(path: str, scope: Any, pkg: Module) -> Any:
    """What a name means in a scope: a function of our package, or None."""
    try:
        full = scope.resolve(path.partition(".")[0]) + "".join(path.partition(".")[1:])
        found: Any = pkg[full.removeprefix(f"{pkg.path}.")]
        return found.final_target if found.is_alias else found
    except (KeyError, AttributeError, Exception):  # noqa: BLE001
        return None


def _method(described: Function, attribute: Attribute, maker: str) -> Function:
    method = Function(attribute.name, lineno=attribute.lineno, endlineno=attribute.endlineno, parent=attribute.parent)
    own = [each for each in described.parameters if each.name not in ("self", "client")]
    method.parameters = Parameters(Parameter("self", kind=ParameterKind.positional_or_keyword), *own)
    returns = described.returns
    if returns is not None and str(returns).startswith("Call["):
        returns = returns.slice
    method.returns = EVENTS.get(maker, returns)
    method.docstring = copy(described.docstring)
    if MAKERS[maker] == "async":
        method.labels.add("async")
    return method
