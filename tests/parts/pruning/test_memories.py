"""Memories: served names do not mix, are bounded, and are saved and restored with the base model."""

import json
from typing import Any

import pytest

from tests.parts.pruning.steps import new_judge, new_memories
from tests.parts.shaping.steps import lengths_of
from vllm_rollout.config import MAX_ADAPTERS
from vllm_rollout.kernel.rules.types import BASE_MODEL
from vllm_rollout.parts.memories.rules import Memories, Memory
from vllm_rollout.parts.pruning.rules.judge import Judge
from vllm_rollout.parts.pruning.rules.memory import MEMORY, PruningMemory
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey
from vllm_rollout.parts.shaping.rules.history import ObservedLength

NAMES = [f"adapter {number}" for number in range(MAX_ADAPTERS)]


def nobody(length: int) -> bool:
    return False


def everybody(name: str) -> bool:
    return True


def learned(memory: Memory) -> PruningMemory:
    return MEMORY.of(memory)


def teach(memory: Memory, key: str = "id:a", length: int = 8) -> None:
    learned(memory).learning(length, nobody)
    lengths_of(memory).observe(key, [ObservedLength(10, False), ObservedLength(30, False)])
    learned(memory).successes.observe(key, True)


def taught(*names: str) -> Judge:
    judge = new_judge()
    for number, name in enumerate(names):
        teach(judge.memories.of(name), f"id:{name}", 8 + number)
    return judge


def stored(memories: Memories) -> list[Any]:
    """State after a JSON round trip."""
    return json.loads(json.dumps(list(memories.to_state()), allow_nan=False))


def test_names_do_not_know_of_each_other():
    memories = new_memories()
    assert memories.known("a") is None
    teach(memories.of("a"))
    assert list(learned(memories.known("a")).learnings) == [8]
    for other in (memories.base, memories.of("b")):
        assert (learned(other).learnings, len(lengths_of(other)), len(learned(other).successes)) == ({}, 0, 0)
        assert lengths_of(other).dataset() is None
    assert memories.of(BASE_MODEL) is memories.base is memories.known(BASE_MODEL)


def test_the_adapter_used_longest_ago_gives_way_with_its_heads_and_the_base_model_never():
    judge = taught(*NAMES)
    judge.memories.of(NAMES[0])
    teach(judge.memories.of("another"))
    assert list(judge.memories.all()) == [BASE_MODEL, *NAMES[2:], NAMES[0], "another"]
    assert judge.take_forgotten() == [HeadKey(9, NAMES[1])]
    assert judge.take_forgotten() == []
    assert len(lengths_of(judge.memories.of(NAMES[1]))) == 0, "it begins anew"


def test_an_adapter_that_rewards_are_awaited_for_does_not_give_way():
    judge = taught(*NAMES)
    memories = judge.memories
    memories.awaits = [everybody]
    assert memories.of("another") is None
    assert not memories.has_place("another")
    assert memories.has_place(NAMES[0])
    assert judge.take_forgotten() == []
    assert memories.of(BASE_MODEL) is memories.base
    memories.awaits = [lambda name: name != NAMES[3], lambda name: name == NAMES[0]]
    assert memories.has_place("another")
    assert memories.of("another") is not None
    assert memories.known(NAMES[3]) is None


def test_forgotten_detection_lengths_are_said_with_their_adapter():
    judge = taught(BASE_MODEL, "a")
    for name in (BASE_MODEL, "a"):
        for length in range(20, 28):
            judge.memory_of(name).learning(length, nobody)
    assert sorted(judge.take_forgotten()) == [HeadKey(8), HeadKey(9, "a")]


def test_a_restored_state_is_as_the_saved_one():
    saved = taught(BASE_MODEL, "b", "a", "\u00e4/\u4e2d @1").memories
    restored = saved.restored(stored(saved))
    assert stored(restored) == stored(saved)
    assert list(restored.all()) == list(saved.all()), "the least recently used first"
    for name, memory in saved.all().items():
        key, again = f"id:{name}", restored.known(name)
        assert lengths_of(again).of(key) == lengths_of(memory).of(key) is not None
        assert learned(again).successes.of(key) == learned(memory).successes.of(key)


def test_rows_of_an_earlier_version_are_read():
    """Its order: lengths of prompts before successes, and totals of lengths last."""
    saved = taught(BASE_MODEL, "a").memories
    rows = stored(saved)
    earlier = ["adapter", "learning", "outcomes", "prompts", "successes", "length_trial", "lengths"]
    place = rows.index(["adapter", "a"])
    before = [sorted(some, key=lambda row: earlier.index(row[0])) for some in (rows[:place], rows[place:])]
    assert [row for some in before for row in some] != rows
    assert stored(saved.restored(row for some in before for row in some)) == rows


def test_a_state_without_lengths_is_read_and_lengths_begin_anew():
    saved = taught(BASE_MODEL).memories
    rows = [row for row in stored(saved) if row[0] not in ("prompts", "lengths")]
    restored = saved.restored(rows)
    assert len(lengths_of(restored.base)) == 0
    assert list(learned(restored.base).learnings) == [8]


def test_memories_may_go_on_while_their_state_is_taken():
    memories, rows = taught(BASE_MODEL, *NAMES).memories, []
    for number, row in enumerate(memories.to_state()):
        rows.append(json.loads(json.dumps(row)))
        teach(memories.of(f"new {number}"))
    assert list(memories.restored(rows).all()) == [BASE_MODEL, *NAMES]


EMPTY = stored(new_memories())
OF_A = [["adapter", "a"], *EMPTY]
ONE_TOO_MANY = [row for number in range(MAX_ADAPTERS + 1) for row in (["adapter", f"{number}"], *OF_A[1:])]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*EMPTY, *OF_A, *OF_A], "different ones"),
        ([*EMPTY, *ONE_TOO_MANY], "at most 8"),
        ([*EMPTY, ["adapter", ""], *OF_A[1:]], "name of an adapter"),
        ([*EMPTY, ["adapter", 5], *OF_A[1:]], "name of an adapter"),
        ([*EMPTY, ["adapter", "\ud800"], *OF_A[1:]], "name of an adapter"),
        ([*EMPTY, ["adapter", "a", 1], *OF_A[1:]], "a row of a state"),
        ([*EMPTY, *OF_A[1:]], "must be the last one"),
        ([["prompts", []], ["adapter", "a"], *OF_A[1:]], "was it cut off"),
    ],
)  # fmt: skip
def test_states_that_no_memories_can_have_had_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        new_memories().restored(rows)
