"""Model Runner V2, the GPU's default, on a machine without a GPU.

First on PYTHONPATH with VLLM_USE_V2_MODEL_RUNNER=1: vLLM's CPU build then believes that Triton has a CPU backend, and
the runner's kernels run in Triton's interpreter. Slow, but the code path of the GPU runner.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import triton.backends as triton_backends
import triton.language as tl
from triton.language.extra import libdevice


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class _Backend:
    driver = _Driver
    compiler = None


triton_backends.backends["cpu"] = _Backend()


def _log1p(value):
    return tl.log(1 + value)


# Of the GPU's mathematical library the interpreter has nothing; vLLM 0.29 and 0.30 draw their noise with this one.
libdevice.log1p = _log1p
