"""Occupancy of the Triton kernels on sm_90, without a GPU: compiled ahead of time, registers read from the cubin.

Invariant: nothing is run and nothing is timed: what the table says is how many programs of a kernel one multiprocessor
can hold, how many bytes of logits they have on their way, and how many instructions its loop has for each entry, which
together bound the bandwidth that can be reached.

`python -m benchmarks.occupancy` prints a row per variant of token_confidence; the one in use is marked. Needs triton.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_rollout.kernels import token_confidence as kernel

NUM_REGISTERS, MAX_WARPS, MAX_PROGRAMS, SHARED_BYTES = 65_536, 64, 32, 227 * 1024
"""Of one multiprocessor of sm_90."""
REGISTER_UNIT = 256
"""Registers are given to a warp in multiples of this."""
ENTRY_BYTES = {"bf16": 2, "fp32": 4}


class Variant(NamedTuple):
    dtype: str
    num_warps: int
    num_blocks: int
    entries_per_thread: int
    num_stages: int

    @property
    def is_used(self) -> bool:
        entries = kernel.BLOCK_SIZE // (32 * kernel.NUM_WARPS)
        return self[1:] == (kernel.NUM_WARPS, kernel.NUM_BLOCKS, entries, kernel.NUM_STAGES)

    @property
    def step_entries(self) -> int:
        """Of one step of the loop, by all threads."""
        return 32 * self.num_warps * self.num_blocks * self.entries_per_thread


def compiled(variant: Variant) -> triton.compiler.CompiledKernel:
    constants = {
        "NUM_STAGES": variant.num_stages,
        "NUM_BLOCKS": variant.num_blocks,
        "BLOCK_SIZE": 32 * variant.num_warps * variant.entries_per_thread,
    }
    pointers = {"logits_ptr": f"*{variant.dtype}", "rows_ptr": "*i64", "confidence_ptr": "*fp32"}
    sizes = dict.fromkeys(("row_stride", "num_rows", "vocab_size"), "i32")
    names = kernel.token_confidence_kernel.arg_names
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in ("logits_ptr", "row_stride", "vocab_size")}
    source = ASTSource(
        fn=kernel.token_confidence_kernel,
        signature=pointers | sizes | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs=aligned,
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": variant.num_warps})


def tool(name: str, *options: str, cubin: bytes) -> str:
    """What one of the CUDA tools that come with triton prints about a cubin."""
    program = Path(triton.backends.nvidia.__file__).parent / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, *options, file.name], check=True, capture_output=True, text=True).stdout


def resources(cubin: bytes) -> dict[str, int]:
    """REG and STACK (spilled bytes) of the only kernel in a cubin."""
    printed = tool("cuobjdump", "--dump-resource-usage", cubin=cubin)
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", printed)}


def loop_instructions(cubin: bytes) -> int:
    """Instructions of the loop with the most exponentials."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops: list[list[str]] = []
    for line in tool("nvdisasm", "-c", cubin=cubin).splitlines():
        if label := re.match(r"\s*\.(L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif re.search(r"/\*[0-9a-f]{4}\*/", line):
            instructions.append(line)
            jump = re.search(r"BRA.*`\(\.(L_x_\d+)\)", line)
            if jump and jump[1] in labels:
                loops.append(instructions[labels[jump[1]] :])
    return len(max(loops, key=lambda loop: sum("MUFU.EX2" in line for line in loop)))


def programs_per_multiprocessor(registers: int, shared_bytes: int, num_warps: int) -> int:
    per_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = NUM_REGISTERS // per_warp // num_warps
    by_shared = SHARED_BYTES // max(shared_bytes + 1024, 1)
    return min(by_registers, by_shared, MAX_WARPS // num_warps, MAX_PROGRAMS)


def row(variant: Variant) -> dict[str, object]:
    kernel = compiled(variant)
    used = resources(kernel.asm["cubin"])
    shared = kernel.metadata.shared
    programs = programs_per_multiprocessor(used["REG"], shared, variant.num_warps)
    steps_on_their_way = max(1, variant.num_stages - 1)
    return {
        **variant._asdict(),
        "registers": used["REG"],
        "spilled_bytes": used["STACK"],
        "shared_bytes": shared,
        "programs": programs,
        "instructions_per_entry": round(
            loop_instructions(kernel.asm["cubin"]) * 32 * variant.num_warps / variant.step_entries, 1
        ),
        "kib_per_program": variant.step_entries * steps_on_their_way * ENTRY_BYTES[variant.dtype] / 1024,
        "used": variant.is_used,
    }


VARIANTS = [
    *[(warps, blocks, 8, stages) for warps in (8, 16) for blocks in (1, 2, 4) for stages in (1, 3)],
    *[(4, blocks, 8, 3) for blocks in (2, 4)],
]
"""Warps, blocks, entries per thread, stages."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    arguments = parser.parse_args()
    rows = [row(Variant(dtype, *variant)) for dtype in ENTRY_BYTES for variant in VARIANTS]
    columns = [name for name in rows[0] if name != "used"]
    print("| " + " | ".join(columns) + " | |")
    print("|---" * (len(columns) + 1) + "|")
    for r in rows:
        print("| " + " | ".join(f"{r[name]}" for name in columns) + f" | {'in use' if r['used'] else ''} |")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
