"""TRL's GRPOTrainer on a CPU: `python -m conformance.trl.on_cpu SCRIPT ARGUMENT...` runs a user's script.

TRL's code is unmodified except for what a CPU lacks. Colocated: vLLM's CPU kernels would pack weights, and TRL's
synchronization would then find none, so weights are kept unpacked. The engine is float32, as the trainer's model is. No
accelerator's cache is emptied. Server mode: weights go by disk (`training.weights_by_disk`).
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "INFO", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
}  # fmt: skip
SMALL = {"vllm_gpu_memory_utilization": 0.2, "vllm_max_model_length": 512}
"""Settings for a CPU's memory. A user's GPU has more."""
ON_CPU = {"use_cpu": True, "bf16": False, "model_init_kwargs": {"dtype": "float32"}, "save_strategy": "no"}


def result_of(module: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """The JSON that a program of this kit prints after RESULT, run in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | ENVIRONMENT | environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def prepare() -> None:
    """Change TRL and vLLM for a colocated trainer that is built afterwards in this process."""
    import torch
    import vllm.model_executor.layers.utils as layers
    from trl.generation import vllm_generation

    layers.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: setattr(
        layer, "cpu_linear", torch.nn.functional.linear
    )
    vllm_generation.LLM = partial(vllm_generation.LLM, dtype="float32")
    vllm_generation.empty_cache = lambda: None


@contextmanager
def of_a_cpu() -> Iterator[None]:
    """Each `GRPOConfig` made in the block has the settings that a CPU needs."""
    from trl import GRPOConfig

    init = GRPOConfig.__init__

    def with_cpu(self: object, *args: object, **settings: object) -> None:
        init(self, *args, **{**SMALL, **settings, **ON_CPU})

    with mock.patch.object(GRPOConfig, "__init__", with_cpu):
        yield


def main() -> None:
    script, model = sys.argv[1:3]
    os.environ.update(ENVIRONMENT)
    from conformance.trl.training import Run, weights_by_disk

    prepare()
    sys.argv = sys.argv[1:]
    with TemporaryDirectory() as folder, of_a_cpu(), weights_by_disk(model, Path(folder), Run()):
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
