"""Kernel benchmark: the active implementation of every operator against its torch reference, on this machine.

Invariant: both sides are timed in turns on the same tensors in the same process, so that what else the machine does
hits both; a row reports the median and the quartiles of each and the median of the pairwise ratios. Where the
reference is what serves the device, there is one side.

`steps` is what the candidates of one engine step cost together: the operators in the order in which the worker calls
them. Those that a step does not need are not called: a step in which no row is due pays neither for the quality head
nor for trace confidence, and a step without candidates pays nothing.

One CPU thread by default, and then its CPU time is what is measured (the clock itself is 0.4 us of it): on a machine
with other work, elapsed time is the scheduler's. With more threads it cannot be helped: a parallel section ends with
its slowest thread (8 ms for a call of 0.05 ms was seen), on either side.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import arguments_of, publish, record_of_run
from benchmarks.gpu_check.kernels import DTYPES, tensors_of
from benchmarks.kernel_inputs import MAX_LEN, NUM_HIDDEN, Inputs
from benchmarks.tables import columns, number
from vllm_rollout.config import CONFIDENCE_WINDOW_TOKENS
from vllm_rollout.tracker.dispatch import OPERATORS, REFERENCES, Operator
from vllm_rollout.tracker.ops import active_implementation

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One operator on arguments of one size."""

    operator: Operator
    size: dict[str, int | str]
    arguments: tuple[Any, ...] = field(repr=False)
    work: dict[str, float] = field(default_factory=dict)
    """What the operator has to do at least, by the unit that a rate is given in: divided by the time."""


def parse_arguments() -> argparse.Namespace:
    parser = arguments_of(__doc__, "kernels")
    add = parser.add_argument
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    add("--operator", choices=OPERATORS, nargs="+", default=list(OPERATORS), help="operators to measure alone")
    add("--rows", type=int, nargs="+", default=[1, 16, 64, 256], help="rows of a step")
    add("--vocab", type=int, nargs="+", default=[512, 49152, 151936], help="vocabulary sizes")
    add("--due", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024], help="rows that are due")
    add("--hidden", type=int, nargs="+", default=[576, 896, 4096], help="sizes of the hidden state")
    add("--dtype", choices=DTYPES, nargs="+", default=["bfloat16", "float32"], help="of logits and hidden states")
    add("--device", choices=("cpu", "cuda"), nargs="+", default=devices, help="CUDA too where there is one")
    add("--pairs", type=int, default=31, help="paired runs of a row at most")
    add("--min-pairs", type=int, default=5, help="paired runs of a row at least")
    add("--seconds", type=float, default=1.5, help="stop a row after this long, with --min-pairs done")
    add("--threads", type=int, default=1, help="CPU threads for both sides; more only on a machine without other work")
    return parser.parse_args()


def capacity_for(num_rows: int) -> int:
    """Slots of a tracker that has num_rows candidates: it starts with 256 and doubles."""
    return max(256, 1 << (num_rows - 1).bit_length())


def cases(inputs: Inputs, arguments: argparse.Namespace) -> Iterator[Case]:
    for vocab_size in arguments.vocab:
        for num_rows in arguments.rows:
            for dtype in arguments.dtype:
                tensors = inputs.token_confidence(num_rows, vocab_size, DTYPES[dtype])
                size = {"num_rows": num_rows, "vocab_size": vocab_size, "dtype": dtype}
                yield Case("token_confidence", size, tensors, {"logits_gb_per_s": tensors[0].nbytes / 1e9})
    for hidden_size in arguments.hidden:
        for num_due in arguments.due:
            for dtype in arguments.dtype:
                tensors = inputs.quality_head(num_due, hidden_size, DTYPES[dtype])
                size = {"num_due": num_due, "hidden_size": hidden_size, "num_hidden": NUM_HIDDEN, "dtype": dtype}
                num_bytes = tensors[0].nbytes + tensors[2].nbytes
                work = {"gflop_per_s": 2e-9 * num_due * hidden_size * NUM_HIDDEN, "gb_per_s": num_bytes / 1e9}
                yield Case("quality_head", size, tensors, work)
    for num_rows in arguments.rows:
        capacity = capacity_for(num_rows)
        size = {"num_rows": num_rows, "capacity": capacity}
        yield Case("update_confidence", size, inputs.update_confidence(num_rows, capacity))
    for num_due in arguments.due:
        size = {"num_due": num_due, "max_len": MAX_LEN, "window": CONFIDENCE_WINDOW_TOKENS}
        yield Case("windowed_confidence", size, inputs.windowed_confidence(num_due))


def step_calls(inputs: Inputs, num_rows: int, num_due: int, vocab_size: int, hidden_size: int) -> tuple[Call, Call]:
    """The operators of one step, active and reference, in the order in which the worker calls them."""
    logits_and_rows = inputs.token_confidence(num_rows, vocab_size, torch.bfloat16)
    slots, positions, _, *state = inputs.update_confidence(num_rows, capacity_for(num_rows))
    trace = inputs.windowed_confidence(num_due)
    head = inputs.quality_head(num_due, hidden_size, torch.bfloat16)

    def call_with(functions: dict[Operator, Callable[..., Any]]) -> Call:
        def call() -> None:
            confidence = functions["token_confidence"](*logits_and_rows)
            functions["update_confidence"](slots, positions, confidence, *state)
            if num_due:
                functions["windowed_confidence"](*trace)
                functions["quality_head"](*head)

        return call

    active = {name: active_implementation(inputs.device, name).compute for name in OPERATORS}
    return call_with(active), call_with(REFERENCES)


