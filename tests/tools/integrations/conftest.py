"""Integrations are tested against the app around a FakeEngine, over a socket, and without the trainer's packages."""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType

import pytest

from tests.kernel.http.conftest import app, client, engine, server_url  # noqa: F401
from tests.parts.sessions.turns import turns, url  # noqa: F401

Beside = Callable[[str, Mapping[str, Mapping[str, object]]], ModuleType]


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Beside]:
    """Imports one of our modules where another project's modules have these names, and no others."""
    imported = []

    def imports(ours: str, theirs: Mapping[str, Mapping[str, object]]) -> ModuleType:
        for path, names in theirs.items():
            parts = path.split(".")
            for package in (".".join(parts[:end]) for end in range(1, len(parts))):
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
            module = ModuleType(path)
            vars(module).update(names)
            monkeypatch.setitem(sys.modules, path, module)
        monkeypatch.delitem(sys.modules, ours, raising=False)
        imported.append(ours)
        return importlib.import_module(ours)

    yield imports
    for ours in imported:
        del sys.modules[ours]
