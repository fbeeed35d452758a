"""The rule of a feed: admission, batches, and groups that are too old."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.parts.feeds.rules.feed import Feed, FeedTerms, Versions
from vllm_rollout.parts.feeds.rules.finite import FiniteLogits

TERMS = st.builds(FeedTerms, st.integers(1, 4), st.integers(0, 3), st.sampled_from(["wait", "drop", "finish", "defer"]))
STEPS = st.lists(st.sampled_from(["admit", "complete", "filter", "take", "update", "stop"]), max_size=120)


MAX_BYTES = st.sampled_from([1, 25, 10**9])
"""Complete and stopped groups have 10 bytes each."""


class Watched:
    """A feed, and each group's fate."""

    def __init__(self, terms: FeedTerms, max_bytes: int = 10**9) -> None:
        self.feed = Feed(terms)
        self.born: dict[int, int] = {}
        self.over: dict[int, str] = {}
        self.num_batches = 0
        self.feed.max_bytes = max_bytes
        self.stopped: set[int] = set()
        self.num_deferred = self.num_long = 0
        """Deferred prompts that wait, and those of them that are to start."""
        self.long: set[int] = set()

    def admit(self, num_prompts: int = 1) -> bool:
        """Start a group if there is room. False if it needs one of the `num_prompts` that wait."""
        num = self.feed.num_long(self.num_deferred, num_prompts + self.num_long)
        self.num_deferred, self.num_long = self.num_deferred - num, self.num_long + num
        if self.feed.capacity and (num_prompts or self.num_long):
            number = self.feed.admit(is_long=bool(self.num_long))
            self.born[number] = self.feed.version
            if self.num_long:
                self.num_long -= 1
                self.long.add(number)
                return True
        return False

    def end(self, pick: Callable[[list[int]], int], *, keep: bool) -> None:
        if not self.feed.running:
            return
        number = pick(sorted(self.feed.running))
        if keep:
            self.feed.completed(number, num_bytes=10)
        else:
            self.feed.gave_up(number)
            self.finish(number, "filtered")

    def stop(self) -> None:
        for number in self.feed.running:
            self.feed.stopped(number, 10)
            self.stopped.add(number)

    def take(self, *, drain: bool = False) -> bool:
        alive = {**self.feed.running, **self.feed.complete}
        taken = self.feed.take(drain=drain)
        if taken is None:
            return False
        self.num_batches += 1
        terms = self.feed.terms
        assert len(taken) == terms.batch or drain
        assert [each.born for each in taken] == sorted(each.born for each in taken)
        for number, born, staleness in taken:
            assert (alive[number], staleness) == (self.born[number], self.feed.version - born)
            assert staleness <= terms.max_staleness or terms.on_stale == "finish"
            self.finish(number, "taken")
        left = self.feed.complete.values()
        assert not taken or all(born >= taken[-1].born for born in left)
        return True

    def update(self) -> None:
        for number in self.feed.updated():
            self.finish(number, "dropped")
            self.num_deferred += self.feed.terms.on_stale == "defer"

    def finish(self, number: int, fate: str) -> None:
        assert number not in self.over
        self.over[number] = fate

    def check(self) -> None:
        feed, alive = self.feed, {*self.feed.running, *self.feed.complete}
        assert alive | self.over.keys() == self.born.keys()
        assert alive.isdisjoint(self.over)
        assert 0 <= feed.capacity <= feed.terms.num_places - len(alive)
        assert feed.sizes.keys() == feed.complete.keys() | (self.stopped & feed.running.keys())
        assert feed.long == self.long & alive
        assert not feed.is_full or feed.capacity <= max(0, feed.terms.batch - len(alive))


@settings(max_examples=400, deadline=None)
@given(TERMS, STEPS, MAX_BYTES, st.randoms(use_true_random=False))
def test_no_order_of_events_takes_a_group_twice_or_loses_it_or_exceeds_the_bound(terms, steps, max_bytes, chance):
    watched = Watched(terms, max_bytes)
    acts = {
        "admit": watched.admit,
        "complete": lambda: watched.end(chance.choice, keep=True),
        "filter": lambda: watched.end(chance.choice, keep=False),
        "take": watched.take,
        "update": watched.update,
        "stop": watched.stop,
    }
    for step in steps:
        acts[step]()
        watched.check()


