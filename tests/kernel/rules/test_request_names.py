"""A group is found by the names of its own request, and by no others."""

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.kernel.rules.prompt_key import joined_id, kept_name
from vllm_rollout.kernel.rules.request_names import CHOSEN, names_of_group, names_of_request, rollout_id

IDS = st.from_regex(CHOSEN, fullmatch=True)


def finds(id: str, group_id: str) -> bool:
    return not names_of_request(id).isdisjoint(names_of_group(group_id))


def made(request_id: str) -> str:
    """Name of a request as the engine client makes it."""
    return f"{kept_name(request_id)}-{uuid.uuid4().hex[:8]}"


@given(id=IDS, other=IDS)
def test_a_request_finds_its_own_group(id, other):
    for request_id in (id, f"chatcmpl-{id}", "x" * 5_000):
        assert finds(request_id, made(request_id))
        assert not finds(request_id, made(f"{request_id}-{other}")) or request_id.startswith("cmpl-")


@given(id=IDS, position=st.integers(0, 300))
def test_an_answer_finds_the_groups_of_all_its_prompts(id, position):
    group_id = made(f"cmpl-{id}-{position}")
    assert finds(f"cmpl-{id}", group_id)
    assert finds(f"cmpl-{id}-{position}", group_id)


@given(chosen=IDS, position=st.integers(0, 99_999_999))
def test_a_rollout_is_found_by_its_id_and_by_what_its_client_called_it(chosen, position):
    id = rollout_id(chosen)
    for group_id in (f"{id}-{position}", f"{id}-{position}+3"):
        assert finds(id, group_id)
        assert finds(chosen, group_id)
        assert not finds(rollout_id(chosen), group_id)


@pytest.mark.parametrize("chosen", [None, "", "a/b", "ü", "a" * 65, "../x", "a b"])
def test_what_does_not_fit_into_a_path_is_not_in_the_id(chosen):
    id = rollout_id(chosen)
    assert len(id) == len("rollout-") + 32
    assert finds(id, f"{id}-0")


def test_groups_that_are_joined_are_found_by_nobody():
    assert names_of_group(joined_id("", "a", "b", "")) == set()


def test_a_group_of_a_part_is_found_by_its_name_alone():
    name = f"sessions-{uuid.uuid4().hex}"
    for group_id in (name, f"{name}-scored"):
        assert finds(name, group_id)
        assert not finds(f"sessions-{uuid.uuid4().hex}", group_id)
