"""The tool that leaves parts out: what goes with a part, what is checked, and that the list of the day comes round."""

from datetime import date, timedelta
from pathlib import Path

import pytest

from tests import without
from tests.without import (
    affected_tests,
    imports_of_what_is_gone,
    of_the_day,
    tools_with,
    typed_files,
    with_dependents,
)


@pytest.fixture
def write(tmp_path: Path):
    """Writes a file of a copy."""

    def write(name: str, text: str = "") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_every_part_has_its_day():
    days = [of_the_day("abcde", 2, date(2026, 1, 1) + timedelta(number)) for number in range(5)]
    assert all(len(set(day)) == 2 for day in days)
    assert sorted(name for day in days for name in day) == sorted("abcde" * 2)
    assert sorted(of_the_day("abcde", 9, date(2026, 1, 1))) == list("abcde")


def test_a_part_goes_with_those_that_need_it():
    assert with_dependents(["sessions"]) == ["sessions", "trainers"]
    assert with_dependents(["trainers"]) == ["trainers"]


def test_an_import_of_what_is_gone_is_found_wherever_it_stands(tmp_path, write):
    write("vllm_rollout/kernel/a.py", "if TYPE_CHECKING:\n    from vllm_rollout.parts.gone.rules import X")
    write("vllm_rollout/kernel/b.py", "def f():\n    from vllm_rollout.parts import gone")
    write("vllm_rollout/kernel/c.py", "from vllm_rollout.parts.gone_not.rules import X")
    assert imports_of_what_is_gone(tmp_path / "vllm_rollout", ["gone"]) == [
        "vllm_rollout/kernel/a.py: vllm_rollout.parts.gone.rules.X",
        "vllm_rollout/kernel/b.py: vllm_rollout.parts.gone",
    ]


def test_a_tool_that_imports_a_part_goes_with_it(tmp_path, write, monkeypatch):
    monkeypatch.setattr(without, "ROOT", tmp_path)
    for name in ("kernel/a.py", "parts/one/b.py", "gauge/c.py", "stays/d.py"):
        write(f"vllm_rollout/{name}", "" if "stays" in name else "from vllm_rollout.parts.gone import rules")
    assert [path.name for path in tools_with(["gone"])] == ["gauge"]


def test_types_are_checked_of_the_files_that_are_left(tmp_path, write):
    files = ["vllm_rollout/kernel/rules", "vllm_rollout/parts/*/rules*", "vllm_rollout/parts/gone/http"]
    write("pyproject.toml", f"[tool.mypy]\nfiles = {files}")
    write("vllm_rollout/kernel/rules/__init__.py")
    write("vllm_rollout/parts/one/rules.py")
    assert typed_files(tmp_path) == ["vllm_rollout/kernel/rules", "vllm_rollout/parts/one/rules.py"]


def test_tests_run_that_reach_the_list_of_parts(tmp_path, write):
    write("vllm_rollout/kernel/parts.py")
    write("vllm_rollout/kernel/asks.py", "from vllm_rollout.kernel.parts import faces")
    write("vllm_rollout/kernel/rules.py", "import math")
    write("vllm_rollout/parts/one/__init__.py", "from vllm_rollout.kernel.parts import Part")
    write("vllm_rollout/parts/one/rules.py")
    asks = write("tests/kernel/test_asks.py", "from vllm_rollout.kernel import asks")
    write("tests/kernel/test_rules.py", "from vllm_rollout.kernel.rules import x\nimport vllm_rollout.parts.one.rules")
    through = write("tests/tools/test_through.py", "from tests.support.helper import x")
    write("tests/support/helper.py", "def x():\n    from vllm_rollout.kernel.asks import f")
    write("tests/parts/conftest.py", "from vllm_rollout.kernel.asks import f\n\ndef given(): ...")
    below = write("tests/parts/one/test_below.py", "def test_below(given): ...")
    write("tests/parts/one/test_beside.py", "def test_beside(tmp_path): ...")
    of_the_list = write("tests/test_parts.py", "from vllm_rollout.kernel import parts")
    write("tests/test_architecture.py")
    assert affected_tests(tmp_path) == [asks, below, through, of_the_list]
