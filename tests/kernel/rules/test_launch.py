"""Start of groups: in order, and as many as there are places."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.kernel.rules.launch import Asker, LaunchWindow, num_launch_places


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


ASKERS = st.builds(Asker, st.integers(-1, 0), st.sampled_from(["a", "b", None]))


@given(st.lists(ASKERS, max_size=60), st.integers(0, 2**32))
def test_no_group_waits_for_all_groups_of_another_source(askers: list[Asker], seed: int) -> None:
    rng = Random(seed)
    window = LaunchWindow(1)
    window.ask(1)
    started, num_before = window.admit(), {}
    while askers or window.num_waiting:
        if askers and rng.random() < 0.6:
            num_before[window.ask(1, askers.pop())] = len(started)
        else:
            window.release(1)
            started += window.admit()
    for asker in {turn.asker for turn in num_before}:
        asked = [turn for turn in num_before if turn.asker == asker]
        assert asked == [turn for turn in started if turn in num_before and turn.asker == asker]
    for turn in (turn for turn in num_before if turn.asker.source is None):
        waited_for = [each.asker for each in started[num_before[turn] : started.index(turn)]]
        assert all(waited_for.count(turn.asker._replace(source=source)) <= 2 for source in "ab")


def test_a_source_does_not_wait_for_others_that_never_end() -> None:
    window = LaunchWindow(1)
    window.ask(1)
    window.admit()
    feed = [window.ask(1, Asker(source="feed")) for _ in range(4)]
    for _ in range(3):
        window.ask(1)
    for _ in range(4 * 4):
        window.release(1)
        window.admit()
        if not all(turn.admitted for turn in feed):
            window.ask(1)
    assert all(turn.admitted for turn in feed)
