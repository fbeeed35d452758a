import pytest

from vllm_rollout.kernel.rules.prompt_key import (
    MAX_KEPT_BYTES,
    digest_of,
    history_key,
    joined_id,
    kept_name,
    num_bytes,
    seed_for,
)


def test_a_digest_names_token_ids_by_their_content_and_order():
    assert digest_of([1, 2, 3]) == digest_of((1, 2, 3))
    names = [digest_of(token_ids) for token_ids in ([1, 2, 3], [3, 2, 1], [1, 2], [123], [])]
    assert len(set(names)) == len(names)
    assert all(len(name) == 24 for name in names)


def test_a_prompt_is_known_by_its_id_and_without_one_by_its_tokens():
    assert history_key("q1", [1, 2]) == history_key("q1", [3]) == "id:q1"
    assert history_key(None, [1, 2]) == f"tokens:{digest_of([1, 2])}"


def test_the_seed_of_a_prompt_depends_on_seed_and_content_only():
    one, other = digest_of([1, 2]), digest_of([2, 1])
    assert seed_for(7, one) == seed_for(7, digest_of([1, 2]))
    seeds = [seed_for(7, one), seed_for(8, one), seed_for(7, other), seed_for(-7, one)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**62 for seed in seeds)


def test_no_candidate_of_another_prompt_or_step_has_the_same_seed():
    drawn = [seed_for(step, str(prompt)) + i for step in range(-2, 40) for prompt in range(40) for i in range(32)]
    assert len(set(drawn)) == len(drawn)


def test_a_joined_group_is_another_one_in_another_run_for_another_prompt_or_adapter():
    content = digest_of([1, 2])
    ids = [
        joined_id("", "q1", content, ""),
        joined_id("run", "q1", content, ""),
        joined_id("", "q2", content, ""),
        joined_id("", "q1", digest_of([1]), ""),
        joined_id("", "q1", content, "sql"),
        joined_id("q1", "", content, ""),
        joined_id("\ud800", "é", content, ""),
        joined_id("", 1, content, ""),
        joined_id("", "1", content, ""),
    ]
    assert len(set(ids)) == len(ids)
    assert ids[0] == joined_id("", "q1", digest_of((1, 2)), "")
    assert all(id.startswith("joined:") and "-" not in id for id in ids)


@pytest.mark.parametrize("name", ["", "q1", "é" * 64, "x" * 256])
def test_a_small_name_is_remembered_as_it_is(name):
    assert kept_name(name) == name
    assert history_key(name, ()) == f"id:{name}"


@pytest.mark.parametrize("name", ["x" * 257, "x" * 2**20, "x" * 64 + "漢", "漢" * 256, "\ud800" * 65])
def test_a_large_name_is_remembered_by_its_digest(name):
    kept = kept_name(name)
    assert num_bytes(kept) <= MAX_KEPT_BYTES < num_bytes(name)
    assert kept == kept_name(kept) == history_key(name, ())
    assert kept not in {kept_name(other) for other in (name[1:], name[:-1] + "y", name + "x")}
