from vllm_rollout.group.prompt_key import digest_of, seed_for


def test_a_digest_names_token_ids_by_their_content_and_order():
    assert digest_of([1, 2, 3]) == digest_of((1, 2, 3))
    names = [digest_of(token_ids) for token_ids in ([1, 2, 3], [3, 2, 1], [1, 2], [123], [])]
    assert len(set(names)) == len(names)
    assert all(len(name) == 24 for name in names)


def test_the_seed_of_a_prompt_depends_on_seed_and_content_only():
    assert seed_for(7, [1, 2]) == seed_for(7, (1, 2))
    seeds = [seed_for(7, [1, 2]), seed_for(8, [1, 2]), seed_for(7, [2, 1]), seed_for(-7, [1, 2])]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**62 for seed in seeds)
