"""The arguments of `vllm-rollout serve`, parsed in this process."""

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.kernel.core.conftest import loop, new_run  # noqa: F401
from vllm_rollout.adapter import plugin
from vllm_rollout.adapter.compat import SCALE_OUT_FLAG, has
from vllm_rollout.kernel import parts
from vllm_rollout.kernel.api import serve
from vllm_rollout.kernel.http.admin import AdminKey
from vllm_rollout.kernel.http.origins import AllowedHosts

SETS = (
    parts.WITHOUT,
    "VLLM_PLUGINS",
    "VLLM_TARGET_DEVICE",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    "VLLM_WORKER_MULTIPROC_METHOD",
)
"""Environment variables that `parse` sets."""
API_KEY, ADMIN_KEY = "api", "admin"


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


@pytest.fixture
def app_of(monkeypatch, tiny_model):
    """vLLM's app with what these trainers ask for, no engine behind it; or as vLLM has it, without us."""

    from vllm.entrypoints.launchers.app import build_app  # takes seconds

    @cache
    def app_of(*trainers: str, ours: bool = True) -> FastAPI:
        monkeypatch.setenv("VLLM_PLUGINS", os.environ.get("VLLM_PLUGINS", ""))
        monkeypatch.delenv("VLLM_PLUGINS")
        monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
        monkeypatch.setattr(sys, "argv", sys.argv)
        monkeypatch.setattr(plugin, "register", lambda: None)  # vLLM's classes stay as they are
        flags = [flag for trainer in trainers for flag in ("--rollout-compat", trainer)]
        keys = ("--api-key", API_KEY, ADMIN_KEY, "--rollout-admin-key", ADMIN_KEY)
        scale_out = ("--enable-scale-out",) if has(SCALE_OUT_FLAG) else ()
        args = serve.parse([tiny_model, *scale_out, *keys, *flags], "vllm-rollout serve", "")
        if not ours:
            monkeypatch.setenv("VLLM_PLUGINS", "")
        app = build_app(args, ("generate",))
        app.state.rollout_service = SimpleNamespace(admin_key=AdminKey(ADMIN_KEY))
        app.state.allowed_hosts = AllowedHosts(has_key=True)
        return app

    return app_of
