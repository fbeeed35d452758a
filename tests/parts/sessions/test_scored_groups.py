"""Fields of pruning that no group of sessions can have."""

import pytest

from tests.parts.sessions.test_sessions import message


@pytest.mark.parametrize(
    ("pruning", "said"),
    [
        ({"detection_length": [8, 16]}, "sessions are scored at one length"),
        ({"detection_length": 8, "min_survival": 0.9}, "pruning.min_survival"),
    ],
)
async def test_what_no_scored_group_can_be_is_refused(http, pruning, said):
    response = await http.post("/v1/groups", json={"group_size": 1, "pruning": pruning})
    assert (response.status_code, said in message(response)) == (400, True), message(response)
