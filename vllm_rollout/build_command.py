"""The command that builds the operators of csrc, told to whoever runs without them.

Invariant: it acts on the environment that runs this, builds against the torch in there, and installs nothing else.
"""

from __future__ import annotations

import json
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import vllm_rollout

NAME = "vllm-rollout"
SOURCES = "CHECKOUT"
"""Stands for a folder with the sources of this version, which the reader has to have."""
MIN_TORCH = (2, 10)
"""First torch that can build and load the operators. setup.py asks for the same one."""


def build_command() -> str:
    """Command that builds the operators for this installation, a checkout or a package that pip has installed."""
    pip = f"{shlex.quote(sys.executable)} -m pip install --no-build-isolation --no-deps"
    checkout = Path(vllm_rollout.__file__).parents[1]
    if (checkout / "setup.py").is_file():
        return f"{pip} -e {shlex.quote(str(checkout))}"
    # pip would find the same version there, or the same wheel in its cache.
    return f"{pip} --force-reinstall --no-cache-dir --no-binary {NAME} {shlex.quote(_origin() or SOURCES)}"


def _origin() -> str | None:
    """The source that pip was given: a folder, an archive of sources or a repository.

    None for a wheel and for an index, which have no sources to build from.
    """
    try:
        written = distribution(NAME).read_text("direct_url.json")
    except PackageNotFoundError:
        written = None
    if not written:
        return None
    origin = json.loads(written)
    if "vcs_info" in origin:
        return f"{origin['vcs_info']['vcs']}+{origin['url']}@{origin['vcs_info']['commit_id']}"
    return None if origin["url"].endswith(".whl") else origin["url"]
