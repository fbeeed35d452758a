"""FeatureRing: bounded, exact, and safe between threads."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parts.observing.test_launches import Watch
from tests.support.waiting import WAIT_S
from vllm_rollout.parts.pruning.worker.feature_ring import FeatureRing

HIDDEN_SIZE = 4


def ring(capacity: int, dtype: torch.dtype = torch.float32) -> FeatureRing:
    return FeatureRing(HIDDEN_SIZE, dtype, capacity * HIDDEN_SIZE * dtype.itemsize)


def state(number: float) -> torch.Tensor:
    return torch.full((HIDDEN_SIZE,), float(number))


def put(ring: FeatureRing, *numbers: int) -> None:
    ring.put([f"r{number}" for number in numbers], torch.stack([state(number) for number in numbers]))


@pytest.mark.parametrize(
    ("max_bytes", "dtype", "capacity"),
    [(64, torch.float32, 4), (64, torch.bfloat16, 8), (79, torch.float32, 4), (0, torch.float32, 1)],
)
def test_the_capacity_is_what_fits_but_at_least_one(max_bytes, dtype, capacity):
    assert FeatureRing(HIDDEN_SIZE, dtype, max_bytes).capacity == capacity


KEYS = st.lists(st.integers(0, 7), max_size=6)


@settings(max_examples=200)
@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from(["put", "take", "drop"]), KEYS), max_size=12))
def test_a_state_is_there_until_it_is_taken_dropped_or_the_newest_need_its_place(capacity, calls):
    r, kept = ring(capacity), {}
    for value, (call, numbers) in enumerate(calls):
        keys = [f"r{number}" for number in numbers]
        if call == "put":
            r.put(keys, torch.full((len(keys), HIDDEN_SIZE), float(value)))
            for key in keys:  # the first state, and its age, stay
                kept.setdefault(key, value)
                if len(kept) > capacity:
                    del kept[next(iter(kept))]
        elif call == "take":
            features, found = r.take(keys)
            assert found == [at for at, key in enumerate(keys) if key in kept and key not in keys[:at]]
            assert features.tolist() == [[kept.pop(keys[at])] * HIDDEN_SIZE for at in found]
        else:
            r.drop(keys)
            kept = {key: value for key, value in kept.items() if key not in keys}
        assert len(r) == len(kept)


def test_states_are_copies_in_the_dtype_of_the_model():
    r = ring(2, torch.bfloat16)
    states = torch.ones(1, HIDDEN_SIZE, dtype=torch.bfloat16)
    r.put(["a"], states)
    states.zero_()
    features, _ = r.take(["a"])
    r.put(["b"], states)
    assert features.dtype == torch.bfloat16
    assert features.tolist() == [[1.0] * HIDDEN_SIZE]


def test_however_many_states_are_put_in_one_copy():
    launched = []
    for num in (1, 40):
        r, states = ring(100), torch.ones(num, HIDDEN_SIZE)
        with Watch() as watch:
            r.put([f"r{number}" for number in range(num)], states)
        launched.append(watch.launched)
        assert len(r) == num
    assert launched[1].total() <= launched[0].total()


def test_states_of_another_width_leave_no_key_and_take_no_place():
    r = ring(2)
    put(r, 1)
    for _ in range(3):
        with pytest.raises(ValueError, match="must have 4 numbers each, got 3"):
            r.put(["a"], torch.ones(1, HIDDEN_SIZE - 1))
    put(r, 2)
    assert r.take(["a", "r1", "r2"])[1] == [1, 2]


def test_states_put_in_inference_mode_can_be_taken_and_trained_on_outside():
    r = ring(2)
    with torch.inference_mode():
        put(r, 1)
    features, _ = r.take(["r1"])
    assert not features.is_inference()


def test_threads_that_put_and_take_lose_and_mix_nothing():
    r, num = ring(10_000), 400
    taken: dict[str, float] = {}
    wrong: list[str] = []

    def produce(thread: int) -> None:
        for i in range(0, num, 4):
            numbers = [thread * num + i + k for k in range(4)]
            put(r, *numbers)

    def consume(thread: int) -> None:
        for _ in range(200):
            ids = [f"r{thread * num + i}" for i in range(num)]
            features, found = r.take(ids)
            for row, position in zip(features, found, strict=True):
                if not (row == row[0]).all() or ids[position] in taken:
                    wrong.append(ids[position])
                taken[ids[position]] = row[0].item()

    threads = [threading.Thread(target=target, args=(i,)) for i in range(2) for target in (produce, consume)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    rest, found = r.take([f"r{number}" for number in range(2 * num)])
    taken |= {f"r{number}": row[0].item() for row, number in zip(rest, found, strict=True)}
    assert not wrong
    assert taken == {f"r{number}": float(number) for number in range(2 * num)}
    assert len(r) == 0
