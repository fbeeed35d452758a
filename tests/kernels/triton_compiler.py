"""Compiles every Triton kernel for Hopper and Blackwell without a GPU: triton_compiler.py RESULTS, written as JSON.

RESULTS maps "module.kernel[dtype] on sm_NNa" to what its machine code needs and does. A process of its own, because a
kernel imported under TRITON_INTERPRET cannot be compiled.
"""

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import vllm_rollout.kernels

ROW_DTYPES = ("fp32", "bf16", "fp16")
CAPABILITIES = (90, 100)
"""Triton compiles for sm_90a (H100, H200) and sm_100a (B200)."""
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
ORDERING = frozenset({"STG", "LDG", "BAR", "MEMBAR", "ATOMG", "ERRBAR", "CCTL", "FENCE"})

Variant = tuple[str, dict[str, str], dict[str, object], dict[str, int]]


def token_confidence_signature(logits: str) -> dict[str, str]:
    pointers = {"logits_ptr": f"*{logits}", "rows_ptr": "*i64", "confidence_ptr": "*fp32"}
    return pointers | dict.fromkeys(("row_stride", "num_rows", "vocab_size"), "i32")


def quality_head_signature(hidden: str) -> dict[str, str]:
    weights = dict.fromkeys(("w1_ptr", "b1_ptr", "w2_ptr", "b2_ptr", "score_ptr", "parts_ptr"), "*fp32")
    sizes = ("hidden_stride", "rows_stride", "num_rows", "num_due", "hidden_size", "num_hidden", "split_steps")
    pointers = {"hidden_ptr": f"*{hidden}", "rows_ptr": "*i64", **weights, "arrived_ptr": "*i32"}
    return pointers | dict.fromkeys(sizes, "i32")


UNSPECIALISED = ("rows_ptr", "slots_ptr", "positions_ptr", "values_ptr")
ALIGNED_SIZES = ("row_stride", "vocab_size", "hidden_stride", "hidden_size", "num_hidden")
"""Multiples of 16 for the models there are, as other pointers are: it decides how wide a kernel's loads are."""


def alignment(kernel: triton.JITFunction, constants: dict[str, object]) -> dict[tuple[int], list[list[object]]]:
    names = [name for name in kernel.arg_names if name.endswith("_ptr") or name in ALIGNED_SIZES]
    names = [name for name in names if name not in UNSPECIALISED]
    return {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in names if name not in constants}


def update_confidence_signature() -> dict[str, str]:
    state = ("values_ptr", "means_ptr", "m2s_ptr", "trace_ptr", "moments_ptr")
    sizes = ("num_rows", "capacity", "num_kept", "trace_length")
    pointers = {"slots_ptr": "*i64", "positions_ptr": "*i64", **dict.fromkeys(state, "*fp32")}
    return pointers | dict.fromkeys(sizes, "i32")


def kernels() -> dict[str, triton.JITFunction]:
    """Every kernel in vllm_rollout.kernels, by "module.name"; other functions are compiled as parts of them."""
    found = {}
    for info in pkgutil.iter_modules(vllm_rollout.kernels.__path__):
        module = importlib.import_module(f"vllm_rollout.kernels.{info.name}")
        for name, value in vars(module).items():
            is_own = isinstance(value, triton.JITFunction) and value.fn.__module__ == module.__name__
            if is_own and name.endswith("_kernel"):
                found[f"{info.name}.{name}"] = value
    return found


def variants() -> dict[str, list[Variant]]:
    """By kernel: label, signature, compile-time constants and options of each variant that is launched."""
    from vllm_rollout.kernels import confidence, quality_head, token_confidence

    token_constants = {name: getattr(token_confidence, name) for name in ("NUM_STAGES", "NUM_BLOCKS", "BLOCK_SIZE")}
    token_options = {"num_warps": token_confidence.NUM_WARPS}
    head_constants = {
        "rows_stride": 1,
        "PRECISION": quality_head.PRECISION,
        "BLOCK_HIDDEN": 128,
        "BLOCK_SIZE": quality_head.BLOCK_SIZE,
    }
    head_options = {"num_warps": quality_head.NUM_WARPS, "num_stages": quality_head.NUM_STAGES}
    return {
        "token_confidence.token_confidence_kernel": [
            (dtype, token_confidence_signature(dtype), token_constants, token_options) for dtype in ROW_DTYPES
        ],
        "quality_head.quality_head_kernel": [
            (
                f"{dtype}, {block_due} rows",
                quality_head_signature(dtype),
                {**head_constants, "BLOCK_DUE": block_due},
                head_options,
            )
            for dtype in ROW_DTYPES
            for block_due in (quality_head.FEW_DUE, quality_head.MANY_DUE)
        ],
        "confidence.update_confidence_kernel": [
            (
                "",
                update_confidence_signature(),
                {"BLOCK_ROWS": confidence.BLOCK_ROWS},
                {"num_warps": confidence.NUM_WARPS},
            )
        ],
    }


def machine_code(cubin: bytes) -> dict[str, object]:
    """Registers of a thread, bytes that it spills, its loads from global memory by their width in bits, instructions of
    its largest loop, and the operations that order memory, in their order."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = run_cuobjdump("--dump-resource-usage", file.name)
        listing = run_cuobjdump("--dump-sass", file.name)
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\d+\s+)?([A-Z0-9_.]+).*?);", listing)
    operations = [operation for _, _, operation in lines]
    branches = [(int(address, 16), target) for address, line, _ in lines
                if (target := re.search(r"BRA(?:\.U)?.*?0x([0-9a-f]+)", line))]  # fmt: skip
    loops = [(int(target[1], 16), address) for address, target in branches if int(target[1], 16) < address]
    loads = [re.search(r"\.(64|128|256|U8|U16)\b", each) for each in operations if each.startswith("LDG")]
    return {
        "registers": found["REG"],
        "spilled_bytes": found["STACK"] + found["LOCAL"],
        "loads": Counter("32" if width is None else width[1].lstrip("U") for width in loads),
        "largest_loop": max(
            (sum(start <= int(address, 16) <= end for address, _, _ in lines) for start, end in loops), default=0
        ),
        "order": [each for each in operations if each.split(".")[0] in ORDERING],
    }


def run_cuobjdump(option: str, path: str) -> str:
    return subprocess.run([CUOBJDUMP, option, path], capture_output=True, text=True, check=True, timeout=60).stdout


def main(results_path: str) -> None:
    results: dict[str, dict[str, object]] = {}
    known = variants()
    for kernel_name, kernel in kernels().items():
        if kernel_name not in known:
            raise KeyError(f"{kernel_name} is not listed in variants() of {Path(__file__).name}: add its signature")
        for label, signature, constants, options in known[kernel_name]:
            signature = {**signature, **dict.fromkeys(constants, "constexpr")}
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=alignment(kernel, constants))
            for capability in CAPABILITIES:
                compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
                results[f"{kernel_name}[{label}] on sm_{capability}a"] = {
                    **machine_code(compiled.asm["cubin"]),
                    "warps": options["num_warps"],
                    "shared_bytes": compiled.metadata.shared,
                }
    Path(results_path).write_text(json.dumps(results))


main(sys.argv[1])
