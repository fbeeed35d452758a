"""Kernels that Triton compiles for a GPU that this machine lacks: triton_variants.py RESULTS, written as JSON.

The tracker's steps run through the Triton kernels, compiled for sm_90 and never launched. RESULTS lists the kernels
compiled while warming up and those compiled in a step after it. It needs its own process: the driver is replaced."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from tests.parts.pruning.scoring import ScoringTracker
from vllm_rollout.parts.observing.tracker import dispatch
from vllm_rollout.parts.observing.tracker.warm_up import warm_up
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey
from vllm_rollout.parts.pruning.worker.feature_ring import FeatureRing
from vllm_rollout.parts.pruning.worker.quality_head import QUALITY_HEAD_HIDDEN, HeadWeights
from vllm_rollout.parts.pruning.worker.scorer import PublishedHead

HIDDEN_SIZE = 96


def new_tracker() -> ScoringTracker:
    return ScoringTracker(torch.device("cpu"), ring=FeatureRing(HIDDEN_SIZE, torch.float32, 4))


class NoDriver:
    """Stands for a GPU: kernels are loaded and launched into nothing."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
        load_binary=lambda *arguments: (None, None, 32, 0, 1024),
    )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source, metadata):
        return lambda *arguments: None


def compiled_by(run) -> list[str]:
    names: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda *, fn, **details: names.append(fn.name.rpartition(".")[2])
    run()
    return names


def logits_of(num_rows: int, vocab_size: int, padded: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(num_rows, padded, dtype=dtype)[:, :vocab_size]


def steps(vocab_size: int, padded: int, dtype: torch.dtype) -> None:
    """Batches of many sizes, with strangers and unfinished prefills among them and few or many due."""
    tracker = new_tracker()
    tracker.scorer.heads[HeadKey(3)] = PublishedHead(1, weights())
    computed = {}
    for number in range(45):
        computed[f"r{number}"] = 5 + number % 3
        tracker.add_scored(f"r{number}", 5, (3, 8, None)[number % 3 if number < 20 else 0])
    for size in (1, 2, 3, 4, 5, 7, 16, 17, 33, 45):
        ids = [f"r{number}" for number in range(size)]
        for position in range(3):
            num_computed = np.array([5 + position for _ in ids] + [9])
            unfinished = np.array([number % 5 == 4 for number in range(size)] + [False])
            hidden = torch.zeros(2 * size + 2, HIDDEN_SIZE, dtype=dtype)
            tracker.start_step()
            tracker.see_hidden_states(hidden, torch.arange(size + 1, dtype=torch.int32))
            tracker.observe(
                [*ids, "stranger"], logits_of(size + 1, vocab_size, padded, dtype), num_computed, unfinished
            )
        tracker.start_step()
        tracker.see_hidden_states(torch.zeros(size, HIDDEN_SIZE, dtype=dtype))
        reached = np.full(size, 5 + 2)
        tracker.observe(ids, logits_of(size, vocab_size, padded, dtype), reached, np.zeros(size, dtype=bool))


def weights() -> HeadWeights:
    shapes = (QUALITY_HEAD_HIDDEN, HIDDEN_SIZE), (QUALITY_HEAD_HIDDEN,), (QUALITY_HEAD_HIDDEN,), (1,)
    return HeadWeights(*(torch.zeros(shape) for shape in shapes))


def use_triton_for_cpu_tensors() -> None:
    triton.runtime.driver.set_active(NoDriver())
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
    torch.cuda.current_stream = lambda device: SimpleNamespace(cuda_stream=0)
    chosen = dispatch.active_implementation
    dispatch.active_implementation = lambda device_type, name="token_confidence": chosen("cuda", name)


def main(results_path: str) -> None:
    use_triton_for_cpu_tensors()
    results = {}
    for name, (vocab_size, padded, dtype) in {
        "bf16, 151936": (512, 512, torch.bfloat16),
        "bf16, 32001 padded": (513, 576, torch.bfloat16),
        "fp32, odd": (513, 513, torch.float32),
    }.items():
        logits, hidden = logits_of(2, vocab_size, padded, dtype), torch.zeros(2, HIDDEN_SIZE, dtype=dtype)
        results[name] = {
            "warm_up": compiled_by(lambda made=logits, of=hidden: warm_up(made, of, new_tracker().parts)),
            "steps": compiled_by(lambda v=vocab_size, p=padded, d=dtype: steps(v, p, d)),
        }
    Path(results_path).write_text(json.dumps(results))


main(sys.argv[1])
