"""Settings every test shares. They stand here because vLLM reads its environment when it is first imported."""

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import settings

# The same examples every time: a test that fails does so on the commit that broke it.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


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
