"""The table of the parts that tests need agrees with what the tests import."""

from pathlib import Path

import pytest

from tests import needs
from tests.needs import NEEDS, TESTS, imported_parts, left_out, own, row

FILES = sorted(TESTS.rglob("*.py"))


def below(folder: str) -> list[Path]:
    return [path for path in FILES if path.is_relative_to(TESTS / folder)]


def test_engine_tests_import_what_is_written_down():
    tests = [path for path in below("engine") if path.name.startswith("test_")]
    missing = {path: imported_parts(path).difference(row(path)) for path in tests}
    assert {path: names for path, names in missing.items() if names} == {}


def test_tests_of_the_kernel_need_no_part():
    assert {path: names for path in below("kernel") if (names := needs.needs(path))} == {}


def test_every_row_is_of_a_file():
    """A part that was removed took its tests along."""
    there = [file for file in NEEDS if not own(TESTS / file) or (TESTS / "parts" / own(TESTS / file)[0]).exists()]
    assert [file for file in there if not (TESTS / file).exists()] == []


@pytest.fixture
def tests(tmp_path, monkeypatch):
    """A folder of made-up tests."""
    files = {
        "kernel/conftest.py": "",
        "kernel/test_alone.py": "import vllm_rollout.kernel.rules",
        "kernel/test_helped.py": "from tests.parts.fleet.helper import a",
        "parts/fleet/helper.py": "from vllm_rollout.parts.drafts.rules import b",
        "parts/page/test_own.py": "",
        "parts/rounds/conftest.py": "from vllm_rollout.parts.page.http.page import c",
        "parts/rounds/test_below.py": "",
        "engine/test_listed.py": "",
    }
    for name, source in files.items():
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).write_text(source)
    monkeypatch.setattr(needs, "TESTS", tmp_path / "tests")
    monkeypatch.setattr(needs, "NEEDS", {"engine/test_listed.py": ("page",)})
    return tmp_path / "tests"


def test_what_is_left_out_without_a_part(tests):
    def without(*names: str) -> list[str]:
        return [path.relative_to(tests).as_posix() for path in left_out(*names)]

    assert without("drafts") == ["kernel/test_helped.py"]
    assert without("page") == ["engine/test_listed.py", "parts/page/test_own.py", "parts/rounds"]
    assert without("rounds", "page") == without("page")
    assert without("shaping") == [
        "engine/test_listed.py",
        "kernel/test_helped.py",
        "parts/page/test_own.py",
        "parts/rounds",
    ]
