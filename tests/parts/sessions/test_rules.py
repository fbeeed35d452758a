"""Sessions race: each ends once, the first that finish make the group, and what is void is replaced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.terms_port import PartTerms
from vllm_rollout.parts.sessions.rules import Session, SessionLimits, SessionRace, SessionRefused


def race_of(
    group_size: int = 2, redundancy: int = 0, limits: SessionLimits | None = None, max_sessions: int = 0, **plan: Any
) -> SessionRace:
    return SessionRace(GroupPlan(group_size, redundancy, **plan), limits or SessionLimits(), max_sessions)


def turn(race: SessionRace, session: Session, num_tokens: int = 10, now_s: float = 0.0, **how: bool) -> None:
    race.begin_turn(session)
    race.end_turn(session, num_tokens, now_s, **how)


def entered(race: SessionRace, num: int) -> list[Session]:
    return [race.enter(f"s{number}", 0.0) for number in range(num)]


def states(race: SessionRace) -> list[str]:
    return [race.state(session) for session in race.sessions.values()]


def test_the_first_that_finish_make_the_group_and_turns_of_the_others_stop():
    race = race_of(2, 2)
    a, b, c, d = entered(race, 4)
    for session in (a, b, c):
        turn(race, session)
    race.begin_turn(d)
    assert states(race) == ["between_turns", "between_turns", "between_turns", "turn"]
    race.finish(b, 1.0)
    assert race.settle().lost == ()
    race.finish(c, 2.0, reward=1.0)
    settled = race.settle()
    assert settled.lost == (a, d)
    assert states(race) == ["surplus", "finished", "finished", "surplus"]
    assert (race.is_over, race.result.status, race.result.selected) == (True, "complete", (1, 2))
    race.end_turn(d, 7, 3.0)  # what it had when it stopped
    assert d.num_tokens == 7
    assert (race.result.generated_tokens, race.result.returned_tokens) == (37, 20)


class Fewer(PartTerms):
    """Pruning that may leave fewer sessions than the group wants."""

    pruning = SimpleNamespace(allow_fewer=True)


def test_a_session_that_comes_to_a_group_which_pruning_made_smaller_has_lost():
    race = race_of(4, max_sessions=8, parts={"pruning": Fewer()})
    for number, session in enumerate(entered(race, 4)):
        turn(race, session, pruned=number < 2, last=number >= 2)
        race.settle()
    assert (race.is_over, race.result.status) == (True, "complete")
    late = race.enter("late", 2.0)
    assert (race.state(late), late.ended_by) == ("surplus", "race")
    assert "running" not in [ending.state for ending in race.endings]


def test_a_turn_runs_at_a_time():
    race = race_of(1)
    (session,) = entered(race, 1)
    race.begin_turn(session)
    with pytest.raises(SessionRefused, match="has a turn on its way: one may run at a time"):
        race.begin_turn(session)
    with pytest.raises(SessionRefused, match="Finish it when that has ended"):
        race.finish(session, 0.0)
    race.leave_turn(session, 0.0)  # its client left: as if it had not been
    assert (session.num_turns, session.num_tokens) == (0, 0)
    turn(race, session)


@pytest.mark.parametrize(
    ("limits", "how", "ended_by"),
    [
        (SessionLimits(), {"last": True}, "last_turn"),
        (SessionLimits(), {"cut": True}, "length"),
        (SessionLimits(), {"cut": True, "last": True}, "length"),
        (SessionLimits(cut_turn_ends=False), {"cut": True}, None),
        (SessionLimits(max_tokens=10), {}, "max_tokens"),
        (SessionLimits(max_tokens=10), {"last": True}, "last_turn"),
        (SessionLimits(max_tokens=10), {"cut": True, "last": True}, "max_tokens"),
        (SessionLimits(max_tokens=10, cut_turn_ends=False), {"cut": True}, "max_tokens"),
        (SessionLimits(max_tokens=11), {}, None),
        (SessionLimits(max_turns=1), {}, "max_turns"),
        (SessionLimits(max_turns=1), {"last": True}, "last_turn"),
        (SessionLimits(max_turns=2), {}, None),
    ],
)
def test_what_ends_a_session(limits, how, ended_by):
    race = race_of(1, limits=limits)
    (session,) = entered(race, 1)
    turn(race, session, 10, **how)
    assert session.ended_by == ended_by
    race.settle()
    assert race.is_over == (ended_by is not None)
    if ended_by is not None:
        assert race.state(session) == ("finished" if ended_by == "last_turn" else "truncated")


def test_a_session_has_what_the_others_left_of_its_tokens():
    race = race_of(1, limits=SessionLimits(max_tokens=25))
    (session,) = entered(race, 1)
    assert race.tokens_left(session) == 25
    turn(race, session, 10)
    assert race.tokens_left(session) == 15
    assert race_of(1).tokens_left(session) is None


def test_a_truncated_one_counts_when_too_few_others_are_left():
    race = race_of(1, 1)
    a, b = entered(race, 2)
    turn(race, a, cut=True)
    race.settle()
    assert not race.is_over
    race.finish(b, 1.0, void=True)
    race.settle()
    assert (race.is_over, race.result.selected, states(race)) == (True, (0,), ["truncated", "void"])


def test_a_limit_has_ended_it_and_its_harness_says_what_it_was_worth_once():
    race = race_of(1, 1, SessionLimits(max_turns=1))
    a, _ = entered(race, 2)
    turn(race, a)
    race.settle()
    race.finish(a, 1.0, reward=0.5)
    assert (a.reward, a.ended_by) == (0.5, "max_turns")
    with pytest.raises(SessionRefused, match="was finished before"):
        race.finish(a, 1.0)


def test_a_void_one_is_replaced_by_a_spare_and_else_another_is_wanted():
    race = race_of(2, 1, max_sessions=4)
    a, b, c = entered(race, 3)
    race.finish(a, 0.0, void=True)
    assert race.settle().num_wanted == 0, "a spare runs"
    race.finish(b, 0.0, void=True)
    assert (race.settle().num_wanted, race.num_to_enter) == (1, 1)
    d = race.enter("d", 0.0)
    race.finish(d, 0.0, void=True)
    assert race.settle().num_wanted == 0, "it has had four"
    race.finish(c, 0.0)
    race.settle()
    assert (race.is_over, race.result.status, race.result.selected) == (True, "incomplete", (2,))


def test_one_that_a_limit_had_ended_may_turn_out_void():
    race = race_of(1, 0, SessionLimits(max_turns=1), early_stop=False, max_sessions=2)
    (a,) = entered(race, 1)
    turn(race, a)
    race.finish(a, 0.0, void=True)
    assert (race.settle().num_wanted, race.state(a), race.is_over) == (1, "void", False)


def test_who_comes_when_it_is_over_has_lost():
    race = race_of(1, 1)
    race.finish(race.enter("a", 0.0), 0.0)
    race.settle()
    late = race.enter("late", 1.0)
    assert (late.is_open, race.state(late)) == (False, "surplus")
    race.finish(late, 2.0)  # its harness need not know
    assert race.state(late) == "surplus"
    with pytest.raises(SessionRefused, match="this group has its 2 sessions"):
        race.enter("one of a million", 1.0)


def test_places_are_as_many_as_were_said():
    race = race_of(1, 1)
    entered(race, 2)
    with pytest.raises(SessionRefused, match="this group has its 2 sessions"):
        race.enter("third", 0.0)


def test_silent_sessions_are_void_and_a_group_of_which_nobody_is_heard_ends():
    race = race_of(2, 1, SessionLimits(idle_timeout_s=5.0))
    a, b = entered(race, 2)
    race.begin_turn(b)  # generates for long: that is not silence
    race.expire(5.1)
    assert (race.state(a), a.ended_by, race.state(b)) == ("void", "idle", "turn")
    race.end_turn(b, 3, 6.0)
    race.expire(11.0)
    assert b.is_open
    race.finish(b, 11.0)
    race.settle()
    assert not race.is_over, "a third may come"
    race.expire(16.0)
    race.settle()
    assert not race.is_over
    race.expire(16.1)
    race.settle()
    assert (race.is_over, race.result.status, race.result.selected) == (True, "incomplete", (1,))
    with pytest.raises(SessionRefused, match=r"nobody ran a session of it for 5 s \(idle_timeout_s\)"):
        race.enter("late", 17.0)


def test_without_early_stop_all_run_to_their_end_and_the_shortest_are_returned():
    race = race_of(1, 2, early_stop=False, selection="shortest")
    sessions = entered(race, 3)
    for session, length in zip(sessions, (30, 10, 20), strict=True):
        turn(race, session, length, last=True)
        assert race.settle().lost == ()
    assert (race.is_over, race.result.selected) == (True, (1,))


def test_cancelled_ones_are_deferred():
    race = race_of(1, 1)
    a, b = entered(race, 2)
    turn(race, a)
    assert race.cancel().lost == (a, b)
    assert (race.is_over, states(race)) == (True, ["deferred", "deferred"])
    assert (race.result.status, race.result.selected) == ("deferred", ())


def test_who_is_being_graded_is_not_silent_and_has_no_other_turn():
    race = race_of(1, limits=SessionLimits(idle_timeout_s=30.0))
    (session,) = entered(race, 1)
    session.in_grading = True
    assert not race.expire(100.0)
    for refused in (race.tokens_left, race.check_finish):
        with pytest.raises(SessionRefused, match=r"being graded|finished before"):
            refused(session)
    session.in_grading = False
    assert race.expire(100.0)


class AnyOrder(RuleBasedStateMachine):
    """Any order of what harnesses may do, against what is true of every race."""

    @initialize(
        group_size=st.integers(1, 3),
        redundancy=st.integers(0, 3),
        more=st.integers(0, 3),
        early_stop=st.booleans(),
        max_turns=st.none() | st.integers(1, 3),
        max_tokens=st.none() | st.integers(1, 30),
    )
    def begin(self, group_size, redundancy, more, early_stop, max_turns, max_tokens):
        plan = GroupPlan(group_size, redundancy, early_stop)
        limits = SessionLimits(max_turns, max_tokens, 5.0)
        self.race = SessionRace(plan, limits, plan.num_candidates + more)
        self.now_s = 0.0
        self.ended: dict[str, str] = {}
        self.num_tokens = 0
        self.was_over = False

    def settled(self) -> None:
        open_before = {session.id for session in self.race.sessions.values() if session.is_open}
        settled = self.race.settle()
        assert {session.id for session in settled.lost} <= open_before
        assert 0 <= settled.num_wanted <= max(0, self.race.num_to_enter)
        assert max(len(self.race.sessions), len(self.race.sessions) + self.race.num_to_enter) <= self.race.max_sessions

    def some(self, data, *, in_turn: bool | None) -> Session | None:
        found = [s for s in self.race.sessions.values() if s.is_open and in_turn in (None, s.in_turn)]
        return data.draw(st.sampled_from(found)) if found else None

    @rule()
    def enter(self):
        num_taken = len(self.race.sessions)
        if self.race.num_to_enter > 0 or (self.race.is_over and num_taken < self.race.max_sessions):
            self.race.enter(f"s{len(self.race.sessions)}", self.now_s)
        else:
            with pytest.raises(SessionRefused):
                self.race.enter("one too many", self.now_s)

    @rule(data=st.data())
    def begin_turn(self, data):
        if session := self.some(data, in_turn=False):
            self.race.begin_turn(session)

    @rule(data=st.data(), num_tokens=st.integers(0, 12), cut=st.booleans(), last=st.booleans())
    def end_turn(self, data, num_tokens, cut, last):
        running = [session for session in self.race.sessions.values() if session.in_turn]
        if running:
            session = data.draw(st.sampled_from(running))
            left = self.race.limits.max_tokens
            num_tokens = num_tokens if left is None else min(num_tokens, left - session.num_tokens)
            self.race.end_turn(session, num_tokens, self.now_s, cut=cut, last=last)
            self.num_tokens += num_tokens
            self.settled()

    @rule(data=st.data())
    def leave_turn(self, data):
        if session := self.some(data, in_turn=True):
            self.race.leave_turn(session, self.now_s)

    @rule(data=st.data(), reward=st.none() | st.sampled_from([0.0, 1.0]), void=st.booleans())
    def finish(self, data, reward, void):
        if self.race.sessions:
            session = data.draw(st.sampled_from(list(self.race.sessions.values())))
            try:
                self.race.check_finish(session)
            except SessionRefused:
                return
            self.race.finish(session, self.now_s, reward=None if void else reward, void=void)
            self.settled()

    @rule(seconds=st.sampled_from([1.0, 4.0, 6.0]))
    def wait(self, seconds):
        self.now_s += seconds
        self.race.expire(self.now_s)
        self.settled()

    @precondition(lambda self: not self.race.is_over)
    @rule()
    def cancel(self):
        self.race.cancel()

    @invariant()
    def holds(self):
        if not hasattr(self, "race"):
            return
        race, size = self.race, self.race.plan.group_size
        for session in race.sessions.values():
            if session.ended_by is not None:
                assert self.ended.setdefault(session.id, session.ended_by) == session.ended_by
        assert race.is_over or not self.was_over
        self.was_over = race.is_over
        assert sum(session.num_tokens for session in race.sessions.values()) == self.num_tokens
        usable = [s for s in race.sessions.values() if race.state(s) in ("finished", "truncated")]
        if race.is_over:
            assert not any(session.is_open for session in race.sessions.values())
            selected = [s for s in race.sessions.values() if s.index in race.result.selected]
            assert len(selected) <= size
            assert race.is_cancelled or {s.id for s in selected} <= {s.id for s in usable}
            if race.result.status == "complete" and not race.is_cancelled:
                assert len(selected) == size
        elif race.plan.early_stop:
            assert sum(race.state(session) == "finished" for session in usable) < size


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
