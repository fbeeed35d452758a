"""The child process that measures: commands, answers, death, end. The child here is a few lines of Python."""

import os
import shutil
import sys

import pytest

from vllm_rollout.process import log_folder
from vllm_rollout.profiling.engine_process import EngineError, EngineProcess, engine_command

ECHO = """
import json, sys
print("starting", file=sys.stderr, flush=True)
for line in sys.stdin:
    name, arguments = json.loads(line)
    if name == "info":
        answer = {"name": name}
    elif name == "decode":
        answer = [[arguments["batch_size"], 1, 2.0, 0.5]]
    else:
        print("no memory left", file=sys.stderr, flush=True)
        sys.exit(3)
    print(json.dumps(answer), flush=True)
"""
SLOW = "import time, sys\nprint('reading weights', file=sys.stderr, flush=True)\ntime.sleep(1.2)\n" + ECHO
DEAF = "import time\ntime.sleep(600)"
DECODE = {"batch_size": 4, "context_tokens": 9, "num_warmup": 1, "num_steps": 1}


def engine(script, tmp_path, on_wait=lambda seconds, line: None):
    return EngineProcess([sys.executable, "-c", script], os.environ, tmp_path / "engine.log", on_wait)


def test_the_log_that_an_error_names_stays(tmp_path):
    with (
        pytest.raises(EngineError),
        log_folder() as folder,
        EngineProcess([sys.executable, "-c", "1 / 0"], os.environ, folder / "engine.log") as engine,
    ):
        engine.info()
    assert "ZeroDivisionError" in (folder / "engine.log").read_text()
    shutil.rmtree(folder)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_commands_are_answered_in_order(tmp_path):
    with engine(ECHO, tmp_path) as child:
        assert child.info() == {"name": "info"}
        (step,) = child.decode(**DECODE)
        assert (step.batch_size, step.num_tokens, step.context_tokens, step.seconds) == (4, 1, 2.0, 0.5)
        pid = child.pid
    assert not is_alive(pid)


def test_who_waits_is_told_what_the_log_says(tmp_path):
    heard = []
    with engine(SLOW, tmp_path, lambda seconds, line: heard.append((seconds, line))) as child:
        child.info()
    assert heard[0][0] > 0
    assert "reading weights" in {line for _, line in heard}


def test_a_dead_engine_is_an_error_with_its_log_and_what_to_do(tmp_path):
    with engine(ECHO, tmp_path) as child:
        with pytest.raises(EngineError, match="exit status 3") as error:
            child.warm_up()
        with pytest.raises(EngineError, match="exit status 3"):
            child.info()
    assert "| no memory left" in str(error.value)
    assert "VLLM_CPU_KVCACHE_SPACE" in str(error.value)


def test_ctrl_c_ends_an_engine_that_does_not_listen(tmp_path):
    pids = []

    def interrupted():
        with engine(DEAF, tmp_path) as child:
            pids.append(child.pid)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not is_alive(pids[0])


def test_the_command_starts_the_measuring_engine():
    command = engine_command("model", 2, ("--dtype", "float32"), logprobs=False)
    assert command[1:4] == ["-m", "vllm_rollout.parts.shaping.api.profiler", "--no-logprobs"]
    assert command[4:] == ["model", "--tensor-parallel-size", "2", "--dtype", "float32"]
