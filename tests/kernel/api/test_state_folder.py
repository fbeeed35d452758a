"""A folder of --rollout-state has one server, and a server that was killed leaves it free."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_rollout.adapter import plugin
from vllm_rollout.kernel.api import serve
from vllm_rollout.kernel.api.state_folder import NAME, FolderLock, FolderTaken

HOLDER = """
import os, sys, time
from pathlib import Path
from vllm_rollout.kernel.api.state_folder import FolderLock
lock = FolderLock(Path(sys.argv[1]))
child = os.fork()  # as an engine core that outlives its server
if child:
    print(os.getpid(), child, flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path):
    """A process that holds the folder, and the process that it has forked."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid, child = map(int, process.stdout.readline().split())
    assert pid == process.pid
    yield process
    process.kill()
    process.wait()
    process.stdout.close()
    os.kill(child, signal.SIGKILL)


def test_a_second_server_is_refused_until_the_first_one_is_killed(tmp_path: Path, holder: subprocess.Popen) -> None:
    for _ in range(2):
        with pytest.raises(FolderTaken, match=rf"{tmp_path} belongs to .* process {holder.pid}\. Stop that server, or"):
            FolderLock(tmp_path)
    holder.kill()
    holder.wait()
    lock = FolderLock(tmp_path)
    assert (tmp_path / NAME).read_text() == f"{os.getpid()}\n"
    lock.release()


def test_serve_refuses_the_folder_of_another_server_before_it_loads_a_model(
    tmp_path: Path, holder: subprocess.Popen, tiny_model: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(plugin, "register", lambda: None)
    words = [tiny_model, "--rollout-state", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        serve.parse(words, "vllm-rollout serve", "")
    assert ended.value.code == 2
    assert f"belongs to a server that runs, process {holder.pid}" in " ".join(capsys.readouterr().err.split())
    holder.kill()
    holder.wait()
    serve.parse(words, "vllm-rollout serve", "")
