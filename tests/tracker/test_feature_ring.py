"""FeatureRing: bounded, exact, and safe between threads."""

import threading

import pytest
import torch

from vllm_rollout.tracker.feature_ring import FeatureRing

HIDDEN_SIZE = 4


def ring(capacity: int, dtype: torch.dtype = torch.float32) -> FeatureRing:
    return FeatureRing(HIDDEN_SIZE, dtype, capacity * HIDDEN_SIZE * dtype.itemsize)


def state(number: float) -> torch.Tensor:
    return torch.full((HIDDEN_SIZE,), float(number))


def put(ring: FeatureRing, *numbers: int) -> None:
    ring.put([f"r{number}" for number in numbers], torch.stack([state(number) for number in numbers]))


def take(ring: FeatureRing, *numbers: int) -> tuple[list[float], list[int]]:
    features, found = ring.take([f"r{number}" for number in numbers])
    assert features.shape == (len(found), HIDDEN_SIZE)
    assert all((row == row[0]).all() for row in features)
    return features[:, 0].tolist(), found


@pytest.mark.parametrize(
    ("max_bytes", "dtype", "capacity"),
    [(64, torch.float32, 4), (64, torch.bfloat16, 8), (79, torch.float32, 4), (0, torch.float32, 1)],
)
def test_the_capacity_is_what_fits_but_at_least_one(max_bytes, dtype, capacity):
    assert FeatureRing(HIDDEN_SIZE, dtype, max_bytes).capacity == capacity


def test_what_was_put_is_taken_once_in_the_order_asked_for():
    r = ring(8)
    put(r, 1, 2, 3)
    assert take(r, 3, 9, 1) == ([3.0, 1.0], [0, 2])
    assert take(r, 3, 2) == ([2.0], [1])
    assert take(r) == ([], [])
    assert len(r) == 0


def test_asking_for_the_same_request_twice_gives_it_once():
    r = ring(4)
    put(r, 1, 2)
    assert take(r, 1, 1, 2, 1) == ([1.0, 2.0], [0, 2])
    put(r, 3, 4, 5, 6)
    assert take(r, 3, 4, 5, 6) == ([3.0, 4.0, 5.0, 6.0], [0, 1, 2, 3])


def test_the_oldest_gives_way_to_the_newest():
    r = ring(3)
    put(r, 1, 2, 3)
    put(r, 4, 5)
    assert len(r) == 3
    assert take(r, 1, 2, 3, 4, 5) == ([3.0, 4.0, 5.0], [2, 3, 4])


def test_more_than_fits_at_once_leaves_the_newest():
    r = ring(2)
    put(r, *range(10))
    assert take(r, *range(10)) == ([8.0, 9.0], [8, 9])


def test_what_was_taken_makes_room():
    r = ring(3)
    put(r, 1, 2, 3)
    take(r, 2)
    put(r, 4)
    assert take(r, 1, 3, 4) == ([1.0, 3.0, 4.0], [0, 1, 2])


def test_a_request_keeps_its_first_state_and_its_age():
    r = ring(2)
    put(r, 1, 2)
    r.put(["r1"], state(100)[None])
    put(r, 3)
    assert take(r, 1, 2, 3) == ([2.0, 3.0], [1, 2])


def test_states_are_copies_in_the_dtype_of_the_model():
    r = ring(2, torch.bfloat16)
    states = torch.ones(1, HIDDEN_SIZE, dtype=torch.bfloat16)
    r.put(["a"], states)
    states.zero_()
    features, _ = r.take(["a"])
    r.put(["b"], states)
    assert features.dtype == torch.bfloat16
    assert features.tolist() == [[1.0] * HIDDEN_SIZE]


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
        thread.join()
    rest, found = r.take([f"r{number}" for number in range(2 * num)])
    taken |= {f"r{number}": row[0].item() for row, number in zip(rest, found, strict=True)}
    assert not wrong
    assert taken == {f"r{number}": float(number) for number in range(2 * num)}
    assert len(r) == 0
