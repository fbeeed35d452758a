"""The cost of checks of a group's data, which may be any JSON."""

import pytest

from tests.kernel.http.test_body import assert_memory, shapes
from vllm_rollout.parts.sessions.http.body import SessionGroupRequest


@pytest.mark.parametrize(("name", "shape"), list(shapes()), ids=lambda value: value if isinstance(value, str) else "")
def test_a_check_of_a_group_takes_memory_by_the_length_of_its_body(name, shape):
    assert_memory(shape, lambda: SessionGroupRequest.model_validate({"group_id": "g", "group_size": 1, "data": shape}))
