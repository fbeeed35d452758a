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

LOGITS = ("fp32", "bf16", "fp16")


def token_stats_signature(logits: str) -> dict[str, str]:
    stats = dict.fromkeys(("logprob_ptr", "entropy_ptr", "confidence_ptr"), "*fp32")
    sizes = dict.fromkeys(("row_stride", "sampled_stride", "vocab_size"), "i32")
    return {"logits_ptr": f"*{logits}", "sampled_ptr": "*i64", **stats, **sizes}


def kernels() -> dict[str, triton.JITFunction]:
    """Every kernel in vllm_rollout.kernels, by "module.name"."""
    found = {}
    for info in pkgutil.iter_modules(vllm_rollout.kernels.__path__):
        module = importlib.import_module(f"vllm_rollout.kernels.{info.name}")
        for name, value in vars(module).items():
            if isinstance(value, triton.JITFunction) and value.fn.__module__ == module.__name__:
                found[f"{info.name}.{name}"] = value
    return found


def variants() -> dict[str, list[tuple[str, dict[str, str], dict[str, int], dict[str, int]]]]:
    """By kernel: label, signature, compile-time constants and options of each variant that is launched."""
    from vllm_rollout.kernels import token_stats

    constants = {"NUM_BLOCKS": token_stats.NUM_BLOCKS, "BLOCK_SIZE": token_stats.BLOCK_SIZE}
    options = {"num_warps": token_stats.NUM_WARPS}
    return {
        "token_stats.token_stats_kernel": [
            (logits, token_stats_signature(logits), constants, options) for logits in LOGITS
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
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            target = next(line for line in compiled.asm["ptx"].splitlines() if line.startswith(".target"))
            results[f"{kernel_name}[{label}]"] = {"target": target, "cubin_bytes": len(compiled.asm["cubin"])}
    Path(results_path).write_text(json.dumps(results))


main(sys.argv[1])
