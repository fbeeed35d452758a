"""Runs the engine-free tests that use vLLM, and engine tests (marker `versions`), on every supported vLLM.

Each version has a virtual environment, which is made in `.venvs/` on first use. It has vLLM of that version and further
packages that it needs, before the packages of the environment that runs this program. 0.33 has no CPU wheel: its Python
sources run beside the compiled libraries of 0.32. Results of versions that do not run are kept.

Run from the repository root: make test-versions, or python -m benchmarks.versions 0.29 newest
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import command_line, git_commit, record_of_run, write_json
from benchmarks.versions.environment import ROOT, python_of
from tests.versions.selection import tests_of_vllm
from vllm_rollout.adapter.compat import lacking
from vllm_rollout.versions import PREFERRED_VLLM, SUPPORTED_VLLM

SUITES = {
    "adapter": "tests without an engine",
    "quick": "tests without an engine and with few cases",
    "engine": "engine tests",
    "smoke": "a few of those",
}
"""Description of each suite, by its name in the result file."""
RESULT = ROOT / "benchmarks" / "results" / "versions.json"
NAMES = "tests/versions/names.txt"
NAMED = {"oldest": SUPPORTED_VLLM[0], "newest": SUPPORTED_VLLM[-1]}
SMOKE = "test_race or a_race_returns or single_requests_with_a_group_id or lacks"
"""Tests of both model runners and of a server: groups, joined requests, missing features."""
SAME_EVERYWHERE = ("tests/parts/pruning/test_learning_calls.py", "tests/kernel/worker/test_observing.py")
"""Modules that import vLLM, but in which no test calls a function of vLLM's."""
WITHOUT_ENGINE = [path for path in tests_of_vllm() if path not in SAME_EVERYWHERE]
SELECTION = {
    "adapter": (*WITHOUT_ENGINE, "-m", "not engine and not slow"),
    "quick": (*WITHOUT_ENGINE, "-m", "not engine and not slow and not thorough"),
    "engine": ("tests/engine", "-m", "versions"),
    "smoke": ("tests/engine/test_race.py", "tests/engine/test_server.py", "-m", "versions", "-k", SMOKE),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__)
    names = (*SUPPORTED_VLLM, *NAMED)
    add = parser.add_argument
    add("versions", nargs="*", metavar="VERSION", help=f"One of {', '.join(names)}. Default: all.")
    add("--folder", type=Path, default=ROOT / ".venvs", help="Folder of environments. Default: %(default)s")
    add("--output", type=Path, default=RESULT)
    add("--suites", nargs="+", choices=SUITES, default=["adapter", "engine"], help="Default: %(default)s.")
    add("--at-once", type=int, default=1, help="Number of suites at a time. Suites with engines must not overlap.")
    add("--environments", action="store_true", help="Make the environments of VERSIONs, and run nothing.")
    add("--table", action="store_true", help="Print the table of the result file, and run nothing.")
    snapshot = f"Write what VERSIONs and {PREFERRED_VLLM} say into {NAMES}, and run nothing."
    add("--snapshot", action="store_true", help=snapshot)
    args = parser.parse_args()
    versions = [NAMED.get(version, version) for version in args.versions]
    if args.at_once < 1:
        parser.error(f"--at-once {args.at_once}: must be 1 or more.")
    if unknown := set(versions) - set(SUPPORTED_VLLM):
        parser.error(f"VERSION {', '.join(sorted(unknown))}: must be of {', '.join((*SUPPORTED_VLLM, *NAMED))}.")
    if args.snapshot:  # the preferred one first: it says what the others are asked for
        for version in dict.fromkeys((PREFERRED_VLLM, *(versions or SUPPORTED_VLLM))):
            command = [python_of(version, args.folder, PREFERRED_VLLM), "-m", "tests.versions.vllm_snapshot"]
            subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
        return
    pythons = {} if args.table else {v: python_of(v, args.folder, PREFERRED_VLLM) for v in versions or SUPPORTED_VLLM}
    failed = []
    with ThreadPoolExecutor(args.at_once) as pool:
        jobs = [(version, suite) for version in pythons for suite in args.suites if not args.environments]
        runs = pool.map(lambda job: run_tests(pythons[job[0]], SELECTION[job[1]]), jobs)
        for (version, suite), counts in zip(jobs, runs, strict=True):
            run = {"command": command_line(), "git_commit": git_commit(), **counts}
            print(f"vLLM {version}, {suite}: {json.dumps(run)}", flush=True)
            failed += run["failed"]
            rows = rows_of(args.output)  # read again: another suite may run beside this one
            facts = {"lacks": lacking(f"{version}.0"), "packages": packages_of(pythons[version])}
            rows[version] = {**rows.get(version, {}), **facts, suite: run}
            record = record_of_run(seed=0, workload={name: " ".join(SELECTION[name]) for name in SUITES})
            write_json(args.output, {**record, "vllm": rows})
    if not args.environments:
        print(table(rows_of(args.output)))
    if failed:
        sys.exit(1)


def rows_of(path: Path) -> dict[str, Any]:
    """Results of each version by its name. Empty if there is no file."""
    return json.loads(path.read_text())["vllm"] if path.exists() else {}


def run_tests(python: Path, selection: tuple[str, ...]) -> dict[str, Any]:
    """Numbers of passed and skipped tests, names of failed ones, and seconds.

    Raises: RuntimeError if pytest could not collect or run them.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *selection]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
        (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    if failed:
        print(done.stdout[-8000:], file=sys.stderr)
    skipped = int(suite.get("skipped", 0))
    return {
        "passed": int(suite.get("tests", 0)) - skipped - len(failed),
        "skipped": skipped,
        "failed": failed,
        "seconds": round(float(suite.get("time", 0)), 1),
    }


def packages_of(python: Path) -> dict[str, str]:
    code = (
        "import json, torch, transformers, vllm.version as vllm\n"
        "modules = {'vllm': vllm, 'torch': torch, 'transformers': transformers}\n"
        "print(json.dumps({name: module.__version__ for name, module in modules.items()}))"
    )
    done = subprocess.run([str(python), "-c", code], text=True, stdout=subprocess.PIPE, check=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A table of the versions' rows in the result file, with a column for each suite that any of them has run."""
    columns = [suite for suite in SUITES if any(suite in row for row in rows.values())]
    lines = [
        f"| vLLM | {' | '.join(SUITES[suite] for suite in columns)} | what it lacks |",
        f"| --- |{' --- |' * (len(columns) + 1)}",
    ]
    for version, row in sorted(rows.items()):
        cells = [_passed(row.get(suite)) for suite in columns]
        lacks = ", ".join(line.partition(" (")[0] for line in row["lacks"]) or "nothing"
        lines.append(f"| {version} | {' | '.join(cells)} | {lacks} |")
    return "\n".join(lines)


def _passed(suite: Mapping[str, Any] | None) -> str:
    if suite is None:
        return "—"
    skipped = f", {suite['skipped']} skipped" if suite["skipped"] else ""
    return f"{suite['passed']} of {suite['passed'] + len(suite['failed'])}{skipped}"


if __name__ == "__main__":
    main()
