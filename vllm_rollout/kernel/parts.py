"""The list of parts: capabilities beside the race, each in a folder of its own (`vllm_rollout/parts/`).

Every process reads the list. A part without a folder, and a part that is left out, is in no list. Nothing of it is
imported, and it costs nothing. A package of somebody else adds a part by an entry point of the group
`vllm_rollout.parts`.

Invariant: the kernel imports no part. It asks this list for faces by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Any

WITHOUT = "VLLM_ROLLOUT_WITHOUT"
"""Environment variable with the names of parts that are left out, separated by commas. `serve --without` sets it, and
every process of the server inherits it."""

ENTRY_POINTS = "vllm_rollout.parts"


@dataclass(frozen=True)
class Part:
    """One part. The `__init__` of a part's folder has it as `PART`, and imports nothing else."""

    name: str
    purpose: str
    """Its use for a user, in one sentence."""
    needs: tuple[str, ...] = ()
    """Names of the parts that it imports."""
    is_base: bool = False
    """True if it only serves other parts, before which it stands in the list. It needs none."""
    faces: Mapping[str, str] = field(default_factory=dict)
    """Face -> "module:attribute", which is imported where a process asks for the face."""
    exports: Mapping[str, str] = field(default_factory=dict)
    """Names that the package `vllm_rollout` offers -> "module:attribute"."""
    also_exports: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Names that the package offers only if another part is there: name of that part -> name -> "module:attribute"."""
    also: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Faces that the part has only if another part is there: name of that part -> face -> "module:attribute".

    Their files stand in the folder `with_NAME` of the part."""


@cache
def parts() -> tuple[Part, ...]:
    """The parts of this process: those that a part needs come before it, otherwise by name.

    Raises: ValueError for a name in `VLLM_ROLLOUT_WITHOUT` that no part has, and for a part whose need is left out.
    """
    return chosen(installed_parts(), left_out(os.environ.get(WITHOUT, "")))


def leave_out(names: str, said_by: str) -> None:
    """Leave these parts out of this process, and of each that it starts. `said_by`: what the user wrote, for errors.

    Raises: ValueError as `parts` does.
    """
    chosen(installed_parts(), left_out(names), said_by)
    os.environ[WITHOUT] = names
    parts.cache_clear()
    exports.cache_clear()


def chosen(installed: Mapping[str, Part], without: frozenset[str], said_by: str = WITHOUT) -> tuple[Part, ...]:
    """The parts that remain, in their order. Raises: ValueError as `parts` does."""
    if unknown := sorted(without - installed.keys()):
        raise ValueError(
            f"{said_by}: there is no part {unknown[0]!r}. Leave out some of: {', '.join(sorted(installed))}."
        )
    there = {name: part for name, part in sorted(installed.items()) if name not in without}
    for part in there.values():
        if missing := [need for need in part.needs if need not in there]:
            raise ValueError(
                f"{said_by}: the part {part.name!r} needs {missing[0]!r}, which is left out. Leave out none of them, "
                f"or all: {','.join(sorted(_with_dependents(without | {missing[0]}, installed) & installed.keys()))}."
            )
    order = [name for name, part in there.items() if part.is_base]
    sorter = TopologicalSorter({name: {*part.needs} - {*order} for name, part in there.items() if not part.is_base})
    try:
        sorter.prepare()
    except CycleError as error:
        raise ValueError(f"parts need each other in a circle: {' -> '.join(error.args[1])}") from None
    while sorter.is_active():
        order += sorted(ready := sorter.get_ready())
        sorter.done(*ready)
    return tuple(there[name] for name in order)


def _with_dependents(names: frozenset[str], installed: Mapping[str, Part]) -> frozenset[str]:
    """These parts, and all that need one of them."""
    needing = {part.name for part in installed.values() if not names.isdisjoint(part.needs)}
    return names if needing <= names else _with_dependents(names | needing, installed)


def left_out(names: str) -> frozenset[str]:
    return frozenset(name for each in names.split(",") if (name := each.strip()))


def has(name: str) -> bool:
    """True if this part is there."""
    return any(part.name == name for part in parts())


def faces(face: str) -> Iterator[tuple[str, Any]]:
    """Name of each part with this face, and the face, in the order of the parts.

    A face that needs two parts comes after those of both.
    """
    for name, reference in _references(face):
        yield name, load(reference)


def face(name: str, face: str) -> Any | None:
    """This face of one part. None if the part is not there, or has no such face."""
    return next((load(reference) for part, reference in _references(face) if part == name), None)


def _references(face: str) -> Iterator[tuple[str, str]]:
    there: dict[str, Part] = {}
    for part in parts():
        there[part.name] = part
        if (reference := part.faces.get(face)) is not None:
            yield part.name, reference
        for one in there.values():
            for other, its in one.also.items():
                if face in its and other in there and part.name in (one.name, other):
                    yield one.name, its[face]


def faces_left_out(face: str) -> Iterator[tuple[str, Any]]:
    """Each face that is not there, with the name of the part whose absence is the reason."""
    installed = installed_parts()
    for part in installed.values():
        for other, its in ((part.name, part.faces), *part.also.items()):
            gone = [name for name in (part.name, other) if name in installed and not has(name)]
            if gone and other in installed and face in its:
                yield gone[0], load(its[face])


@cache
def exports() -> Mapping[str, str]:
    """Names that parts offer as names of the package -> "module:attribute"."""
    offered = [part.exports for part in parts()]
    offered += [names for part in parts() for other, names in part.also_exports.items() if has(other)]
    return {name: reference for names in offered for name, reference in names.items()}


def load(reference: str) -> Any:
    """The object at "module:attribute"."""
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute) if attribute else import_module(module)


def installed_parts() -> Mapping[str, Part]:
    folder = import_module("vllm_rollout.parts")  # `from vllm_rollout import` would ask this list for names
    names = [module.name for module in iter_modules(folder.__path__) if module.ispkg]
    ours = [import_module(f"{folder.__name__}.{name}").PART for name in names]
    theirs = [point.load() for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name)]
    return {part.name: part for part in [*ours, *theirs]}
