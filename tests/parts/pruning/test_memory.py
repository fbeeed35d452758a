"""PruningMemory: what is learned is bounded, saved in rows and restored as it was; what was never saved is refused."""

import json
import math
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.parts.pruning.reports import report_of
from tests.parts.pruning.steps import new_memories
from tests.parts.shaping.steps import lengths_of
from vllm_rollout.parts.memories.rules import PROMPTS_PER_ROW, Memory
from vllm_rollout.parts.pruning.rules.assessment import Confidence
from vllm_rollout.parts.pruning.rules.learning import Learning, Siblings
from vllm_rollout.parts.pruning.rules.memory import MAX_DETECTION_LENGTHS, MEMORY, OUTCOMES_PER_ROW, PruningMemory
from vllm_rollout.parts.pruning.rules.pruning_plan import Observation, PruningPlan
from vllm_rollout.parts.shaping.rules.history import ObservedLength


def nobody(detection_length: int) -> bool:
    return False


def everybody(detection_length: int) -> bool:
    return True


def seen(rng: random.Random) -> Observation:
    return Observation(Confidence(2.0, 1.0, rng.gauss(2, 1)), rng.gauss(0, 1), 1)


def learned(memory: Memory) -> PruningMemory:
    return MEMORY.of(memory)


def rows_of(memory: Memory) -> Iterator[Any]:
    return (row for section in memory.values() for row in section.to_rows())


def restored_of(rows: list[Any]) -> Memory:
    return new_memories().restored(rows).base


def use(memory: Memory, detection_length: int, num: int = 24, seed: int = 0) -> list[Any]:
    """A lesson: score siblings, reward them, see the length of their group, report."""
    rng, plan = random.Random(seed), PruningPlan(detection_length, min_labels=4, allow_fewer=True)
    learning, lengths = learned(memory).learning(detection_length, nobody), lengths_of(memory)
    observations = {index: seen(rng) for index in range(num)}
    judged = learning.assess(plan, observations, Siblings(seed, "g", at_least=1))
    for index, assessment in judged.items():
        learning.reward(observations[index], assessment, 30, index % 2 == 0, f"r/{seed}", active=True)
    lengths.observe(f"id:{seed}", [ObservedLength(rng.randint(1, 99), index % 5 == 0) for index in range(num)])
    return [judged, report_of(learning), lengths.of(f"id:{seed}"), lengths.dataset()]


def taught() -> Memory:
    memory = new_memories().base
    for seed, length in enumerate((8, 16, 8, 32)):
        use(memory, length, seed=seed)
    return memory


def stored(memory: Memory) -> list[Any]:
    """State after a JSON round trip."""
    return json.loads(json.dumps(list(rows_of(memory)), allow_nan=False))


def test_a_restored_memory_goes_on_as_the_saved_one():
    saved = taught()
    restored = restored_of(stored(saved))
    assert stored(restored) == stored(saved)
    assert list(learned(restored).learnings) == [16, 8, 32], "the least recently used first"
    for seed, length in enumerate((8, 64, 16), start=10):
        assert use(restored, length, seed=seed) == use(saved, length, seed=seed)
    assert stored(restored) == stored(saved)


@pytest.mark.thorough
def test_rows_of_a_state_are_bounded():
    memory = new_memories().base
    for seed in range(3 * PROMPTS_PER_ROW):
        lengths_of(memory).observe(f"id:{seed}", [ObservedLength(5, False)])
    use(memory, 8, num=OUTCOMES_PER_ROW + 1)
    rows = stored(memory)
    assert [row[0] for row in rows].count("prompts") == 3
    for kind, *_, items in rows:
        assert kind in ("learning", "lengths") or len(items) <= max(OUTCOMES_PER_ROW, PROMPTS_PER_ROW)
    assert stored(restored_of(rows)) == rows


@pytest.mark.thorough
def test_a_memory_may_go_on_while_its_state_is_taken():
    memory, rows = taught(), []
    for number in range(2 * PROMPTS_PER_ROW):
        lengths_of(memory).observe(f"id:{number}", [ObservedLength(5, False), ObservedLength(7, False)])
    for number, row in enumerate(rows_of(memory)):
        rows.append(json.loads(json.dumps(row)))
        use(memory, 8 * (number % 3 + 1), seed=number)
    restored = restored_of(rows)
    assert len(lengths_of(restored)) == 2 * PROMPTS_PER_ROW
    use(restored, 8)


