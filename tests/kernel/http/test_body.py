"""Checks of JSON fields that may hold anything, and the cost of these checks."""

import json
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_rollout.kernel.http.body import MAX_DEPTH, MAX_INT, check_json
from vllm_rollout.kernel.http.protocol import Prompt, RolloutRequest

MOST_TIMES = 12
"""Memory that a body may take beside what it takes when parsed, in lengths of its text."""
BODY_BYTES = 80_000


def nested(depth, inner, name="a"):
    for _ in range(depth):
        inner = {name: inner}
    return inner


def shapes():
    long = "x" * 3_000
    yield "long names around many items", nested(MAX_DEPTH - 2, [0] * (BODY_BYTES // 4), long)
    yield "long names of many items", {f"{long}{n}": {f"{long}{m}": n for m in range(10)} for n in range(12)}
    yield "a wide list", [1] * (BODY_BYTES // 2)
    yield "many objects", [{"a": n} for n in range(BODY_BYTES // 10)]
    yield "many lists", [[] for _ in range(BODY_BYTES // 4)]
    yield "a long text", "y" * BODY_BYTES


@pytest.mark.parametrize(("name", "shape"), list(shapes()), ids=lambda value: value if isinstance(value, str) else "")
def test_a_check_takes_memory_by_the_length_of_the_body_whatever_its_shape(name, shape):
    assert_memory(
        shape,
        lambda: check_json(shape, "data"),
        lambda: Prompt.model_validate({"prompt": "p", "data": shape}),
        lambda: RolloutRequest.model_validate({"prompts": [{"prompt": "p"}], "sampling_params": {"a": shape}}),
    )


def assert_memory(shape, *checks):
    """Checks of a body with this shape take memory by its length."""
    text = json.dumps(shape)
    tracemalloc.start()
    try:
        for check in checks:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            with suppress(ValueError):  # where another field does not fit
                check()
            taken = tracemalloc.get_traced_memory()[1] - before
            assert taken <= MOST_TIMES * len(text) + 100_000, (taken, len(text))
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [1, {"b": float("nan")}]}, "data.a.1.b: must be a finite number, got nan"),
        ([{"c": MAX_INT + 1}], f"data.0.c: must be an integer from {-MAX_INT - 1} to {MAX_INT} (64 bit), got"),
        ({"a": {"b\ud800": 1}}, "data.a: must be valid Unicode text"),
        (["\ud800"], "data.0: must be valid Unicode text"),
        (nested(MAX_DEPTH, {}), "nested more than 32 levels deep"),
        ({"z" * 5_000: [float("inf")]}, f"data.{'z' * 100}.0: must be a finite number"),
        (float("inf"), "data: must be a finite number, got inf"),
    ],
)
def test_a_fault_is_named_by_its_place(value, said):
    with pytest.raises(ValueError, match=r".") as error:
        check_json(value, "data")
    assert said in str(error.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",))),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=("Cs",))), inner),
)  # fmt: skip


@given(JSON)
def test_what_an_engine_can_take_is_let_through(value):
    check_json(value, "data")
    check_json(nested(MAX_DEPTH - 1, [value]) if not isinstance(value, dict | list) else value, "data")


@given(JSON, st.integers(0, 50))
def test_a_fault_is_found_wherever_it_is(value, position):
    """One number that is not finite, in the place of one leaf."""
    count = 0

    def planted(item):
        nonlocal count
        if isinstance(item, dict):
            return {name: planted(each) for name, each in item.items()}
        if isinstance(item, list):
            return [planted(each) for each in item]
        count += 1
        return float("nan") if count - 1 == position else item

    value = planted(value)
    if count <= position:
        check_json(value, "data")
    else:
        with pytest.raises(ValueError, match="finite"):
            check_json(value, "data")