@settings(max_examples=200, deadline=None)
@given(TERMS, st.integers(1, 12), st.floats(0, 0.6), MAX_BYTES, st.randoms(use_true_random=False))
def test_a_trainer_that_takes_and_updates_in_turn_gets_batch_after_batch(
    terms, num_batches, filtered, max_bytes, chance
):
    watched = Watched(terms, max_bytes)
    for _ in range(num_batches):
        for _ in range(10_000):
            while watched.feed.capacity:
                watched.admit()
            if watched.take():
                break
            assert watched.feed.running, "a deadlock"
            watched.end(chance.choice, keep=chance.random() >= filtered)
            watched.check()
        while watched.feed.running and chance.random() < 0.7:  # they go on while the trainer trains
            watched.end(chance.choice, keep=chance.random() >= filtered)
        watched.update()
    assert watched.num_batches == num_batches
    dropped = {number for number, fate in watched.over.items() if fate == "dropped"}
    assert not (dropped & watched.long if terms.on_stale == "defer" else dropped) or terms.on_stale == "drop"


@settings(max_examples=200, deadline=None)
@given(TERMS, STEPS, MAX_BYTES, st.randoms(use_true_random=False))
def test_after_any_beginning_a_trainer_that_takes_and_updates_in_turn_gets_a_batch(terms, steps, max_bytes, chance):
    watched = Watched(terms, max_bytes)
    acts = {"admit": watched.admit, "take": watched.take, "update": watched.update}
    for step in steps:
        acts.get(step, lambda: watched.end(chance.choice, keep=True))()
    watched.update()
    for _ in range(10_000):
        while watched.feed.capacity:
            watched.admit()
        if watched.take():
            return
        watched.end(chance.choice, keep=True)
    raise AssertionError("no batch")


@given(TERMS, st.integers(0, 20), st.randoms(use_true_random=False))
def test_prompts_that_end_come_back_whole(terms, num_prompts, chance):
    watched, waiting = Watched(terms), num_prompts
    for _ in range(10_000):
        while (waiting or watched.num_deferred or watched.num_long) and watched.feed.capacity:
            before = len(watched.born)
            waiting -= not watched.admit(waiting) and len(watched.born) > before
            if len(watched.born) == before:
                break
        is_last = not waiting and not watched.num_deferred and not watched.num_long
        if watched.take(drain=is_last):
            if not watched.feed.complete and not watched.feed.running and is_last:
                break
            watched.update()
        else:
            watched.end(chance.choice, keep=True)
    fates = [*watched.over.values()]
    assert fates.count("taken") == num_prompts or terms.on_stale == "drop"
    assert len(fates) == num_prompts or terms.on_stale == "defer"


def started(terms: FeedTerms, num: int) -> Feed:
    feed = Feed(terms)
    for _ in range(num):
        feed.admit()
    return feed


def test_staleness_0_is_on_policy():
    feed = started(FeedTerms(2, 0), 2)
    assert (feed.capacity, feed.take()) == (0, None)
    feed.completed(1)
    feed.completed(0)
    assert [each.staleness for each in feed.take() or ()] == [0, 0]
    assert (feed.capacity, feed.waits_for(5)) == (0, "weights")
    assert feed.updated() == []
    assert feed.capacity == 2


def test_wait_takes_no_batch_without_older_groups_that_would_become_too_old():
    feed = started(FeedTerms(1, 1), 2)
    feed.completed(0)
    assert feed.take() == [(0, 0, 0)]
    feed.updated()
    feed.completed(feed.admit())
    assert (feed.take(), feed.waits_for(0)) == (None, "older_groups")
    feed.completed(1)
    assert feed.take() == [(1, 0, 1)]


def test_wait_does_not_wait_for_groups_that_are_as_young_as_the_batch():
    feed = started(FeedTerms(1, 1), 2)
    feed.updated()  # without a batch: one of the two groups will be too old
    feed.completed(0)
    assert feed.take() == [(0, 0, 1)]
    assert feed.updated() == [1]


def test_wait_leaves_enough_places_for_complete_groups_that_are_not_in_the_batch():
    running, complete = {0: 2, 4: 2, 7: 3, 8: 3}, {3: 2, 5: 3, 6: 3, 9: 3}
    feed = Feed(FeedTerms(2, 3), 4, 8, running, complete, dict.fromkeys(complete, 0))
    assert feed.take() is None  # six would be left for the four places of versions 5 and 6
    del feed.complete[6], feed.complete[9]
    assert [each.number for each in feed.take() or ()] == [3, 5]


