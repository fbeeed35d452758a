"""Checks that only a GPU can make, in order of value, within a time: `python -m benchmarks.gpu_check`.

Needs no network, no git and no compiler. All outputs are in --output:

  lease.jsonl     a line per repeat, on disk at once; a second call with the same folder continues from it
  summary.md      pieces that ran, checks that failed, and results
  ptl.json        a whole profile, for `vllm-rollout simulate --profile`
  engines.log     output of the engines, of bounded size
  estimates.json  measured seconds of every piece on this machine

Exit status: 0 when all pieces passed, 1 when one did not, 2 without a GPU or the kernels.
`--device cpu` rehearses every piece on a machine without a GPU, with small sizes. A rehearsal's numbers are no
measurements.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from benchmarks.common import record_of_run, write_json
from benchmarks.gpu_check.lease import CudaTouched, Lease, measured_estimates, say
from benchmarks.gpu_check.pieces import PIECES, Estimates, kernels_folder
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.summary import summary
from vllm_rollout.doctor.machine import listed_gpus
from vllm_rollout.on_cpu import WAIT_POLICY
from vllm_rollout.process import exit_on_sigterm, runs_on_cpu

IMPORT_EVERYWHERE = "VLLM_ROLLOUT_GPU_CHECK_IMPORTS"
"""Set when importing vLLM in the parent has touched CUDA."""
NO_KERNELS = (
    "gpu_check needs vllm_rollout.kernels, and this checkout is not installed: run `pip install -e .` here. To check "
    "an installed wheel, copy the folder benchmarks/ into an empty folder and call gpu_check there."
)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all of it (default %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("gpu_check"), help="a folder (default %(default)s)")
    parser.add_argument("--pieces", help=f"only these, by comma: {', '.join(PIECES)}")
    parser.add_argument("--again", action="store_true", help="also those that ended before, with the same sources")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses, in small")
    parser.add_argument("--list", action="store_true", help="say what the pieces show and take, and end")
    chosen = parser.parse_args(arguments)
    chosen.names = list(PIECES) if chosen.pieces is None else chosen.pieces.split(",")
    if unknown := [name for name in chosen.names if name not in PIECES]:
        parser.error(f"--pieces must be of {', '.join(PIECES)}, got {', '.join(unknown)}")
    if chosen.minutes <= 0:
        parser.error(f"--minutes must be more than 0, got {chosen.minutes:g}")
    return chosen


def why_no_gpu() -> str | None:
    """The reason why there is no GPU, or None. nvidia-smi is asked, because asking torch would touch CUDA."""
    return None if "GPU " in listed_gpus() else "nvidia-smi -L lists none, hangs, or is not there"


def prepare_environment() -> None:
    """Set environment variables. Call it before torch is imported, here and in every copy."""
    defaults = {
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch asks the driver, and does not touch CUDA
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if find_spec("flashinfer") is None:
        defaults["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # vLLM imports it on a GPU without looking whether it is there
    if runs_on_cpu():
        os.environ.setdefault(*WAIT_POLICY)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def show_pieces(estimates: Estimates) -> None:
    total = 0.0
    ready: set[str] = set()
    for name, piece in PIECES.items():
        seconds = estimates.piece(name) + estimates.starts(set(piece.engines) - ready)
        ready = set(piece.engines)
        total += seconds
        say(f"{name:18} {seconds:5.0f} s, {total:5.0f} s together   {piece.shows}")


def main(arguments: list[str] | None = None) -> int:
    chosen = parse_arguments(arguments)
    estimates = Estimates.read()
    if chosen.list:
        show_pieces(estimates)
        return 0
    if chosen.device == "cuda" and (reason := why_no_gpu()) is not None:
        print(f"gpu_check needs a GPU: {reason}. `--device cpu` rehearses it without one.", file=sys.stderr)
        return 2
    if kernels_folder() is None:
        print(NO_KERNELS, file=sys.stderr)
        return 2
    prepare_environment()
    exit_on_sigterm()
    chosen.output.mkdir(parents=True, exist_ok=True)
    record = Record(chosen.output / "lease.jsonl")
    workload = {name: PIECES[name].shows for name in chosen.names}
    record.write("begin", device=chosen.device, minutes=chosen.minutes, **record_of_run(seed=0, workload=workload))
    ended: dict[str, str] = {}
    begun = time.monotonic()
    try:
        seconds, imports_vllm = 60 * chosen.minutes, IMPORT_EVERYWHERE not in os.environ
        with Lease(chosen.device, chosen.output.resolve(), seconds, estimates, imports_vllm) as lease:
            ended = lease.run(chosen.names, chosen.again)
    except CudaTouched as reason:
        if not imports_vllm:
            raise
        say(f"{reason}: it begins anew, and every process imports vLLM by itself")
        os.environ[IMPORT_EVERYWHERE] = "1"
        rest = chosen.minutes - (time.monotonic() - begun) / 60
        again = [sys.executable, "-m", "benchmarks.gpu_check", *sys.argv[1:], "--minutes", f"{max(rest, 0.1):.2f}"]
        os.execv(sys.executable, again)
    except KeyboardInterrupt:
        say("interrupted; the same command goes on")
    finally:
        (chosen.output / "summary.md").write_text(summary(record, estimates))
        write_estimates(chosen.output, record, estimates)
    say(f"written: {chosen.output}/lease.jsonl, summary.md, engines.log")
    return 0 if len(ended) == len(chosen.names) and set(ended.values()) == {"passed"} else 1


def write_estimates(folder: Path, record: Record, estimates: Estimates) -> None:
    """Write `estimates.json`. Pieces that were not measured here keep their estimate."""
    measured = measured_estimates(record)
    begun = [line for line in record.lines() if line["kind"] == "begin"][-1]
    write_json(
        folder / "estimates.json",
        {
            "source": f"measured on {begun['hardware']['gpu'] or begun['hardware']['cpu']} where named in `measured`",
            "measured": sorted(measured),
            "seconds": {**estimates.seconds, **measured},
        },
    )


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
