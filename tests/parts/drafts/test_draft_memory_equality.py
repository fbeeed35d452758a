"""The draft memory in C++ gives what its specification in Python gives, whatever happens to it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_rollout.parts.drafts.worker.memory import draft_memory_implementation
from vllm_rollout.parts.drafts.worker.memory_file import dump_prompts, load_prompts
from vllm_rollout.parts.drafts.worker.memory_reference import DraftMemoryReference

pytestmark = pytest.mark.thorough

TOKENS = st.lists(st.integers(0, 3), max_size=12)
LONG_TOKENS = st.lists(st.integers(0, 40), min_size=60, max_size=200)
KEYS = st.sampled_from([b"a", b"b", b"another"])


@pytest.fixture(scope="module")
def native():
    implementation = draft_memory_implementation()
    if implementation.name != "c++":
        pytest.skip(implementation.reason)
    return implementation.store


def int32(values):
    return np.array(values, np.int32).tobytes()


def int64(values):
    return np.array(values, np.int64).tobytes()


class Pair:
    """Both memories, of which everything is asked."""

    def __init__(self, native, limits):
        self.both = (native(*limits), DraftMemoryReference(*limits))
        self.running = []

    def call(self, name, *arguments):
        ours, theirs = (getattr(memory, name)(*arguments) for memory in self.both)
        assert ours == theirs
        assert self.both[0].num_bytes == self.both[1].num_bytes
        assert self.both[0].num_prompts == self.both[1].num_prompts
        return ours

    def begin(self, key, context):
        self.running.append(self.call("begin", key, int32(context)))

    def step(self, rows, longest):
        width = max((len(row) for row in rows), default=0)
        padded = [row + [-1] * (width - len(row)) for row in rows]
        self.call("step", int64(self.running[: len(rows)]), int32(padded), int32(longest))

    def end(self, chosen, keep):
        self.call("end", int64(chosen), keep)
        self.running = [number for number in self.running if number not in chosen]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_both_give_the_same_after_any_calls(native, data):
    draw = data.draw
    min_match = draw(st.integers(1, 3))
    limits = (
        draw(st.sampled_from([0, 3_000, 6_000, 12_000, 50_000])),
        min_match,
        min_match + draw(st.integers(0, 5)),
        draw(st.integers(1, 6)),
    )
    pair = Pair(native, limits)
    for _ in range(draw(st.integers(1, 25))):
        call = draw(st.sampled_from(["begin", "begin", "step", "step", "step", "end", "age", "load"]))
        if call == "begin":
            pair.begin(draw(KEYS), draw(st.one_of(TOKENS, TOKENS, LONG_TOKENS)))
        elif call == "step":
            num_rows = draw(st.integers(0, len(pair.running)))
            rows = draw(st.lists(st.one_of(TOKENS, LONG_TOKENS), min_size=num_rows, max_size=num_rows))
            pair.step(rows, draw(st.lists(st.integers(0, 8), min_size=num_rows, max_size=num_rows)))
        elif call == "end" and pair.running:
            pair.end(draw(st.lists(st.sampled_from(pair.running), unique=True)), draw(st.booleans()))
        elif call == "age":
            pair.call("age")
        elif call == "load":
            kept = load_prompts(dump_prompts(pair.call("kept")))
            if draw(st.booleans()):
                pair = Pair(native, limits)
            for prompt in kept:
                pair.call("restore", *prompt)
    pair.step([[] for _ in pair.running], [8 for _ in pair.running])
    pair.call("kept")
