"""Groups of sessions, replayed: turns, tools and what fails, by the rule that the server has."""

from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.simulator.traces import DETAILED, FLAT, LINEAR, pool, traced
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.parts.sessions.with_shaping.simulated import (
    Course,
    SessionGroup,
    SessionTerms,
    draw_course,
    run_sessions,
)
from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.outcome import SimulationOutcome
from vllm_rollout.simulator.race import Pools
from vllm_rollout.simulator.replay import replay
from vllm_rollout.simulator.settings import Setting

PREFILL = CostModel(((0.0, PTLCurve((1.0,), (1.0,))),), prefill_s_per_token=1.0)
SINGLE = SessionTerms(turns=1)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def run(machine: Machine, group_size: int, *courses: Course, tool_tokens: int = 0, prompt_tokens: int = 0, **plan):
    """Sessions that do this, the first `group_size` and spare ones at once, and what their rank did."""
    lengths = pool(*(sum(course.turns) for course in courses))
    race = SessionGroup("q", GroupPlan(group_size, **plan), lengths, prompt_tokens, courses=courses)
    return race, run_sessions(machine, [race], SessionTerms(tool_tokens=tool_tokens))


def states(race: SessionGroup) -> list[str]:
    return [race.sessions.state(session) for session in race.sessions.sessions.values()]


@given(
    rollout=st.dictionaries(st.sampled_from("abc"), LENGTHS, min_size=1),
    setting=st.builds(
        Setting,
        group_size=st.integers(1, 4),
        redundancy=st.integers(0, 4),
        selection=st.sampled_from(["first", "shortest"]),
        early_stop=st.sampled_from([None, False]),
    ),
    cost=st.sampled_from([FLAT, LINEAR, DETAILED]),
    slots=st.none() | st.integers(8, 12),
    capacity=st.none() | st.integers(60, 120),
    ranks=st.integers(1, 2),
)
def test_with_one_turn_it_is_the_rollout_of_answers(rollout, setting, cost, slots, capacity, ranks):
    pools = Pools(traced(rollout, max_tokens=40))
    machine = Machine(cost, ranks, slots, capacity)
    answers, sessions = (replay(pools, setting, machine, sessions=its) for its in (None, SINGLE))
    assert sessions.num_turns >= setting.group_size
    for field in set(SimulationOutcome.__dataclass_fields__) - {"num_turns"}:
        assert getattr(sessions, field) == getattr(answers, field), field


@given(
    lengths=LENGTHS,
    group_size=st.integers(1, 4),
    redundancy=st.integers(0, 4),
    cost=st.sampled_from([FLAT, LINEAR, DETAILED]),
    slots=st.none() | st.integers(8, 9),
    terms=st.builds(
        SessionTerms,
        turns=st.sampled_from([1, 2, 5]),
        tool_seconds=st.sampled_from([0, 1, 30]),
        tool_tokens=st.integers(0, 20),
        tool_failures=st.sampled_from([0, 0.2, 0.9]),
    ),
)
def test_a_race_is_never_slower_than_waiting_for_all_and_generates_no_more(
    lengths, group_size, redundancy, cost, slots, terms
):
    pools, machine = Pools(traced({"q": lengths}, max_tokens=40)), Machine(cost, max_num_seqs=slots)
    race, all_of_them = (
        replay(pools, Setting(group_size, redundancy, early_stop=stop), machine, sessions=terms)
        for stop in (True, False)
    )
    assert race.seconds <= all_of_them.seconds
    assert race.generated_tokens <= all_of_them.generated_tokens
    assert race.returned_tokens <= race.generated_tokens
    assert race.num_incomplete == all_of_them.num_incomplete


def test_a_session_has_no_place_while_its_tool_runs():
    one, long = Course((3, 2), (4.0,)), Course((10,), ())
    race, ran = run(Machine(LINEAR), 2, one, long)
    # both: 3 steps of 2 s; alone: 4 steps of 1 s, in which the tool runs; both: 2 of 2 s; alone: 1
    assert ran.seconds == race.over_s == 3 * 2 + 4 + 2 * 2 + 1
    assert [num for _, num in ran.curve] == [2, 1, 2, 1, 0]
    race, ran = run(Machine(LINEAR), 1, one)
    assert ran.seconds == 3 + 4 + 2, "the engine idles"
    race, ran = run(Machine(LINEAR, max_num_seqs=1), 2, one, long)
    assert ran.seconds == 3 + 10 + 2, "there was one place, and the other one had it when the tool was ready"


def test_the_next_turn_computes_what_the_prefix_cache_has_not():
    course = Course((3, 2), (4.0,))
    # the prompt and 3 tokens are 2 whole blocks of 16 and 1 token; 5 words of the tool
    _, ran = run(Machine(PREFILL), 1, course, tool_tokens=5, prompt_tokens=30)
    assert ran.seconds == 30 + 3 + 4 + (1 + 5) + 2
    slow, other = Course((3, 2), (80.0,)), Course((60,), ())
    roomy, tight = (
        run(Machine(PREFILL, kv_capacity_tokens=tokens), 2, slow, other, tool_tokens=5, prompt_tokens=30)[1]
        for tokens in (200, 92)
    )
    assert tight.seconds - roomy.seconds == 30 + 3 - 1, "what ran had taken its place: all is computed again"


