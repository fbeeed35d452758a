"""Every instruction set of the C++ row kernel, of which the operator only ever runs the best one."""

import ctypes
import math
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.kernels.token_confidence_cases import random_case, special_cases
from tests.support.waiting import WAIT_S

CSRC = Path(__file__).parents[2] / "csrc"
COMPILER = shutil.which("g++") or shutil.which("clang++")
IS_X86 = platform.machine() in ("x86_64", "AMD64")
OPTIONS = ["-std=c++20", "-O3", "-fPIC", "-fopenmp-simd", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]

VARIANTS = {
    "baseline": [],
    "x86_64_v3": ["-march=x86-64-v3"],
    "x86_64_v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
}
CPU_FLAG = {"baseline": "fpu", "x86_64_v3": "avx2", "x86_64_v4": "avx512vl"}
NO_FLOAT32_SUM = ("nan and inf", "lowest number as a mask")
LOGITS_TYPE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@pytest.fixture(scope="module", params=VARIANTS)
def row_sums(request, tmp_path_factory):
    """Function of one row: its largest logit, the two sums and the number of entries that are not -inf."""
    variant = request.param
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    if variant != "baseline" and not IS_X86:
        pytest.skip(f"{variant} is for x86-64")
    if IS_X86 and CPU_FLAG[variant] not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this CPU has no {CPU_FLAG[variant]}")

    folder = tmp_path_factory.mktemp(variant)
    source = folder / "row_sums.cpp"
    source.write_text(f"""
        #include "token_confidence_row.cpp"
        extern "C" void row_sums(const void* row, int64_t vocab_size, int type, double* out) {{
          const auto sums = vllm_rollout::{variant}::row_sums(row, vocab_size, vllm_rollout::LogitsType(type));
          out[0] = sums.max; out[1] = sums.sum_exp; out[2] = sums.sum; out[3] = sums.num_unmasked;
        }}
    """)
    defines = [f"-DVLLM_ROLLOUT_ISA={variant}", "-DVLLM_ROLLOUT_X86_VARIANTS", f"-I{CSRC}"]
    library = folder / "row_sums.so"
    command = [
        COMPILER,
        *OPTIONS,
        *VARIANTS[variant],
        *defines,
        f"-I{CSRC}",
        "-shared",
        str(source),
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True, timeout=WAIT_S)
    function = ctypes.CDLL(str(library)).row_sums
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]
    function.restype = None

    def call(row: torch.Tensor) -> list[float]:
        sums = torch.empty(4, dtype=torch.float64)
        function(row.data_ptr(), row.numel(), LOGITS_TYPE[row.dtype], sums.data_ptr())
        return sums.tolist()

    return call


@pytest.mark.parametrize("dtype", LOGITS_TYPE)
def test_sums_agree_with_float64(row_sums, dtype):
    cases = [random_case(3, 7, dtype), random_case(2, 1025, dtype), random_case(2, 49152, dtype)]
    cases += [case for name, case in special_cases(dtype).items() if name not in NO_FLOAT32_SUM]
    for logits, *_ in cases:
        for row in logits:
            largest, sum_exp, total, num_unmasked = row_sums(row)
            z = row.double()
            z = z[z != -torch.inf]
            assert num_unmasked == len(z)
            if not len(z):
                continue
            assert largest == z.max()
            assert sum_exp == pytest.approx((z - z.max()).exp().sum().item(), rel=1e-6)
            assert total == pytest.approx(z.sum().item(), rel=1e-5, abs=1e-6 * z.abs().sum().item())


@pytest.mark.parametrize("undefined", [math.nan, math.inf])
@pytest.mark.parametrize("position", [0, 15, 16, 1500])
def test_nan_and_inf_anywhere_make_the_largest_less_the_sum_nan(row_sums, undefined, position):
    row = torch.zeros(1501)
    row[position] = undefined
    largest, _, total, _ = row_sums(row)
    assert math.isnan(largest - total)
