"""`--rollout-judge`: what its server is started with, what is refused, and a server that dies or is left alone."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.support.waiting import WAIT_S, wait_until
from vllm_rollout.parts.rewards.api import judge
from vllm_rollout.parts.rewards.api.judge_process import JudgeProcess
from vllm_rollout.parts.rewards.grading.judge import ENGINE_VARIABLE, JudgeEngine
from vllm_rollout.process import free_port

SERVER = """
import http.server, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""
STARTER = """
import os, subprocess, sys
command = [sys.executable, "-m", "vllm_rollout.parts.rewards.api.judge_process"]
process = subprocess.Popen(command, stdin=subprocess.PIPE)
process.stdin.write(sys.argv[1].replace('"parent":0', f'"parent":{os.getpid()}').encode())
process.stdin.close()
process.wait()
"""


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None)
    monkeypatch.setattr(os, "environ", {**os.environ, "VLLM_PLUGINS": "other,vllm_rollout", "VLLM_API_KEY": "ours"})
    monkeypatch.delenv(judge.BINDING, raising=False)


@pytest.fixture(params=["cpu"])
def platform(request, monkeypatch):
    monkeypatch.setattr(type(judge.current_platform), "is_cpu", lambda self: request.param == "cpu")


def parsed(*flags: str, memory: float = 0.6) -> argparse.Namespace:
    parser = FlexibleArgumentParser()
    judge.add_flags(parser)
    parser.set_defaults(gpu_memory_utilization=memory, headless=False)
    args = parser.parse_args(flags)
    judge.refuse(args, parser)
    return args


def started(tmp_path: Path, *flags: str) -> JudgeProcess:
    return judge.judge_process(parsed("--rollout-judge", str(tmp_path), *flags), tmp_path, os.environ)


@pytest.mark.parametrize(
    ("flags", "cores", "binding", "memory"),
    [
        ((), [3], "3", "1"),
        (("--rollout-judge-cores", "1"), [3], "3", "1"),
        (("--rollout-judge-cores", "2", "--rollout-judge-memory-gib", "4"), [2, 3], "2,3", "4"),
    ],
)
@pytest.mark.usefixtures("platform")
def test_on_cpus_it_is_stock_vllm_on_cores_of_its_own(tmp_path, flags, cores, binding, memory):
    settings = started(tmp_path, *flags, "--rollout-judge-args=--swap-space 0.5 --max-model-len 512")
    assert settings.command[1:5] == ["-m", judge.STOCK_SERVER, "--model", str(tmp_path)]
    assert settings.command[-4:] == ["--swap-space", "0.5", "--max-model-len", "512"]
    assert "--gpu-memory-utilization" not in settings.command
    assert settings.cores == cores
    told = {name: settings.environment[name] for name in (judge.BINDING, judge.KV_SPACE, "VLLM_PLUGINS")}
    assert told == {judge.BINDING: binding, judge.KV_SPACE: memory, "VLLM_PLUGINS": "other"}
    assert settings.environment["VLLM_API_KEY"] == settings.api_key != "ours"


@pytest.mark.parametrize("platform", ["gpu"], indirect=True)
@pytest.mark.usefixtures("platform")
def test_on_gpus_it_has_a_share_of_the_memory_and_vllms_own_offload(tmp_path):
    settings = started(tmp_path, "--rollout-judge-gpu-memory-utilization", "0.3", "--rollout-judge-offload", "4")
    assert settings.command[-4:] == ["--gpu-memory-utilization", "0.3", "--offload-group-size", "4"]
    assert settings.cores == []
    assert judge.BINDING not in settings.environment


