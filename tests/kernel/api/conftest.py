"""The arguments of `vllm-rollout serve`, parsed in this process."""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.kernel.core.conftest import loop, new_run  # noqa: F401
from vllm_rollout.adapter import plugin
from vllm_rollout.kernel import parts
from vllm_rollout.kernel.api import serve

SETS = (
    parts.WITHOUT,
    "VLLM_PLUGINS",
    "VLLM_TARGET_DEVICE",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    "VLLM_WORKER_MULTIPROC_METHOD",
)
"""Environment variables that `parse` sets."""


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives back what `parse` changes in this process."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in SETS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(FlexibleArgumentParser, "_search_keyword", None)
    monkeypatch.setattr(plugin, "register", lambda: None)  # vLLM's classes stay as they are
    yield
    monkeypatch.undo()
    parts.parts.cache_clear()
    parts.exports.cache_clear()


@pytest.fixture
def parsed(tiny_model: str, restored: None) -> Callable[..., Any]:
    """The arguments of a server with these flags."""
    return lambda *flags: serve.parse([tiny_model, *flags], "vllm-rollout serve", "")


@pytest.fixture
def refusal(parsed: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Error message of flags that end the start."""

    def refuse(*flags: str) -> str:
        with pytest.raises(SystemExit) as ended:
            parsed(*flags)
        assert ended.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    return refuse
