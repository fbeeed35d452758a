"""Settings every test shares. They stand here because vLLM reads its environment when it is first imported."""

import gc
import logging
import os
import signal
import sys
import threading
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# These libraries write into the checkout and the home otherwise.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(Path(__file__).parents[1] / ".pytest_cache" / "hypothesis"))
os.environ.setdefault("MPLCONFIGDIR", str(Path(__file__).parents[1] / ".pytest_cache" / "matplotlib"))
os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(__file__).parents[1] / ".pytest_cache" / "vllm"))

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import pytest_timeout
from fastapi import FastAPI
from hypothesis import settings

# The same examples every time, so that a test fails on the commit that broke it. `make test-nightly` has the others.
settings.register_profile("repeatable", derandomize=True, deadline=None)
# Examples that no run has seen. One that fails is printed as a decorator, which makes it an example of every run.
settings.register_profile("fresh", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("VLLM_ROLLOUT_EXAMPLES", "repeatable"))


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background job ignores SIGINT, and children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if worker := getattr(config, "workerinput", None):
        # Each worker of pytest-xdist gets cores of its own: engines that share cores wait for each other's threads.
        cores, num_workers = sorted(os.sched_getaffinity(0)), worker["workercount"]
        number = int(worker["workerid"].removeprefix("gw"))  # greater than their number after a crash
        os.sched_setaffinity(0, cores[number % num_workers :: num_workers] or cores)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries say that what they have made leaks


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what was skipped, one line for each reason: most reasons name the command that mends it."""
    skipped = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
    for reason, num in sorted(skipped.items()):
        terminalreporter.write_line(f"skipped {num}: {reason.removeprefix('Skipped: ')}")


TESTS_SEEN = "VLLM_ROLLOUT_TESTS_SEEN"
"""A file for the names of tests that were run (+) and left out (-): `make test` counts what none of its runs took."""


def pytest_deselected(items: list[Any]) -> None:
    _note("-", items)


def pytest_collection_finish(session: Any) -> None:
    _note("+", session.items)
    gc.collect()
    gc.freeze()  # else the collector reads thousands of imported modules again and again


def _note(sign: str, items: list[Any]) -> None:
    if path := os.environ.get(TESTS_SEEN):
        with open(path, "a") as file:
            file.writelines(f"{sign}{item.nodeid!r}\n" for item in items)


def pytest_timeout_set_timer(item: Any, settings: Any) -> bool | None:
    """Let pytest-timeout say which test hung: in the stack of an event loop that waits, no line is the test's."""
    if settings.method != "thread":
        return None

    def end() -> None:
        os.write(2, f"{item.nodeid} has not ended within {settings.timeout:.0f} s\n".encode())
        pytest_timeout.timeout_timer(item, settings)

    timer = threading.Timer(settings.timeout, end)
    timer.start()
    item.cancel_timeout = timer.cancel
    return True


@pytest.fixture(autouse=True)
def warnings_reach_caplog() -> None:
    """In any order of tests: vLLM cuts its logger off from the root, and a package it imports silences the root."""
    logging.getLogger("vllm").propagate = True
    logging.getLogger("vllm_rollout").setLevel(logging.WARNING)


@pytest.fixture(autouse=True)
def vllm_reads_the_environment() -> Iterator[None]:
    """Also after a test whose engine ran in this process: from then on vLLM keeps the values that it has read."""
    yield
    if (envs := sys.modules.get("vllm.envs")) is not None:
        envs.disable_envs_cache()


@pytest.fixture(autouse=True)
def sigterm_ends_the_run() -> Iterator[None]:
    """Also after a test that runs a command in this process, which then has a handler of its own."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the test's app, in process; an answer comes when it is complete."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """Folder of a tiny random model: configuration, tokenizer, weights."""
    from vllm_rollout import model_files

    folder = str(tmp_path_factory.mktemp("models") / "tiny")
    model_files.tiny(folder)
    return folder
