"""Shared by benchmarks that measure for long, continue where they stopped, and show tables and a picture.

Invariant: a run in the log is not measured again, and all runs in a folder have the sizes that are asked for.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import field, fields
from itertools import product
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import uvloop
from pydantic import TypeAdapter
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.common import record_of_run, server_process, write_json
from vllm_rollout import AsyncRolloutClient, RolloutError
from vllm_rollout.models import resolve
from vllm_rollout.process import ServerError, ServerProcess, exit_on_sigterm, log_folder, server_flags

LOG_INTERVAL_S = 15.0

Progressed = Callable[[float, float, str], None]
"""Takes work done, total work, and a description of the current work."""


class Run(Protocol):
    """An entry of a log: a dataclass."""

    @property
    def key(self) -> Any: ...


RunType = TypeVar("RunType", bound=Run)


class RunLog(Generic[RunType]):
    """Runs by key, in a file of one JSON line each. A repeated run replaces the older one."""

    def __init__(self, path: Path, run_type: type[RunType]) -> None:
        self._path = path
        self._adapter = TypeAdapter(run_type)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self._runs = {run.key: run for run in map(self._adapter.validate_json, lines)}

    @property
    def runs(self) -> list[RunType]:
        return list(self._runs.values())

    def __contains__(self, key: Hashable) -> bool:
        return key in self._runs

    def __getitem__(self, key: Hashable) -> RunType:
        return self._runs[key]

    def __iter__(self) -> Iterator[RunType]:
        return iter(self._runs.values())

    def add(self, run: RunType) -> None:
        with self._path.open("ab") as file:
            file.write(self._adapter.dump_json(run) + b"\n")
        self._runs[run.key] = run


TINY = "tiny-random"
TINY_SAMPLING = {"allowed_token_ids": [2, *range(16, 64)]}
"""The end token and 48 others: answers of some 50 tokens, whose lengths are nearly exponential."""
SEED_STRIDE = 1000
"""Difference of the seeds of two repeats."""


def speed_up(row: Mapping[str, Any]) -> str:
    """Speed-up over the baseline: the median over repeats, and the range."""
    return f"{row['speed_up']:.2f} ({min(row['speed_ups']):.2f} to {max(row['speed_ups']):.2f})"


def size(default: Any, text: str, parse: Callable[[str], Any] | None = None) -> Any:
    """A field of a benchmark's sizes that is also an option of its command line."""
    return field(default=default, metadata={"text": text, "parse": parse or type(default)})


def check_positive(sizes: Any, names: Iterable[str]) -> None:
    """Raises: ValueError if one of these sizes is below 1."""
    for name in names:
        if getattr(sizes, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(sizes, name)}")


def check_same_sizes(
    made: Mapping[str, Any], asked: Mapping[str, Any], names: Iterable[str], made_what: str, remedy: str
) -> None:
    """Raises: ValueError if `made_what` was made with other sizes than are asked for."""
    for name in names:
        if made[name] != asked[name]:
            raise ValueError(
                f"--{name.replace('_', '-')} must be {made[name]!r}, which {made_what}, got {asked[name]!r}. "
                f"Name another --output, or {remedy}."
            )


def begin(folder: Path, sizes: Mapping[str, Any], seed: int, workload: Any, free: Iterable[str] = ()) -> dict[str, Any]:
    """The record of the run in this folder, which begins now or continues.

    free: sizes that may change on the way, such as the number of repeats.
    Raises: ValueError if the run was begun with other sizes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "begun.json"
    if not file.exists():
        write_json(file, {**record_of_run(seed=seed, workload=workload), "sizes": sizes})
    begun = json.loads(file.read_text())
    fields_that_matter = [name for name in sizes if name not in free]
    made_what, remedy = f"the runs in {folder} were made with", "measure anew with --again"
    check_same_sizes(begun["sizes"], sizes, fields_that_matter, made_what, remedy)
    return begun


def remove(folder: Path, names: Iterable[str]) -> None:
    """Delete these files of the folder."""
    for name in names:
        (folder / name).unlink(missing_ok=True)


async def keep_state(client: AsyncRolloutClient, path: Path) -> None:
    """Write the server's learned state, whole or not at all."""
    temporary = path.with_suffix(".new")
    temporary.write_bytes(await client.state())
    temporary.replace(path)


@contextmanager
def running_server(
    model: str, max_num_seqs: int, flags: Sequence[str], more: str, console: Console
) -> Iterator[ServerProcess]:
    """Our server, ready. Its log is kept if it fails. `more`: flags as on a command line."""
    command = [*server_flags(max_num_seqs), *flags, *shlex.split(more)]
    with log_folder() as logs, server_process("rollout", resolve(model), command, logs / "server.log") as server:
        with console.status(f"starting the server, {model}"):
            server.wait_until_healthy(lambda seconds, line: None)
        yield server


