"""Memories: served names do not mix, are bounded, and are saved and restored with the base model."""

import json
from typing import Any

import pytest

from vllm_rollout.config import MAX_ADAPTERS
from vllm_rollout.kernel.rules.types import BASE_MODEL, HeadKey
from vllm_rollout.parts.pruning.rules.memory import Memories, Memory
from vllm_rollout.parts.shaping.rules.history import ObservedLength

NAMES = [f"adapter {number}" for number in range(MAX_ADAPTERS)]


def nobody(name: object) -> bool:
    return False


def everybody(name: object) -> bool:
    return True


def teach(memory: Memory, key: str = "id:a", length: int = 8) -> None:
    memory.learning(length, nobody)
    memory.lengths.observe(key, [ObservedLength(10, False), ObservedLength(30, False)])
    memory.successes.observe(key, True)


def taught(*names: str) -> Memories:
    memories = Memories()
    for number, name in enumerate(names):
        teach(memories.of(name, nobody), f"id:{name}", 8 + number)
    return memories


def stored(memories: Memories) -> list[Any]:
    """State after a JSON round trip."""
    return json.loads(json.dumps(list(memories.to_state()), allow_nan=False))


def test_names_do_not_know_of_each_other():
    memories = Memories()
    assert memories.known("a") is None
    teach(memories.of("a", nobody))
    assert list(memories.known("a").learnings) == [8]
    for other in (memories.base, memories.of("b", nobody)):
        assert (other.learnings, len(other.lengths), len(other.successes)) == ({}, 0, 0)
        assert other.lengths.dataset() is None
    assert memories.of(BASE_MODEL, nobody) is memories.base is memories.known(BASE_MODEL)


def test_the_adapter_used_longest_ago_gives_way_with_its_heads_and_the_base_model_never():
    memories = taught(*NAMES)
    memories.of(NAMES[0], nobody)
    teach(memories.of("another", nobody))
    assert list(memories.all()) == [BASE_MODEL, *NAMES[2:], NAMES[0], "another"]
    assert memories.take_forgotten() == [HeadKey(9, NAMES[1])]
    assert memories.take_forgotten() == []
    assert len(memories.of(NAMES[1], nobody).lengths) == 0, "it begins anew"


def test_an_adapter_that_rewards_are_awaited_for_does_not_give_way():
    memories = taught(*NAMES)
    assert memories.of("another", everybody) is None
    assert not memories.has_place("another", everybody)
    assert memories.has_place(NAMES[0], everybody)
    assert memories.take_forgotten() == []
    assert memories.has_place("another", lambda name: name != NAMES[3])
    assert memories.of("another", lambda name: name != NAMES[3]) is not None
    assert memories.known(NAMES[3]) is None
    assert memories.of(BASE_MODEL, everybody) is memories.base


def test_forgotten_detection_lengths_are_said_with_their_adapter():
    memories = taught(BASE_MODEL, "a")
    for name in (BASE_MODEL, "a"):
        for length in range(20, 28):
            memories.of(name, nobody).learning(length, nobody)
    assert sorted(memories.take_forgotten()) == [HeadKey(8), HeadKey(9, "a")]


def test_a_restored_state_is_as_the_saved_one():
    saved = taught(BASE_MODEL, "b", "a", "\u00e4/\u4e2d @1")
    restored = Memories.from_state(stored(saved))
    assert stored(restored) == stored(saved)
    assert list(restored.all()) == list(saved.all()), "the least recently used first"
    for name, memory in saved.all().items():
        key = f"id:{name}"
        assert restored.known(name).lengths.of(key) == memory.lengths.of(key) is not None
        assert restored.known(name).successes.of(key) == memory.successes.of(key)


def test_memories_may_go_on_while_their_state_is_taken():
    memories, rows = taught(BASE_MODEL, *NAMES), []
    for number, row in enumerate(memories.to_state()):
        rows.append(json.loads(json.dumps(row)))
        teach(memories.of(f"new {number}", nobody))
    assert list(Memories.from_state(rows).all()) == [BASE_MODEL, *NAMES]


OF_A = [["adapter", "a"], *stored(Memories())]
ONE_TOO_MANY = [row for number in range(MAX_ADAPTERS + 1) for row in (["adapter", f"{number}"], *OF_A[1:])]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (OF_A, "was it cut off"),
        ([*stored(Memories()), ["adapter", "a"]], "was it cut off"),
        ([*stored(Memories()), *OF_A, *OF_A], "different ones"),
        ([*stored(Memories()), *ONE_TOO_MANY], "at most 8"),
        ([*stored(Memories()), ["adapter", ""], *OF_A[1:]], "name of an adapter"),
        ([*stored(Memories()), ["adapter", 5], *OF_A[1:]], "name of an adapter"),
        ([*stored(Memories()), ["adapter", "\ud800"], *OF_A[1:]], "name of an adapter"),
        ([*stored(Memories()), ["adapter", "a", 1], *OF_A[1:]], "must be the last one"),
        ([*stored(Memories()), *OF_A[1:]], "must be the last one"),
        ([["prompts", []], ["adapter", "a"], *OF_A[1:]], "was it cut off"),
    ],
)  # fmt: skip
def test_states_that_no_memories_can_have_had_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        Memories.from_state(rows)
