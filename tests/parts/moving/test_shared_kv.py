"""KV blocks that go from one cache into another, in every layout that vLLM has."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from vllm_rollout.parts.moving.wire import KVSegment
from vllm_rollout.parts.moving.worker import kv_layers, shared_kv
from vllm_rollout.parts.moving.worker.kv_calls import kv_blocks
from vllm_rollout.parts.moving.worker.kv_layers import KVLayers, free_bytes
from vllm_rollout.parts.moving.worker.shared_kv import SharedKV

NUM_BLOCKS = 7
LAYERS = ["a", "b", "c"]
LAYOUTS = sorted(KVCacheLayout, key=lambda layout: layout.name)


def new_cache(
    layout: KVCacheLayout = KVCacheLayout.LBNHC,
    kernel_block_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    head_size: int = 8,
    fill: float | None = None,
) -> tuple[SharedKV, torch.Tensor]:
    """A cache as vLLM makes it, and the tokens' values in it: [layer, block, head, token, content]."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=head_size, dtype=dtype)
    strides = compute_layout_strides(spec, NUM_BLOCKS, len(LAYERS), layout)
    tensor = KVCacheTensor(spec.page_size_bytes * NUM_BLOCKS * len(LAYERS), LAYERS, strides[0], strides[1])
    config = KVCacheConfig(NUM_BLOCKS, [tensor], [KVCacheGroupSpec(LAYERS, spec)])
    caches = allocate_kv_cache(config, torch.device("cpu"), layout, kernel_block_size and [kernel_block_size])
    torch.manual_seed(0)
    for cache in caches.values():
        cache.copy_(torch.rand(cache.shape) if fill is None else torch.full(cache.shape, fill))
    runner = SimpleNamespace(kv_cache_config=config, kv_caches=[*caches.values(), caches["a"]])  # d has a's
    layers = kv_blocks(runner)
    assert len(layers) == len(LAYERS)
    return SharedKV(KVLayers(layers), 0), torch.stack([layer.float() for layer in layers])


def values(shared: SharedKV) -> torch.Tensor:
    return torch.stack([layer.view(torch.bfloat16).float() for layer in shared._layers.layers])


def splits(layout: KVCacheLayout) -> list[int | None]:
    """vLLM splits blocks only where they are whole pages."""
    return [None, 8] if layout.is_layer_compact and layout.is_block_compact else [None]


@pytest.mark.parametrize(
    ("layout", "kernel_block_size"),
    [(layout, size) for layout in LAYOUTS for size in splits(layout)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_blocks_arrive_whole_and_nothing_else_changes(layout, kernel_block_size):
    source, there = new_cache(layout, kernel_block_size)
    target, here = new_cache(layout, kernel_block_size, fill=2.0)
    segment = source.share([5, 0, 3, 6])
    target.fetch(segment, [0, 2, 3], [1, 6, 2])
    expected = here.clone()
    expected[:, [1, 6, 2]] = there[:, [5, 3, 6]]
    assert torch.equal(values(target), expected)
    assert torch.equal(values(source), there)
    source.drop(segment.name)


def test_rows_that_are_no_whole_words_are_copied_too():
    source, there = new_cache(head_size=1)
    target, _ = new_cache(head_size=1, fill=2.0)
    segment = source.share([4])
    target.fetch(segment, [0], [2])
    assert torch.equal(values(target)[:, 2], there[:, 4])
    source.drop(segment.name)


def test_another_layout_is_refused():
    source, _ = new_cache()
    segment = source.share([1])
    for other in (new_cache(dtype=torch.float16), new_cache(head_size=16)):
        with pytest.raises(ValueError, match="do not fit"):
            other[0].fetch(segment, [0], [1])
    source.drop(segment.name)


def test_memory_of_another_host_is_not_looked_for(monkeypatch):
    source, _ = new_cache()
    segment = source.share([1])
    monkeypatch.setattr(kv_layers, "this_host", lambda: "another")
    other: KVSegment = source.share([1])
    monkeypatch.undo()
    with pytest.raises(ValueError, match="memory of another host"):
        new_cache()[0].fetch(other, [0], [1])
    new_cache()[0].fetch(segment, [0], [1])
    for each in (segment, other):
        source.drop(each.name)


@pytest.mark.thorough
def test_a_segment_is_gone_with_its_process():
    code = (
        "from tests.parts.moving.test_shared_kv import new_cache\n"
        "import time\n"
        "print('segment', new_cache()[0].share([1]).address.decode(), flush=True)\n"
        "time.sleep(600)\n"
    )
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root) as process:
        line = next(line for line in process.stdout if line.startswith("segment "))
        path = Path(line.split()[1])
        assert path.stat().st_size
        process.kill()
    assert not path.exists()


def test_a_segment_that_is_too_large_is_not_made(monkeypatch):
    source, _ = new_cache()
    monkeypatch.setattr(shared_kv, "free_bytes", lambda: 2 * sum(source._layers.sizes(3)) - 1)
    with pytest.raises(MemoryError):
        source.share([1, 2, 3])
    assert source._files == {}
    source.drop(source.share([1, 2]).name)


def test_free_memory_is_that_of_the_container(monkeypatch, tmp_path):
    monkeypatch.setattr(kv_layers, "CGROUP", tmp_path)
    of_the_host = free_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes() > of_the_host // 2
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert free_bytes() == 3000
