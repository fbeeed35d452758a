"""The piece that writes a whole PTL profile of a model of 8B's shape, for `vllm-rollout simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console

from benchmarks.gpu_check.bench import Bench
from vllm_rollout.profiling.engine_process import OnWait
from vllm_rollout.profiling.grid import Wanted
from vllm_rollout.profiling.options import ProfileOptions
from vllm_rollout.profiling.run import run

GRID = Wanted(batch_sizes=(1, 2, 4, 8, 16, 32, 64, 128, 192, 256), contexts=(128, 2048), num_steps=24)
SMALL_GRID = Wanted(batch_sizes=(1, 2, 4, 8), contexts=(128,), quick=True)
LEAST_R_SQUARED = 0.98


def profile(bench: Bench) -> None:
    """Measure point by point, as `vllm-rollout profile` does, so that a profile ended by a time limit can be used."""
    (engine,) = bench.engines.values()

    def start(size: int, flags: Sequence[str], on_wait: OnWait) -> AbstractContextManager[Any]:
        return nullcontext(engine)

    options = ProfileOptions(
        "8b",
        bench.folder / "ptl.json",
        SMALL_GRID if bench.small else GRID,
        serve_flags=("--load-format", "dummy"),
        restart=True,
        command="python -m benchmarks.gpu_check",
    )
    written = run(options, Console(stderr=True, quiet=True), start)
    for fit in written.fits:
        bench.value(context=fit.context_tokens, batch_sizes=fit.batch_sizes, seconds=fit.seconds)
        bench.speed(f"context {fit.context_tokens}: R² of the curve", fit.r_squared >= LEAST_R_SQUARED,
                    round(fit.r_squared, 5), LEAST_R_SQUARED)  # fmt: skip
    bench.check("curves were fitted", bool(written.fits), len(written.fits), "> 0")
    bench.result("step of 1 and of most, ms", {
        str(fit.context_tokens): [round(1e3 * fit.curve(1), 3), round(1e3 * fit.curve(fit.batch_sizes[-1]), 3)]
        for fit in written.fits
    })  # fmt: skip