def measure_missing(
    sizes: Any,
    log: RunLog[Any],
    ways: Iterable[str],
    flags: Sequence[str],
    arguments: argparse.Namespace,
    console: Console,
    measure: Callable[[ServerProcess, AsyncRolloutClient, Progressed], Coroutine[Any, Any, None]],
) -> None:
    """Start a server and measure, if a way is missing in any of the repeats."""
    if all(key in log for key in product(ways, range(sizes.repeats))):
        return

    async def with_client(server: ServerProcess, progressed: Progressed) -> None:
        async with client_of(server) as client:
            await measure(server, client, progressed)

    with (
        running_server(sizes.model, sizes.max_num_seqs, flags, arguments.server_args, console) as server,
        progress(console) as progressed,
    ):
        uvloop.run(with_client(server, progressed))


@asynccontextmanager
async def client_of(server: ServerProcess) -> AsyncIterator[AsyncRolloutClient]:
    """A client. If a call fails because the server ended, the error says so."""
    async with AsyncRolloutClient(server.url) as client:
        try:
            yield client
        except RolloutError:
            server.check_alive()
            raise


@contextmanager
def progress(console: Console) -> Iterator[Progressed]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"))
    columns = (*columns, TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1)
        shown = [-1.0]

        def progressed(done: float, total: float, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)
            if not console.is_terminal and (done >= total or time.monotonic() - shown[0] > LOG_INTERVAL_S):
                shown[0] = time.monotonic()  # a log file gets lines in place of a bar
                console.print(f"{what}: {done:.0f}/{total:.0f}")

        yield progressed


def parse(
    name: str, description: str | None, sizes: type, quick: Mapping[str, Any], add: Callable[[Any], None]
) -> argparse.Namespace:
    """Arguments, `sizes` among them. `--quick` sets its sizes, and without `--output` it begins anew.

    name: of the benchmark's folder, result and picture. add: adds arguments that no other benchmark has.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("--quick", action="store_true", help="small sizes, tiny-random unless --model is given; no picture")
    option("--again", action="store_true", help="drop earlier runs of this output")
    option("--output", type=Path, help=f"file for results (default benchmarks/results/{name}.json, with --quick "
           f".scratch/{name}_quick.json). Logs and state go into a folder of the same name")  # fmt: skip
    option(
        "--output-picture",
        dest="plot",
        type=Path,
        default=Path(f"docs/images/{name}.png"),
        help="file for the picture (default %(default)s)",
    )
    option("--plot-only", action="store_true", help="measure nothing, show tables and picture of --output")
    option("--server-args", default="", help="more flags for the server, e.g. '--gpu-memory-utilization 0.1' if "
           "other engines share the machine")  # fmt: skip
    add(option)
    group = parser.add_argument_group("sizes; defaults are those of the recorded run")
    for each in fields(sizes):
        flag, parse_text = f"--{each.name.replace('_', '-')}", each.metadata["parse"]
        group.add_argument(flag, type=parse_text, default=each.default, help=f"{each.metadata['text']} (%(default)s)")
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(**quick)
    arguments = parser.parse_args()
    if arguments.output is None:
        arguments.again = arguments.again or arguments.quick
        arguments.output = Path(f".scratch/{name}_quick.json" if arguments.quick else f"benchmarks/results/{name}.json")
    return arguments


def main(
    name: str,
    description: str | None,
    sizes: type,
    quick: Mapping[str, Any],
    measure: Callable[[argparse.Namespace, Any, Console], None],
    tables: Callable[[Mapping[str, Any]], str],
    draw: Callable[[Mapping[str, Any], Path], None],
    add: Callable[[Any], None] = lambda option: None,
) -> None:
    """Measure missing runs and write the output, or only draw with --plot-only. Then show tables and picture.

    Raises: SystemExit with the error.
    """
    arguments = parse(name, description, sizes, quick, add)
    console = Console(stderr=True)
    exit_on_sigterm()
    try:
        if not arguments.plot_only:
            measure(arguments, sizes(**{each.name: getattr(arguments, each.name) for each in fields(sizes)}), console)
        result = json.loads(arguments.output.read_text())
    except (ServerError, RolloutError, ValueError, FileNotFoundError) as error:
        raise SystemExit(f"{name}: {error}") from error
    text = tables(result)
    Console().print(Markdown(text)) if sys.stdout.isatty() else print(text)
    if arguments.plot_only or not arguments.quick:
        draw(result, arguments.plot)
        console.print(f"picture: {arguments.plot}")
