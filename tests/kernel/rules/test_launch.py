"""Start of groups: in order, and as many as there are places."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.kernel.rules.launch import Asker, LaunchWindow, Turn, num_launch_places


def test_several_api_processes_share_what_waits_and_each_fills_the_ranks_alone():
    assert num_launch_places(64, 1, 1) == 128
    assert num_launch_places(64, 4, 1) == 512
    assert num_launch_places(64, 1, 4) == 80
    assert num_launch_places(1, 1, 4) == 2


SIZES = st.lists(st.tuples(st.integers(1, 20), st.integers(-1, 1)), min_size=1, max_size=20)
"""Candidates and priority of each group."""


@given(st.integers(1, 16), SIZES, st.integers(0, 2**32))
def test_every_group_starts_once_in_order_and_all_places_come_back(
    num_places: int, sizes: list[tuple[int, int]], seed: int
):
    rng = Random(seed)
    window = LaunchWindow(num_places)
    to_ask, waiting, running, started = list(sizes), [], [], []
    withdrawn = set()
    while to_ask or waiting or running:
        match rng.choice(("ask", "end", "withdraw")):
            case "ask" if to_ask:
                num_candidates, priority = to_ask.pop()
                waiting.append(window.ask(num_candidates, Asker(priority)))
                waiting.sort(key=lambda turn: turn.asker.priority)
            case "end" if running:
                turn = running.pop(rng.randrange(len(running)))
                window.release(turn.num_candidates)
            case "withdraw" if waiting and rng.random() < 0.2:
                turn = waiting.pop(rng.randrange(len(waiting)))
                withdrawn.add(turn)
                window.withdraw(turn)
        for turn in window.admit():
            assert turn == waiting.pop(0)
            running.append(turn)
            started.append(turn)
        assert window.num_taken == sum(turn.num_candidates for turn in running)
        assert window.num_taken <= num_places or len(running) == 1
        if waiting:
            assert running, "nobody waits for nothing"
            assert window.num_taken + waiting[0].num_candidates > num_places, "nobody waits where there is room"
    assert len(started) + len(withdrawn) == len(sizes)
    assert (window.num_taken, window.num_waiting) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_a_source_and_rollouts_take_turns_whoever_comes_and_leaves(seed: int) -> None:
    """Groups of a source start in their order. A rollout waits for each source once, and for rollouts before it."""
    rng = Random(seed)
    window = LaunchWindow(1)
    window.ask(1)
    started, asked, waiting = window.admit(), dict[Turn, int](), list[Turn]()
    for _ in range(400):
        match rng.choice(("ask", "ask", "end", "end", "withdraw")):
            case "ask" if len(waiting) < 40:
                waiting.append(window.ask(1, Asker(rng.randrange(-1, 1), rng.choice(["a", "b", None]))))
                asked[waiting[-1]] = len(started)
            case "withdraw" if waiting:
                window.withdraw(waiting.pop(rng.randrange(len(waiting))))
            case "end" if window.num_taken:
                window.release(1)
                for turn in window.admit():
                    waiting.remove(turn)
                    started.append(turn)
        assert window.num_waiting == len(waiting)
    for asker in {turn.asker for turn in asked}:
        its = [turn for turn in started[1:] if turn.asker == asker]
        assert its == [turn for turn in asked if turn in its]
    for turn in (turn for turn in started[1:] if turn.asker.source is None):
        before = [each.asker for each in started[asked[turn] : started.index(turn)]]
        assert all(before.count(Asker(turn.asker.priority, source)) <= 1 for source in "ab")


@pytest.mark.parametrize("num_others", [1, 3])
def test_a_source_does_not_wait_for_rollouts_that_never_end(num_others: int) -> None:
    window, feed = LaunchWindow(1), Asker(source="feed")
    window.ask(1)
    window.admit()
    for _ in range(20):
        window.ask(1, feed)
    withdrawn = [window.ask(1, feed) for _ in range(20)]
    for _ in range(num_others):
        window.ask(1)
    for turn in withdrawn:
        window.withdraw(turn)
    started = []
    for _ in range(100):
        window.release(1)
        started += [turn.asker.source for turn in window.admit()]
        window.ask(1, feed if started[-1] else Asker())
    assert started == [*["feed", *[None] * num_others] * 100][:100]
