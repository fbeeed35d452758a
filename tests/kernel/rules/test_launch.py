"""Start of groups: in order, and as many as there are places."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.kernel.rules.launch import LaunchWindow, num_launch_places


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
                waiting.append(window.ask(*to_ask.pop()))
                waiting.sort(key=lambda turn: turn.priority)
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
