"""The emulated clock of the stream trainer's benchmark, and what it counts."""

import pytest
import torch

from benchmarks.stream_training import (
    GROUPS_AT_ONCE,
    PROMPT_TOKENS,
    IncrementalLogprobs,
    candidates_of,
    counted_activations,
    end_of_queue,
    overlapped,
    policy,
    raced,
    train_both_ways,
    whole_logprobs,
)


@pytest.mark.parametrize(
    ("arrivals", "seconds", "start", "end"),
    [([1, 2, 9], [1, 1, 1], 0, 10), ([1, 1, 1], [2, 2, 2], 0, 7), ([1, 2], [1, 1], 5, 7), ([], [], 3, 3)],
)
def test_a_piece_starts_when_it_has_come_and_the_one_before_is_done(arrivals, seconds, start, end):
    assert end_of_queue(arrivals, seconds, start) == end


def test_the_first_to_end_come_back_and_the_others_stop_then():
    group = raced([9, 3, 7, 5], 2)
    assert (group.lengths, group.stopped, group.ends_at) == ([3, 5], [5, 5], 5)


def test_both_ways_of_training_have_the_same_gradient():
    found = train_both_ways([raced([4, 6], 2), raced([3, 9, 30], 2)], policy(), 1)
    assert found["difference"] < 1e-5
    assert len(found["add_s"]) == 2


@pytest.mark.parametrize("pass_tokens", [1, 10**6])
def test_overlapped_passes_give_what_comes_back_and_count_what_was_stopped(pass_tokens):
    model, candidates = policy(), candidates_of([raced([5, 8], 2), raced([3, 40], 1)])
    assert len(candidates) <= GROUPS_AT_ONCE
    way, found = overlapped(candidates, IncrementalLogprobs(model), pass_tokens, rollout_s=1e6)
    returned = [each for each in candidates if each.returned]
    assert found.keys() == {each.key for each in returned}
    for each in returned:
        torch.testing.assert_close(found[each.key], whole_logprobs(model, [each])[0], rtol=1e-4, atol=1e-4)
    assert way.cache_bytes > 0
    assert way.num_dropped == (0 if pass_tokens > 1 else PROMPT_TOKENS + 3 - 2)


def test_activations_are_counted_once_and_without_the_weights():
    weight = torch.nn.Linear(3, 3, bias=False)
    given = torch.ones(5, 3)
    with counted_activations(weight) as saved:
        weight(given).sum()
        weight(given).sum()
    assert saved["bytes"] == given.nbytes
