"""The pieces in order of value: what each one shows, how long it takes, which engines it needs.

Invariant: a piece's function takes a `Bench` and writes its results there. It raises only if something is broken.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu_check.engine import Settings
from vllm_rollout.parts.drafts.rules import MAX_DRAFT_TOKENS

HERE = Path(__file__).parent
ESTIMATES = HERE / "estimates.json"
"""File with the seconds of each piece and each engine's start on an H100, and their source."""
START = "start of "
"""Prefix of an engine's name in the estimates."""
OF_OPERATORS = ["parts/observing/tracker", "parts/pruning/worker"]
"""Folders of the package with the operators, and with all that pieces without vLLM run."""
LIMIT_FACTOR, LEAST_LIMIT_S = 3, 60
"""Limit of a piece's time, as a multiple of its estimate, and the least limit in seconds."""


class Piece(NamedTuple):
    module: str
    """A module of this folder, with a function that has the piece's name."""
    shows: str
    engines: tuple[str, ...] = ()
    """Keys of ENGINES. Engines stay for the next piece that names them."""
    needs_vllm: bool = True

    def function(self, name: str) -> Callable[..., None]:
        return getattr(importlib.import_module(f"benchmarks.gpu_check.{self.module}"), name)


V1, V2 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}
EAGER = {"max_num_seqs": 64, "enforce_eager": True}
WITHOUT_INDUCTOR = {"mode": 0, "cudagraph_mode": "FULL"}
"""CUDA graphs of the kernels that eager mode runs. Inductor would add a minute to the start of every large engine, and
needs the torch that vLLM was built for.
"""
NO_WARM_UP = {"enable_jit_warmup": False}
"""The first repeat of a piece compiles Triton kernels, and is not counted."""
GRAPHS = {"max_num_seqs": 64, "compilation_config": WITHOUT_INDUCTOR, "kernel_config": NO_WARM_UP}
FLOAT32 = {"dtype": "float32"}
TINY = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.1, "enable_prefix_caching": True}
"""`kv_cache_memory_bytes`: vLLM need not measure free memory, which fails while another engine starts."""
TINY_GRAPHS = {
    **TINY,
    "max_num_seqs": 64,
    "compilation_config": {**WITHOUT_INDUCTOR, "cudagraph_capture_sizes": [1, 8, 64]},
}
GRAPH_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]
LARGE = {
    "max_num_seqs": 256,
    "max_model_len": 4096,
    "kv_cache_memory_bytes": 14 << 30,
    "gpu_memory_utilization": 0.4,
    "enable_prefix_caching": True,
    "compilation_config": {**WITHOUT_INDUCTOR, "cudagraph_capture_sizes": GRAPH_SIZES},
    "kernel_config": NO_WARM_UP,
}
"""14 GiB of KV cache hold 100k tokens of Qwen3-8B: no piece here preempts."""
DRAFTING = {
    **LARGE,
    "max_num_seqs": 64,
    "compilation_config": {
        **WITHOUT_INDUCTOR,
        "cudagraph_capture_sizes": [(1 + MAX_DRAFT_TOKENS) * size for size in (1, 2, 4, 8, 16, 32, 64)],
    },
}
"""A step verifies as many tokens for each sequence as there may be drafts, and one."""
MOVING = {**LARGE, "max_num_seqs": 16, "max_model_len": 32_768, "kv_cache_memory_bytes": 8 << 30}

ENGINES: dict[str, Settings] = {
    "v1 synchronous": Settings(options={**EAGER, **FLOAT32, **TINY, "async_scheduling": False}, environment=V1),
    "v1 asynchronous": Settings(options={**EAGER, **FLOAT32, **TINY, "async_scheduling": True}, environment=V1),
    "v2 eager": Settings(options={**EAGER, **FLOAT32, **TINY}, environment=V2),
    "v2 graphs": Settings(options={**GRAPHS, **FLOAT32, **TINY}, environment=V2),
    "float32 from": Settings(options={**EAGER, **FLOAT32, **TINY}),
    "float32 to": Settings(options={**EAGER, **FLOAT32, **TINY}),
    "bfloat16 from": Settings(options={**EAGER, **TINY, "dtype": "bfloat16"}),
    "bfloat16 to": Settings(options={**EAGER, **TINY, "dtype": "bfloat16"}),
    "8B, ours": Settings("rollout", "8b", LARGE),
    "8B, stock": Settings("stock", "8b", LARGE),
    "8B, drafts": Settings("drafts", "8b", DRAFTING, V1),
    "8B, no drafts": Settings("rollout", "8b", {**LARGE, "max_num_seqs": 64}),
    "8B, from": Settings("rollout", "8b", MOVING),
    "8B, to": Settings("rollout", "8b", MOVING),
    "blocking": Settings(options={**EAGER, **TINY}, environment={"CUDA_LAUNCH_BLOCKING": "1"}),
    "not blocking": Settings(options={**EAGER, **TINY}),
    "sleeps": Settings(options={**EAGER, **FLOAT32, **TINY, "enable_sleep_mode": True}),
    "sync check, ours": Settings(options=TINY_GRAPHS, environment={"VLLM_GPU_SYNC_CHECK": "error"}),
    "sync check, stock": Settings("stock", options=TINY_GRAPHS, environment={"VLLM_GPU_SYNC_CHECK": "error"}),
    "jit monitor, ours": Settings(options={**TINY_GRAPHS, "jit_monitor_mode": "error"}),
    "jit monitor, stock": Settings("stock", options={**TINY_GRAPHS, "jit_monitor_mode": "error"}),
}

