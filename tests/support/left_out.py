"""Parts that a test leaves out of its own process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from vllm_rollout.kernel import parts


@contextmanager
def parts_left_out(names: Iterable[str]) -> Iterator[None]:
    """Leave these parts out, as `VLLM_ROLLOUT_WITHOUT` does, until the context ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(parts.WITHOUT, ",".join(names))
        parts.parts.cache_clear()
        yield
    parts.parts.cache_clear()