def test_success_is_restored_and_states_without_it_are_taken_over():
    memory = taught()
    for number in range(2 * PROMPTS_PER_ROW):
        learned(memory).successes.observe(f"id:{number}", number % 3 == 0, 1.0 + number % 2)
    rows = stored(memory)
    assert [row[0] for row in rows].count("successes") == 2
    assert max(len(row[1]) for row in rows if row[0] == "successes") == PROMPTS_PER_ROW
    restored = restored_of(rows)
    assert stored(restored) == rows
    assert learned(restored).successes.of("id:3") == learned(memory).successes.of("id:3")
    without = restored_of([row for row in rows if row[0] != "successes"])
    assert len(learned(without).successes) == 0
    assert len(lengths_of(without)) == len(lengths_of(memory))
    with pytest.raises(ValueError, match="success history"):
        restored_of([["successes", [["a", 1.0, 2.0]]], rows[-1]])


def test_the_length_used_longest_ago_gives_way_unless_rewards_are_awaited_for_it():
    memory = new_memories().base
    for length in range(1, MAX_DETECTION_LENGTHS + 1):
        learned(memory).learning(length, everybody)
    learned(memory).learning(1, everybody)
    assert learned(memory).learning(100, everybody) is None
    assert learned(memory).forgotten == []
    learning = learned(memory).learning(100, lambda length: length == 2)
    assert (learned(memory).forgotten, learned(memory).spare(nobody)) == ([3], 2)
    assert learned(memory).learning(100, everybody) is learning
    assert len(learned(memory).learnings) == MAX_DETECTION_LENGTHS


ROWS = stored(taught())
LEARNING = Learning(5).to_state()
del LEARNING["outcomes"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROWS[:-1], "was it cut off"),
        ([*ROWS, ROWS[-1]], "must be the last one"),
        ([5, *ROWS], "a row of a state"),
        ([["unheard", []], *ROWS], "a row of a state"),
        ([["outcomes", 99, []], *ROWS], "a row of a state"),
        ([["learning", {"detection_length": "8"}], *ROWS], "a row of a state"),
        ([ROWS[0], *ROWS], "detection lengths of a state"),
        ([["learning", {**LEARNING, "detection_length": 100 + i}] for i in range(9)] + ROWS[-1:], "at most 8"),
        ([["learning", {**LEARNING, "detection_length": True}], *ROWS[-1:]], "must be an integer in"),
        ([["learning", {**LEARNING, "detection_length": 4097}], *ROWS[-1:]], r"must be an integer in \[0, 4096\]"),
        ([["learning", {**LEARNING, "more": 1}], *ROWS[-1:]], "a learning has the fields"),
        ([["prompts", [["a", 1, math.inf, 1, 0.0]]], *ROWS[-1:]], "must be a finite number"),
        ([["prompts", [["\ud800", 1, 1.0, 1, 0.0]]], *ROWS[-1:]], "characters of Unicode"),
    ],
)
def test_states_that_no_memory_can_have_had_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        restored_of(rows)


BAD = st.sampled_from(
    [None, True, "NaN", "", -1, 0, 1, 0.5, 2**53, 2**53 + 1, 10**24, -(10**30), 10**5000, 1e200, 1e-300, -1e39,
     math.inf, math.nan, [], {}, [[]], "x" * 70_000, [1] * 5000, "\ud800"]
)  # fmt: skip


@pytest.mark.thorough
@settings(max_examples=400, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_changed_state_is_refused_or_what_it_makes_goes_on(data):
    rows = json.loads(json.dumps(ROWS))
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = rows
        while True:
            key = data.draw(st.sampled_from(range(len(place)) if isinstance(place, list) else sorted(place)))
            below = place[key]
            if not isinstance(below, list | dict) or not below or not data.draw(st.integers(0, 5)):
                break
            place = below
        change = data.draw(st.sampled_from(["set", "drop", "twice"]))
        if change == "set":
            place[key] = deepcopy(data.draw(BAD))  # what is put may be changed next
        elif change == "drop":
            del place[key]
        elif isinstance(place, list):
            place.insert(key, place[key])
        if not rows:
            return
    try:
        memory = restored_of(rows)
    except ValueError as error:
        said = str(error)
    else:
        said = "nothing"
    assert 0 < len(said) < 1000
    if said != "nothing":
        return
    for seed, length in enumerate((8, 16, 32, 64, 8)):
        use(memory, length, seed=seed)
    for learning in learned(memory).learnings.values():
        report_of(learning)
    assert stored(restored_of(stored(memory))) == stored(memory)