@pytest.mark.parametrize(
    ("courses", "tight", "more_s"),
    [
        ([Course((3, 2), (40.0,)), Course((2, 2), (5.0,)), Course((5, 2), (40.0,))], 95, 34),
        ([Course((2, 2), (40.0,)), Course((3, 2), (40.0,))], 94, 34),
    ],
    ids=["of two the one that ended its turn first", "of one that waits, for one that goes on"],
)
def test_kv_that_gives_way_is_computed_again(courses, tight, more_s):
    all_of_them = [*courses, Course((60,), ())]
    without, with_all = (
        run(Machine(PREFILL, kv_capacity_tokens=most), len(all_of_them), *all_of_them, tool_tokens=5, prompt_tokens=30)
        for most in (tight, 200)
    )
    assert without[1].seconds - with_all[1].seconds == more_s


def test_when_the_group_is_complete_turns_stop_and_nobody_waits_for_tools():
    courses = [Course((4,), ()), Course((9,), ()), Course((2, 2), (100.0,)), Course((1, 1, 1), (1.0, 100.0))]
    race, ran = run(Machine(FLAT), 1, *courses, redundancy=3)
    assert (ran.seconds, race.over_s) == (4, 4)
    assert states(race) == ["finished", "surplus", "surplus", "surplus"]
    assert [ending.num_tokens for ending in race.result.endings] == [4, 4, 2, 2]
    assert race.result.returned_tokens == 4


def test_a_tool_that_fails_makes_room_for_a_spare_or_a_new_session():
    void, good = Course((3,), (2.0,)), Course((6,), ())
    race, ran = run(Machine(FLAT), 1, void, good, redundancy=1)
    assert (ran.seconds, states(race)) == (6, ["void", "finished"])
    race, ran = run(Machine(FLAT), 1, void, void, good)
    assert (ran.seconds, states(race)) == (3 + 2 + 3 + 2 + 6, ["void", "void", "finished"])
    race, ran = run(Machine(FLAT), 1, void, void)
    assert (ran.seconds, race.result.status, race.result.generated_tokens) == (10, "incomplete", 6)


def test_the_tool_of_a_loser_is_forgotten_and_those_of_others_end_in_their_order():
    loses = [Course((2,), ()), Course((1, 1), (10.0,))]
    others = [[Course((1, 1), (seconds,))] for seconds in (53.0, 35.0, 51.0, 37.0)]
    races = [
        SessionGroup("q", GroupPlan(1, len(courses) - 1), pool(*(2 for _ in courses)), courses=courses)
        for courses in (others[0], loses, *others[1:])
    ]
    run_sessions(Machine(FLAT), races, SessionTerms(tool_tokens=0))
    assert [race.over_s for race in races] == [55, 2, 37, 53, 39]


def test_what_no_kv_cache_holds_is_refused():
    pools, its = Pools(traced({"q": [40]}, max_tokens=40)), SessionTerms(turns=1000, tool_tokens=10)
    with pytest.raises(ValueError, match="a candidate of prompt 'q' needs"):
        replay(pools, Setting(1), Machine(kv_capacity_tokens=100), sessions=its)


def test_courses_have_the_stated_means_and_all_their_tokens():
    its = SessionTerms(turns=4, tool_seconds=5.0, tool_sigma=0.5, tool_failures=0.1)
    drawn = [draw_course(its, 1000 + seed, Random(seed)) for seed in range(4000)]
    whole = [course for course in drawn if not course.fails]
    tools = [seconds for course in drawn for seconds in course.tools_s]
    assert fmean(tools) == pytest.approx(5, rel=0.05)
    assert sum(course.fails for course in drawn) / len(tools) == pytest.approx(0.1, rel=0.1)
    assert all(len(course.tools_s) == len(course.turns) - (not course.fails) for course in drawn)
    assert {sum(course.turns) for course in whole} <= {1000 + seed for seed in range(4000)}
    assert all(max(course.turns) - min(course.turns) <= 1 for course in whole)
    steady = [draw_course(SessionTerms(turns=4), 1000, Random(seed)) for seed in range(4000)]
    assert fmean(len(course.turns) for course in steady) == pytest.approx(4, rel=0.05)
    assert draw_course(SessionTerms(turns=50), 2, Random(0)).turns == (1, 1)


def test_the_command_tells_of_sessions(run, numbers):
    its = "turns=2,tool_seconds=9,tool_failures=0.2"
    result = run("--generate", "prompts=8,steps=1,median=20,max_tokens=60", "--sessions", its)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "Sessions of 2 turns on average, tools of 9 steps." in said
    assert "Sessions, per rollout" in said
    told = numbers()
    assert told["sessions"]["tool_failures"] == 0.2
    assert [each["setting"]["name"] for each in told["settings"]] == [
        "uniform n=8",
        "1.25x first",
        "1.5x first",
        "2x first",
    ]
    assert all(each["num_turns"] > each["num_candidates"] and each["num_void"] for each in told["settings"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sessions", "turns=0"], "--sessions 'turns=0': turns: must be a number in [1, 1000], got 0"),
        (["--sessions", "tools=2"], "'tools' is not a field; allowed: turns, tool_seconds"),
        (["--sessions", "turns=2", "--rounds", "2"], "--rounds is for answers: sessions stay on their engines"),
        (
            ["--sessions", "turns=2", "--data-parallel-size", "2", "--migration", "auto"],
            "--migration auto is for answers",
        ),
        (["--sessions", "turns=2", "--setting", "redundancy=auto"], "'redundancy=auto': groups of sessions take"),
        (["--sessions", "turns=2", "--setting", "redundancy=4,selection=dual_end"], "groups of sessions take"),
    ],
)
def test_what_sessions_cannot_do_is_said(invoke, flags, message):
    result = invoke("--generate", "prompts=2", *flags)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
