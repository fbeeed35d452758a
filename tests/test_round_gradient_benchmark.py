"""The gradient of length that selection puts into rounds, against its closed form."""

from math import sqrt

import pytest

from benchmarks import round_gradient
from benchmarks.round_gradient import Setting, run


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(round_gradient, "ROUNDS", 60)


@pytest.mark.parametrize(
    ("setting", "correlation"),
    [(Setting(1.0, 1.0), -0.5), (Setting(1.25, 1.0, True), -0.5), (Setting(1.0, 1.25), 0.0)],
)
def test_there_is_none_where_all_come_back_or_length_tells_nothing(setting, correlation):
    assert run(setting, correlation, 0)["length"] == pytest.approx(0, abs=0.03)


@pytest.mark.parametrize("correlation", [-0.5, 0.5])
def test_the_first_half_of_twice_as_many_have_as_much_as_normal_lengths_say(correlation):
    removed = 0.64  # of the variance within a group, by the first 8 of 16
    expected = -correlation * sqrt(1 - correlation**2) * removed / (1 - correlation**2 * removed)
    assert run(Setting(1.0, 2.0), correlation, 0)["length"] == pytest.approx(expected, abs=0.03)
