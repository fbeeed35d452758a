"""Exceptions of our own code where vLLM would end the engine: in an engine core's step, and in a worker's.

Invariant: code that catches an exception here fails only the candidate or the group that it concerns.
"""

from __future__ import annotations

from collections import Counter

from vllm.logger import init_logger

logger = init_logger("vllm.vllm_rollout")


class Faults:
    """Exceptions caught in this process."""

    def __init__(self) -> None:
        self._num_by_place: Counter[str] = Counter()

    @property
    def num(self) -> int:
        return self._num_by_place.total()

    def caught(self, place: str, error: BaseException) -> str:
        """Log an exception, the first one of a place with its traceback, and count it.

        Returns the text for clients.
        """
        self._num_by_place[place] += 1
        reason = f"internal error in {place}: {type(error).__name__}: {error}"
        is_first = self._num_by_place[place] == 1
        logger.error("vllm_rollout: %.1000s", reason, exc_info=error if is_first else None)
        return reason[:1000]
