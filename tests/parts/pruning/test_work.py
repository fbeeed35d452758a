"""Work per candidate does not grow with the size of a group whose candidates are scored."""

import pytest

from tests.kernel.http.test_work import assert_work_by_candidates


@pytest.mark.thorough
def test_a_pruned_race_takes_work_by_its_candidates():
    assert_work_by_candidates({"pruning": {"detection_length": 4}}, (0.5, 0.5))