def clock_for(device: str, num_threads: int) -> Callable[[], float]:
    return time.thread_time if device == "cpu" and num_threads == 1 else time.perf_counter


def timed(call: Call, device: str, num_threads: int) -> float:
    """Seconds from the call until the results are there."""
    clock = clock_for(device, num_threads)
    start = clock()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def measure(kernel: Call, reference: Call | None, device: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians in microseconds of both sides, after one untimed call of each."""
    kernel()
    if reference is not None:
        reference()
    kernel_s, reference_s = [], []
    deadline = time.perf_counter() + arguments.seconds
    while len(kernel_s) < arguments.min_pairs or (len(kernel_s) < arguments.pairs and time.perf_counter() < deadline):
        kernel_s.append(timed(kernel, device, arguments.threads))
        if reference is not None:
            reference_s.append(timed(reference, device, arguments.threads))
    result = {
        "num_pairs": len(kernel_s),
        "kernel_us": median_us(kernel_s),
        "kernel_quartiles_us": quartiles_us(kernel_s),
    }
    if reference is None:
        return result
    ratios = [other / own for own, other in zip(kernel_s, reference_s, strict=True)]
    return result | {
        "reference_us": median_us(reference_s),
        "reference_quartiles_us": quartiles_us(reference_s),
        "speedup": round(statistics.median(ratios), 2),
    }


def median_us(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 2)


def quartiles_us(seconds: list[float]) -> list[float]:
    """First and third quartile in microseconds."""
    first, _, third = statistics.quantiles(seconds, n=4)
    return [round(first * 1e6, 2), round(third * 1e6, 2)]


def largest_difference(case: Case, compute: Callable[..., Any]) -> float:
    """Between the results of both sides; each gets arguments of its own, which some operators change."""
    results = []
    for function in (compute, REFERENCES[case.operator]):
        own = [value.clone() if isinstance(value, Tensor) else value for value in case.arguments]
        results.append(tensors_of(function(*own)))
    return max((a - b).abs().max().item() for a, b in zip(*results, strict=True))


def measure_case(case: Case, device: str, arguments: argparse.Namespace) -> dict[str, Any]:
    implementation = active_implementation(device, case.operator)
    reference = REFERENCES[case.operator]
    row = {"operator": case.operator, "device": device, "implementation": implementation.name, **case.size}
    if implementation.name == "torch":
        row |= measure(lambda: implementation.compute(*case.arguments), None, device, arguments)
    else:
        kernel, other = (lambda: implementation.compute(*case.arguments)), (lambda: reference(*case.arguments))
        row |= measure(kernel, other, device, arguments)
        row["largest_difference"] = largest_difference(case, implementation.compute)
    for unit, amount in case.work.items():
        row[unit] = round(amount / row["kernel_us"] * 1e6, 2)
    return row


def measure_steps(inputs: Inputs, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    vocab_size, hidden_size = max(arguments.vocab), max(arguments.hidden)
    for num_rows in arguments.rows:
        for num_due in sorted({0, 1, num_rows}):
            kernel, reference = step_calls(inputs, num_rows, num_due, vocab_size, hidden_size)
            size = {"num_rows": num_rows, "num_due": num_due, "vocab_size": vocab_size, "hidden_size": hidden_size}
            result = measure(kernel, reference, inputs.device, arguments)
            yield {"device": inputs.device, **size, "dtype": "bfloat16", **result}


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    record = record_of_run(
        seed=arguments.seed,
        workload="logits from a normal distribution with standard deviation 4; hidden "
        f"states and a head of {NUM_HIDDEN} units from normal distributions; both sides in turns on the same tensors; "
        "medians in microseconds",
    )
    record["hardware"] |= {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": arguments.threads,
    }
    record["clock"] = {device: clock_for(device, arguments.threads).__name__ for device in arguments.device}
    rows, steps = [], []
    for device in arguments.device:
        inputs = Inputs(device, arguments.seed)
        wanted = (case for case in cases(inputs, arguments) if case.operator in arguments.operator)
        rows += [measure_case(case, device, arguments) for case in wanted]
        steps += measure_steps(inputs, arguments)
    publish(arguments, {**record, "rows": rows, "steps": steps}, tables)


def tables(result: dict[str, Any]) -> str:
    sizes = ("num_rows", "num_due", "capacity", "max_len", "vocab_size", "hidden_size", "dtype")
    cells = {
        "device": lambda row: row["device"],
        "operator": lambda row: f"{row['operator']}, {row['implementation']}" if "operator" in row else "step",
        "size": lambda row: ", ".join(f"{key} {row[key]}" for key in sizes if key in row),
        "us": lambda row: number(row["kernel_us"], 0),
        "torch reference, us": lambda row: number(row.get("reference_us"), 0),
        "factor": lambda row: number(row.get("speedup"), 1),
    }
    return columns("Operators, and what a step pays in all", [*result["rows"], *result["steps"]], cells)


if __name__ == "__main__":
    main()
