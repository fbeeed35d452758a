"""The page of the fake engine's app."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.kernel.http.fake_engine import FakePart
from vllm_rollout.kernel.call_table import Operation
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.parts.page.calls import LAST_TOKENS, LastTokens
from vllm_rollout.parts.page.http.part import PagePart


class FakePage(FakePart, PagePart):
    """Records if the app has a `recorder`."""

    most_last_tokens = 512

    def begin(self, metrics: Metrics, settings: Mapping[str, Any]) -> None:
        self.recorder = settings.get("recorder")

    def answers(self) -> Mapping[Operation[Any, Any], Callable[[Any], Any]]:
        return {LAST_TOKENS: self._last_tokens}

    def _last_tokens(self, group_id: str) -> list[LastTokens]:
        running = [each for id, each in self.engine.candidates.items() if id.group_id == group_id]
        offsets = [max(0, each.num_tokens - self.most_last_tokens) for each in running]
        return [
            LastTokens(each.index, offset, each.token_ids[offset : each.num_tokens])
            for each, offset in zip(running, offsets, strict=True)
        ]


FAKE = FakePage