IN_SMALL = {
    "enforce_eager": True,
    "max_num_seqs": 32,
    "max_model_len": 512,
    "max_num_batched_tokens": 16_384,
    "dtype": "float32",
    "kv_cache_memory_bytes": 1 << 28,
}
"""Options of every engine in a rehearsal, which replace those above."""
ONLY_ON_GPU = frozenset({"compilation_config", "enable_sleep_mode", "gpu_memory_utilization", "kernel_config"})


def rehearsed(settings: Settings) -> Settings:
    """Settings of the engine for a rehearsal on a CPU, which has runner V1 only."""
    options = {name: value for name, value in settings.options.items() if name not in ONLY_ON_GPU} | IN_SMALL
    environment = {name: value for name, value in settings.environment.items() if "V2" not in name}
    return replace(settings, options=options, environment=environment)


RUNNERS = ("v1 synchronous", "v1 asynchronous", "v2 eager", "v2 graphs")
BOTH_8B = ("8B, ours", "8B, stock")

PIECES: dict[str, Piece] = {
    "operators": Piece("kernels", "every operator agrees with float64", needs_vllm=False),
    "bandwidth": Piece("kernels", "share of the memory's bandwidth that operators reach", needs_vllm=False),
    "repeatable_scores": Piece("kernels", "quality_head is bit-equal over 1,000 repeats", needs_vllm=False),
    "runners": Piece("observed", "V1 and V2, eager and graphs: confidences and scores are what torch says", RUNNERS),
    "move_float32": Piece("moves", "a group moves by CUDA IPC and says what it would have said",
                          ("float32 from", "float32 to")),
    "move_bfloat16": Piece("moves", "the same in bfloat16", ("bfloat16 from", "bfloat16 to")),
    "overhead": Piece("cost", "8B, 256 sequences: throughput over stock vLLM, and what a due step costs", BOTH_8B),
    "race": Piece("cost", "8B: the first 8 of 16 against waiting for all, stock and ours", BOTH_8B),
    "training": Piece("cost", "8B: what training the quality head costs beside decoding", ("8B, ours",)),
    "profile": Piece("ptl", "8B: a whole PTL profile, in ptl.json", ("8B, ours",)),
    "served_race": Piece("served", "8B, by HTTP: a race against stock `vllm serve` and a client that aborts"),
    "drafts": Piece("drafts", "8B: drafts from memory, and what their synchronous loop costs",
                    ("8B, drafts", "8B, no drafts")),
    "move_8b": Piece("moves", "8B: seconds of a move by CUDA IPC and by recompute", ("8B, from", "8B, to")),
    "launch_blocking": Piece("observed", "runs are equal with and without CUDA_LAUNCH_BLOCKING",
                             ("blocking", "not blocking")),
    "sleep": Piece("observed", "an engine that slept still says what torch says", ("sleeps",)),
    "sync_check": Piece("observed", "no host synchronisation in a step that stock vLLM does not make",
                        ("sync check, ours", "sync check, stock")),
    "jit_monitor": Piece("observed", "no compilation in a step that stock vLLM does not make",
                         ("jit monitor, ours", "jit monitor, stock")),
}  # fmt: skip


class Estimates(NamedTuple):
    """Estimated seconds of pieces and of engine starts."""

    seconds: dict[str, float]

    @classmethod
    def read(cls) -> Estimates:
        return cls(json.loads(ESTIMATES.read_text())["seconds"])

    def piece(self, name: str) -> float:
        return self.seconds[name]

    def starts(self, engines: Iterable[str]) -> float:
        """Estimated seconds to start these engines together."""
        return max((self.seconds[START + engine] for engine in engines), default=0.0)

    def limit(self, name: str) -> float:
        return max(LEAST_LIMIT_S, LIMIT_FACTOR * self.piece(name))


def kernels_folder() -> Path | None:
    """The folder of the Triton kernels. None where a checkout that is not installed hides the installed package."""
    spec = find_spec("vllm_rollout.kernels")
    return None if spec is None else Path(spec.submodule_search_locations[0])


def sources_of(name: str, device: str) -> str:
    """A hash of the device and of all code that a piece runs. A piece with a new hash is run again.

    Raises: FileNotFoundError for a folder of it that is not there.
    """
    package = Path(find_spec("vllm_rollout").submodule_search_locations[0])
    parts = ["."] if PIECES[name].needs_vllm else OF_OPERATORS
    folders = [(HERE, "*.py"), (kernels_folder(), "*.py"), *((package / part, "**/*.py") for part in parts)]
    if device == "cpu":
        folders.append((package, "_C*"))
    digest = hashlib.sha256(device.encode())
    for folder, pattern in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}, whose code {name} runs, is not there")
        for path in sorted(folder.glob(pattern)):
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]
