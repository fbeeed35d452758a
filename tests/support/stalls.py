"""A plugin of pytest that stops its process again and again, as a machine that others use does: `make test-stalled`.

A test that fails under it needs luck: it gives something less time than a slow machine takes.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STALLS = """
import itertools, os, random, signal, sys, time
process, chance = int(sys.argv[1]), random.Random(sys.argv[2])
turns = (signal.SIGSTOP, 0.05, 1), (signal.SIGCONT, 0.3, 1.2)
for turn, least_s, most_s in itertools.cycle(turns):
    time.sleep(chance.uniform(least_s, most_s))
    if os.getppid() != process:
        break
    os.kill(process, turn)
"""


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # it runs no tests, its workers do
    seed = os.environ.get("SEED", "0")
    # It ends by itself after this process. If it were killed, this process might be stopped for good.
    subprocess.Popen([sys.executable, "-c", STALLS, str(os.getpid()), seed])