@pytest.mark.parametrize(
    ("platform", "flags", "said"),
    [
        ("cpu", ("--rollout-judge-memory-gib", "0"), "must be at least 1, got 0"),
        ("cpu", ("--rollout-judge-gpu-memory-utilization", "0.3"), "Take --rollout-judge-memory-gib"),
        ("gpu", ("--rollout-judge-memory-gib", "4"), "Take --rollout-judge-gpu-memory-utilization"),
        ("cpu", ("--rollout-judge-cores", "4"), "must be in [0, 3]"),
        ("cpu", ("--rollout-judge-offload", "2"), "this is vLLM's CPU platform"),
        (
            "cpu",
            ("--rollout-judge-args=--port=1 --served_model_name x",),
            "--port, --served-model-name cannot be said there",
        ),
        ("cpu", ("--rollout-judge-args='",), "No closing quotation"),
        ("gpu", (), "that --gpu-memory-utilization 0.6 leaves free, got None"),
        ("gpu", ("--rollout-judge-gpu-memory-utilization", "0.5"), "leaves free, got 0.5"),
        ("gpu", ("--rollout-judge-gpu-memory-utilization", "0.3", "--rollout-judge-cores", "1"), "is for CPUs"),
        (
            "gpu",
            ("--rollout-judge-gpu-memory-utilization", "0.3", "--rollout-judge-offload", "0"),
            "must be at least 1, got 0",
        ),
    ],
    indirect=["platform"],
)
@pytest.mark.usefixtures("platform")
def test_what_does_not_go_is_refused_with_a_remedy(capsys, flags, said):
    with pytest.raises(SystemExit):
        parsed("--rollout-judge", "m", *flags)
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("binding", "shared"), [("0-2", None), ("0,1|2-3", "[3]"), ("nobind", None), ("auto", None)])
@pytest.mark.usefixtures("platform")
def test_cores_that_our_own_engine_is_bound_to_are_not_the_judges(monkeypatch, capsys, binding, shared):
    monkeypatch.setenv(judge.BINDING, binding)
    parsed("--rollout-judge", "m", "--rollout-judge-cores", "0")
    if shared is None:
        parsed("--rollout-judge", "m", "--rollout-judge-cores", "1")
        return
    with pytest.raises(SystemExit):
        parsed("--rollout-judge", "m", "--rollout-judge-cores", "1")
    assert f"to cores {shared}" in " ".join(capsys.readouterr().err.split())


@pytest.fixture
def fake(tmp_path) -> JudgeProcess:
    """A server that does nothing but live."""
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    return JudgeProcess(
        command=[sys.executable, str(script)], environment=dict(os.environ), port=free_port(), api_key="key",
        file=str(tmp_path / "judge.json"), log=str(tmp_path / "log"), cores=[], parent=os.getpid(),
    )  # fmt: skip


def servers_of(settings: JudgeProcess) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if settings.command[1] in (each.info["cmdline"] or [])]


def test_a_server_that_dies_is_said_to_be_dead_and_started_again(fake, monkeypatch):
    def engine():
        return msgspec.json.decode(Path(fake.file).read_bytes(), type=JudgeEngine)

    with judge.running(fake) as url:
        assert engine() == JudgeEngine(url, "key")
        (first,) = servers_of(fake)
        first.kill()
        wait_until(lambda: engine().failure)
        assert "ended with exit status -9" in engine().failure
        wait_until(lambda: engine().failure is None)
        assert servers_of(fake) != [first]
    assert servers_of(fake) == []


def test_a_server_that_never_runs_ends_the_start_with_its_log(fake):
    Path(fake.command[1]).write_text("raise SystemExit('no such model')")
    with pytest.raises(SystemExit, match="no such model"), judge.running(fake):
        raise AssertionError("started")


def test_it_ends_with_a_server_of_ours_that_is_killed(fake):
    settings = msgspec.json.encode(msgspec.structs.replace(fake, parent=0)).decode()
    starter = subprocess.Popen([sys.executable, "-c", STARTER, settings])
    wait_until(lambda: Path(fake.file).exists())
    assert len(servers_of(fake)) == 1
    starter.send_signal(signal.SIGKILL)
    starter.wait(WAIT_S)
    wait_until(lambda: servers_of(fake) == [])


@pytest.mark.parametrize(("num_cores", "left"), [("1", {0, 1, 2}), ("0", {0, 1, 2, 3})])
@pytest.mark.usefixtures("platform")
def test_a_judge_is_found_by_our_processes_which_have_the_other_cores(monkeypatch, fake, num_cores, left):
    ours = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: ours.append(cores))
    monkeypatch.setattr(judge, "judge_process", lambda *_: fake)
    with judge.beside(parsed("--rollout-judge", "m", "--rollout-judge-cores", num_cores)):
        assert JudgeEngine.of_this_server().api_key == "key"
        assert ours == [left]
    assert ours == [left, {0, 1, 2, 3}]


def test_without_the_flag_nothing_happens():
    with judge.beside(parsed()):
        assert ENGINE_VARIABLE not in os.environ
