"""Test files that every supported vLLM runs without an engine: those that import vLLM, or a module that does."""

from pathlib import Path

from tests.needs import TESTS, closure, file_of, imported, imported_tests

FOLDERS = ("adapter", "kernel", "parts", "versions")


def tests_of_vllm() -> list[str]:
    """Paths below the repository's root, sorted."""
    files = sorted(path for folder in FOLDERS for path in (TESTS / folder).rglob("test_*.py"))
    return [path.relative_to(TESTS.parent).as_posix() for path in files if uses_vllm(path)]


def uses_vllm(path: Path) -> bool:
    """True if a test file, or a test module that it imports, imports vLLM or a module of ours that imports vLLM."""
    names = set().union(*map(imported, closure(path, imported_tests)))
    ours = {file_of(name) for name in names if name.startswith("vllm_rollout.")} - {None}
    return any(map(is_vllm, names)) or any(map(is_vllm, set().union(*map(imported, ours))))


def is_vllm(name: str) -> bool:
    return name.partition(".")[0] == "vllm"