@pytest.mark.parametrize(("on_stale", "dropped", "taken"), [("drop", [0], [(1, 2, 0)]), ("finish", [], [(0, 0, 2)])])
def test_a_group_that_is_too_old_is_dropped_or_returned_over_the_bound(on_stale, dropped, taken):
    feed = started(FeedTerms(1, 1, on_stale), 1)
    assert feed.updated() == []
    assert feed.updated() == dropped
    if not dropped:
        feed.completed(0)
    feed.completed(feed.admit())
    assert feed.take() == taken


def test_a_trainer_that_updates_and_never_takes_fills_no_more_places():
    feed = Feed(FeedTerms(3, 1, "finish"))
    for _ in range(10):
        while feed.capacity:
            feed.completed(feed.admit())
        feed.updated()
    assert len(feed.complete) == feed.terms.num_places == 6


def test_a_feed_with_too_many_bytes_starts_the_groups_of_its_next_batch_only():
    feed = Feed(FeedTerms(2, 1), max_bytes=30)
    for _ in range(4):
        feed.admit()
    feed.updated()
    feed.completed(0, 20)
    assert (feed.is_full, feed.capacity, feed.too_many([2, 3])) == (False, 0, [])
    feed.completed(1, 20)
    assert (feed.is_full, feed.capacity, feed.too_many([2, 3])) == (True, 0, [3, 2])
    feed.gave_up(2)
    feed.gave_up(3)
    assert (feed.capacity, feed.waits_for(9)) == (0, "trainer")
    assert feed.take() == [(0, 0, 1), (1, 0, 1)]
    assert (feed.num_bytes, feed.capacity) == (0, 2)
    feed.max_bytes = 10
    feed.completed(feed.admit(), 20)
    assert (feed.is_full, feed.capacity) == (True, 1)  # the batch lacks one


def test_two_batches_under_one_version_use_the_places_of_later_ones():
    feed = started(FeedTerms(1, 1), 2)
    feed.completed(0)
    feed.completed(1)
    assert [feed.take(), feed.take()] == [[(0, 0, 0)], [(1, 0, 0)]]
    assert (feed.capacity, feed.waits_for(1)) == (0, "weights")


def test_versions_are_new_once_and_may_go_back():
    versions = Versions("step-9")
    assert not versions.is_new("step-9")
    assert not versions.is_new(None)
    assert not versions.goes_back("step-10")
    assert versions.is_new("step-10")
    assert versions.goes_back("step-9")
    assert versions.goes_back("step-8")
    assert not versions.goes_back("other-1")
    assert versions.is_new("step-9")


def test_deferred_prompts_run_in_a_batch_of_their_own_for_which_trainers_wait():
    feed = started(FeedTerms(2, 1, "defer"), 4)
    assert feed.updated() == []
    feed.completed(1)
    feed.completed(3)
    assert [each.number for each in feed.take() or ()] == [1, 3]  # no batch waits for 0 and 2
    assert feed.updated() == [0, 2]
    assert (feed.num_long(1, 5), feed.num_long(3, 5)) == (0, 2)
    long = [feed.admit(is_long=True) for _ in range(2)]
    for version in (2, 3):
        short = [feed.admit() for _ in range(feed.capacity)]
        for number in short:
            feed.completed(number)
        taken = feed.take()
        assert (len(short), feed.version) == (2, version)
        if version == 2:  # they may still be in the next batch
            assert [each.number for each in taken or ()] == short
            assert feed.updated() == []
    assert (taken, feed.waits_for(5)) == (None, "older_groups")
    for number in long:
        feed.completed(number)
    assert [each.number for each in feed.take() or ()] == long
    assert feed.long == set()


def test_the_last_deferred_prompts_start_once_nothing_else_is_left():
    feed = started(FeedTerms(4, 1, "defer"), 1)
    assert feed.num_long(2, 0) == 0
    feed.completed(0)
    assert (feed.num_long(2, 1), feed.num_long(2, 0)) == (0, 2)
    for _ in range(3):
        feed.completed(feed.admit())
    assert feed.num_long(2, 0) == 0  # a whole batch waits to be taken


def test_no_prompt_is_blamed_for_kv_of_earlier_weights():
    finite = FiniteLogits()
    finite.completed(began=0, version=1)  # says nothing of version 1
    assert finite.blames_weights(0, "q0", began=1, version=1)
    assert (finite.bad_version, finite.bad_prompt) == (1, "q0")
    finite.completed(began=1, version=1)
    assert finite.blames_weights(1, "q1", began=0, version=1)
    assert finite.bad_version == -1
    assert not finite.blames_weights(2, "q2", began=1, version=1)
