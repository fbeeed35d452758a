"""A Ray cluster of several hosts on one machine: each has an address of the loopback device and a raylet of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from tests.engine.conftest import ENVIRONMENT, HERE, TIMEOUT_S
from vllm_rollout.process import free_port

STOP_TIMEOUT_S = 20.0


class RayCluster:
    """`ray start` on every host; gone when the `with` block ends. `environment` puts a server on the first one."""

    def __init__(self, num_hosts: int, gpus_per_host: int) -> None:
        # Not 127.0.0.1, which Ray takes for another name of the machine's outer address.
        self.hosts = [f"127.0.0.{2 + host}" for host in range(num_hosts)]
        self._gpus_per_host = gpus_per_host
        self._address = f"{self.hosts[0]}:{free_port()}"
        self._folder = Path(tempfile.mkdtemp(prefix="ray"))  # not pytest's: a socket in it has a name of bounded length
        self._raylets: list[subprocess.Popen[bytes]] = []
        self._environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(HERE / "ray_on_cpu")])),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }

    @property
    def environment(self) -> dict[str, str]:
        return {**self._environment, "RAY_ADDRESS": self._address, "VLLM_HOST_IP": self.hosts[0]}

    def __enter__(self) -> RayCluster:
        head, *others = self.hosts
        port = self._address.rpartition(":")[2]
        try:
            self._start(head, "--head", "--port", port, "--include-dashboard", "false", "--temp-dir", str(self._folder))
            for host in others:
                self._start(host, "--address", self._address)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def _start(self, host: str, *flags: str) -> None:
        command = [str(Path(sys.executable).with_name("ray")), "start", *flags, "--node-ip-address", host, "--block"]
        command += ["--num-gpus", str(self._gpus_per_host), "--num-cpus", "1", "--disable-usage-stats"]
        log = self._folder / f"{host}.log"
        with log.open("wb") as output:
            raylet = subprocess.Popen(
                command,
                env={**ENVIRONMENT, **self._environment, "VLLM_HOST_IP": host},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._raylets.append(raylet)
        deadline = time.monotonic() + TIMEOUT_S
        while "Ray runtime started" not in (said := log.read_text()):
            if raylet.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Ray did not start on {host}:\n{said[-4000:]}")
            time.sleep(0.1)

    def _stop(self) -> None:
        for raylet in reversed(self._raylets):  # the head last: the others tell it that they go
            raylet.terminate()
            try:
                raylet.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(raylet.pid, signal.SIGKILL)
                raylet.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
