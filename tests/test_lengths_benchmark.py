"""What `benchmarks.lengths` shows to a history, and what it says of it."""

import pytest

from benchmarks import lengths
from benchmarks.lengths import Case, cases, measure, observe, summary, table


def test_a_group_stops_when_so_many_have_finished_and_at_the_cap():
    drawn = [50, 10, 40, 20, 30]
    assert observe(drawn, 2, None) == [(10, False), (20, False), (20, True), (20, True), (20, True)]
    assert observe(drawn, None, None) == [(length, False) for length in (10, 20, 30, 40, 50)]
    assert observe(drawn, None, 35) == [(10, False), (20, False), (30, False), (35, True), (35, True)]
    assert observe(drawn, 4, 35) == observe(drawn, None, 35)


def test_there_is_a_case_of_every_kind():
    assert len(set(cases())) == 32


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lengths, "NUM_TRUE", 5000)


def test_errors_are_against_the_lengths_as_they_run(quick):
    rows = [measure(Case("gamma(3)", 0.5, True, 0.0), 60, seed) for seed in range(2)]
    for row in rows:
        for name in ("fit", "shape"):
            assert row[name]["rho_error"] == pytest.approx(row[name]["rho"] / row["rho"] - 1)
        assert abs(row["shape"]["rho_error"]) < 0.15, "half of the groups run to their ends"
    assert rows[0] == measure(Case("gamma(3)", 0.5, True, 0.0), 60, 0), "the same for the same seed"
    found = summary(Case("gamma(3)", 0.5, True, 0.0), rows)
    errors = sorted(row["shape"]["rho_error"] for row in rows)
    assert [found["shape_rho_error"][which] for which in ("least", "most")] == errors
    assert "| gamma(3) | 50% | 90 % | 0 |" in table([found])
