"""KV that weights which were not finite have left in a cache."""

import itertools

import pytest
import torch

from vllm_rollout.adapter import weights
from vllm_rollout.adapter.weights import clean


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "CHUNK", 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_become_zero_and_others_stay(dtype, value):
    caches = [torch.randn(7, 5, 8).to(dtype) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    for place in ((0, 0, 0), (6, 4, 7)):
        caches[1][place], expected[1][place] = value, 0
    assert clean(caches)
    assert all(map(torch.equal, caches, expected))
    assert not clean(caches)


def test_finite_numbers_whose_sum_is_too_large_stay():
    cache = torch.full((100,), torch.finfo(torch.float32).max)
    assert not clean([cache])
    assert cache.isfinite().all()


@pytest.mark.parametrize("shape", [(2, 40, 3, 4), (40, 2, 3, 4), (1, 1, 1, 900), (3,)])
def test_caches_of_every_layout_are_seen_to_their_last_number(shape):
    for order in itertools.permutations(range(len(shape))):
        for place in (0, -1):
            cache = torch.randn([shape[i] for i in order]).permute(*order)
            cache[tuple(place for _ in shape)] = torch.nan
            assert clean([cache])
            assert cache.isfinite().all()


def test_caches_of_other_numbers_are_left():
    assert not clean([torch.full((8,), 255, dtype=torch.uint8)])


def test_caches_of_several_types_may_share_memory_and_are_left():
    """As in vLLM's hybrid models: half of a finite float32 looks like NaN in bfloat16."""
    memory = torch.full((64,), 0x3F80_7FC0, dtype=torch.int32)
    attention, mamba = memory.view(torch.bfloat16), memory.view(torch.int8)
    assert not attention.isfinite().all()
    assert not clean([attention, mamba])
    assert not clean([attention, [mamba]])
    assert memory.view(torch.float32).isfinite().all()
    assert (memory == 0x3F80_7FC0).all()
