"""The build command in messages to users without compiled operators, for each source of the package."""

import json
import shlex
import sys
from pathlib import Path

import pytest

import vllm_rollout
from vllm_rollout.build_command import build_command

PIP = f"{sys.executable} -m pip install --no-build-isolation --no-deps"


def test_a_checkout_is_built_where_it_lies():
    assert build_command() == f"{PIP} -e {shlex.quote(str(Path(__file__).parents[1]))}"


@pytest.mark.parametrize(
    ("direct_url", "origin"),
    [
        (None, "CHECKOUT"),
        ({"url": "file:///home/me/vllm_rollout", "dir_info": {}}, "file:///home/me/vllm_rollout"),
        (
            {"url": "https://example.org/vllm_rollout", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "git+https://example.org/vllm_rollout@abc",
        ),
        ({"url": "https://example.org/vllm_rollout.whl", "archive_info": {}}, "CHECKOUT"),
    ],
)
def test_what_pip_installed_is_built_anew_from_where_it_came(tmp_path, monkeypatch, direct_url, origin):
    monkeypatch.setattr(vllm_rollout, "__file__", str(tmp_path / "vllm_rollout" / "__init__.py"))
    info = tmp_path / "vllm_rollout-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-rollout\nVersion: 0.1.0\n")
    if direct_url is not None:
        (info / "direct_url.json").write_text(json.dumps(direct_url))
    monkeypatch.syspath_prepend(tmp_path)
    assert build_command() == f"{PIP} --force-reinstall --no-cache-dir --no-binary vllm-rollout {origin}"
