"""Engines that other code builds, in a process that leaves parts out."""

import os
import subprocess
import sys

LOOK = """
import os, sys
from vllm.engine.arg_utils import EngineArgs

for without in sys.argv[1:]:
    if os.fork() == 0:  # importing vllm takes nearly all of the time
        os.environ["VLLM_ROLLOUT_WITHOUT"] = without
        from vllm_rollout.adapter.plugin import register
        try:
            register()
            print(hasattr(EngineArgs.create_engine_config, "__wrapped__"), flush=True)
        except ValueError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""


def test_engines_of_a_trainer_s_own_process_know_what_is_left_out():
    environment = {**os.environ, "VLLM_PLUGINS": "", "VLLM_ROLLOUT": "scheduler,worker"}
    command = [sys.executable, "-c", LOOK, "", "in_process", "pages"]
    looked = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    there, left_out, unknown = looked.stdout.splitlines()
    assert (there, left_out) == ("True", "False")
    assert unknown.startswith("VLLM_ROLLOUT_WITHOUT: there is no part 'pages'")
