"""The emulated clock of the stream trainer's benchmark, and its gradients."""

import pytest

from benchmarks.stream_training import end_of_queue, policy, raced, train_both_ways


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
