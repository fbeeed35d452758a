"""Compiles every Triton kernel for sm_90 without a GPU: triton_compiler.py RESULTS, written as JSON.

RESULTS maps "module.kernel[dtype]" to the target line of its PTX and the size of its cubin in bytes. A process of its
own, because a kernel imported under TRITON_INTERPRET cannot be compiled.
"""

import importlib
import json
import pkgutil
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import vllm_rollout.kernels

ROW_DTYPES = ("fp32", "bf16", "fp16")

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


def main(results_path: str) -> None:
    results: dict[str, dict[str, object]] = {}
    known = variants()
    for kernel_name, kernel in kernels().items():
        if kernel_name not in known:
            raise KeyError(f"{kernel_name} is not listed in variants() of {Path(__file__).name}: add its signature")
        for label, signature, constants, options in known[kernel_name]:
            signature = {**signature, **dict.fromkeys(constants, "constexpr")}
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=alignment(kernel, constants))
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            target = next(line for line in compiled.asm["ptx"].splitlines() if line.startswith(".target"))
            results[f"{kernel_name}[{label}]"] = {
                "target": target,
                "cubin_bytes": len(compiled.asm["cubin"]),
                "shared_bytes": compiled.metadata.shared,
            }
    Path(results_path).write_text(json.dumps(results))


main(sys.argv[1])
