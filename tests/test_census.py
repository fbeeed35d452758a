"""Counts of `make census` for a project of a few lines."""

import pytest

from tests.census import census

FILES = {
    "vllm_rollout/__init__.py": '"""A package."""\n',
    "vllm_rollout/top.py": "from vllm_rollout.low import a, b\n\n\ndef first():\n    return a\n",
    "vllm_rollout/low/a.py": "import typing\nfrom .b import one\nif typing.TYPE_CHECKING:\n    from ..top import two\n",
    "vllm_rollout/low/b.py": "one = 1\n",
    "tests/test_a.py": "def test_a(self):\n    self._mine = a._y\n    a.__init__\n\n\ndef test_b():\n    a.b\n",
    "tests/test_b.py": "try:\n    a.b\nexcept E as error:\n    error.c\n",
    "docs/contributing/architecture.md": (
        "\n## The journey of a reward\n\n| `top.py::f` | `low/a.py`, `low/a.py::x` |\n\n`b.py`\n"
    ),
}
LONG = """{kind} {name}({x}):
    "{name} is."
    {x} = {x} + 1
    if {x}:
        {x}.{say}({x}, kind={x}.kind)
    {x}.{say}.b = [{x}.c for {x} in {x}.{say}]
    while {x}.d and {x}.e:
        {x}.{say}({x}, {x}.f, {x}.g[{x}])
"""


@pytest.fixture
def project(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_files_and_statements_are_counted_without_docstrings(project):
    parts = census(project)["parts"]
    assert parts["vllm_rollout"] == {"files": 4, "lines": 11, "statements": 8}
    assert parts["docs"] == {"files": 1, "lines": 6, "words": 13}
    assert parts["conformance"] == {"files": 0, "lines": 0, "statements": 0}


def test_a_room_has_units_floors_and_arrows(project):
    rooms = census(project)["rooms"]
    assert rooms["vllm_rollout"] == {"files": 4, "units": 2, "floors": 1, "arrows": 2}
    assert rooms["vllm_rollout/low"] == {"files": 2, "units": 2, "floors": 2, "arrows": 1}


def test_a_circle_that_type_checkers_see_is_told_from_one_at_run_time(project):
    circle = ["vllm_rollout/low/a.py", "vllm_rollout/top.py"]
    assert census(project)["circles"] == {"with types": [circle], "at run time": []}


def test_a_journey_passes_the_files_of_its_table(project):
    hops = census(project)["hops"]
    assert hops["reward"] == ["top.py", "low/a.py"]
    assert hops["candidate"] == []


def test_twins_differ_in_names_only(project):
    one = LONG.format(kind="def", name="f", x="x", say="say")
    two = LONG.format(kind="async def", name="g", x="y", say="say")
    other = LONG.format(kind="def", name="h", x="z", say="ask")
    (project / "vllm_rollout" / "low" / "b.py").write_text("\n".join([one, two, other]))
    assert census(project)["twins"] == [("vllm_rollout/low/b.py::f:1", "vllm_rollout/low/b.py::g:10")]


def test_what_tests_touch_of_others_privates(project):
    assert census(project)["privates"] == {"lines": 1, "tests": 1}
