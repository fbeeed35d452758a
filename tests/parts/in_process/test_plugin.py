"""Engines that other code builds, in a process that leaves parts out."""

import os
import subprocess
import sys

import pytest

from vllm_rollout.kernel.parts import WITHOUT

LOOK = """
from vllm.engine.arg_utils import EngineArgs
from vllm_rollout.adapter.plugin import register
register()
print(hasattr(EngineArgs.create_engine_config, "__wrapped__"))
"""


@pytest.mark.parametrize(
    ("without", "said"), [("", "True"), ("in_process", "False"), ("pages", f"{WITHOUT}: there is no part 'pages'")]
)
def test_engines_of_a_trainer_s_own_process_know_what_is_left_out(without, said):
    environment = {**os.environ, WITHOUT: without, "VLLM_PLUGINS": "", "VLLM_ROLLOUT": "scheduler,worker"}
    looked = subprocess.run([sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True, timeout=120)
    assert said in looked.stdout + looked.stderr
