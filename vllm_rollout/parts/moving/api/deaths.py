"""Engine cores that die while others live: detection, and notice to the API processes.

The process that started the engine cores is the API process, or the launcher of several. It writes a line for each dead
core into a file of the server's folder.

Invariant: the server lives as long as one rank lives. When the last rank dies, the server stops, as vLLM alone does
when the first one dies.
"""

from __future__ import annotations

from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.engine.utils import CoreEngineProcManager

from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.kernel.api import server_folder

logger = init_logger("vllm.vllm_rollout")

LOOK_S = 1.0
"""Seconds between two checks whether the server is being stopped."""


class Death(NamedTuple):
    """Death of an engine core."""

    rank: int
    exit_code: int
    """Exit code as in `multiprocessing`: a negative value is the number of a signal."""


class Deaths:
    """The server's file of dead engine cores."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of_this_server(cls) -> Deaths | None:
        """The file of this server. None if no file is written."""
        folder = server_folder.of_this_server()
        return None if folder is None else cls(folder / "deaths")

    def write(self, death: Death) -> None:
        with suppress(FileNotFoundError), self._path.open("a") as file:  # a server that ends has deleted the folder
            file.write(f"{death.rank} {death.exit_code}\n")

    def read(self) -> list[Death]:
        try:
            lines = self._path.read_text().splitlines()
        except FileNotFoundError:
            return []
        return [Death(*map(int, line.split())) for line in lines]


def outlives_a_rank(config: VllmConfig) -> bool:
    """True if the other ranks go on when one dies.

    Ranks of a dense model are independent. Ranks of a mixture of experts compute together, so none goes on alone.
    Processes of other hosts and of Ray are not visible here. An engine in a trainer's own process has no writer of the
    file. vLLM's Rust front end would go on sending to a dead rank.
    """
    parallel = config.parallel_config
    are_all_here = parallel.data_parallel_size_local == parallel.data_parallel_size
    return (
        parallel.data_parallel_size > 1
        and are_all_here
        and parallel.data_parallel_backend != "ray"
        and not config.model_config.is_moe
        and not ServeOptions.of(config).beside_rust
        and Deaths.of_this_server() is not None
    )


class RankProcesses(CoreEngineProcManager):
    """The processes of a server's engine cores. Overrides: __init__, monitor_engine_liveness."""

    def __init__(self, local_engine_count: int, start_index: int, *args: Any, **kwargs: Any) -> None:
        config: VllmConfig = kwargs["vllm_config"]
        self._first_rank = start_index
        self._deaths = Deaths.of_this_server() if outlives_a_rank(config) else None
        super().__init__(local_engine_count, start_index, *args, **kwargs)

    def monitor_engine_liveness(self) -> None:
        """Return when all processes have ended, or the server is being stopped."""
        if self._deaths is None:
            super().monitor_engine_liveness()
            return
        living = {process.sentinel: rank for rank, process in enumerate(self.processes, self._first_rank)}
        while living and not self.manager_stopped.is_set():
            for sentinel in connection.wait(living, timeout=LOOK_S):
                rank = living.pop(sentinel)  # type: ignore[arg-type]
                process = self.processes[rank - self._first_rank]
                process.join()
                if self.manager_stopped.is_set():
                    break
                self._deaths.write(Death(rank, process.exitcode or 0))
                logger.error("vllm_rollout: rank %d has died, exit code %d", rank, process.exitcode)
                self.failed_proc_name = process.name
        self.shutdown()
