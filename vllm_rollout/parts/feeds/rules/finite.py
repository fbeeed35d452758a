"""Logits that are not finite: the fault of weights, or of one prompt.

Invariant: a prompt is given up only if other groups completed under the weights, or after `MAX_BAD_VERSIONS`.
"""

from __future__ import annotations

MAX_BAD_VERSIONS = 3
"""Versions with logits that are not finite, under which a prompt fails before it is given up."""


class FiniteLogits:
    """The versions of a feed whose logits were finite, and those whose logits were not."""

    def __init__(self) -> None:
        self.bad_version = self.good_version = -1
        """Version whose logits were not finite, and one under which a group completed."""
        self.bad_prompt = ""
        """Prompt that found `bad_version`."""
        self._bad_versions: dict[int, set[int]] = {}
        """Versions whose logits were not finite for a prompt, by its turn."""

    def completed(self, began: int, version: int) -> None:
        """A group completed that began with version `began`. `version`: of the current weights."""
        if began == version:  # all of it ran under the current weights
            self.good_version, self.bad_version = version, -1

    def blames_weights(self, turn: int, prompt: str, began: int, version: int) -> bool:
        """True if the weights may be why logits of a prompt were not finite. False: the prompt is. Arguments: as of
        `completed`."""
        versions = self._bad_versions.setdefault(turn, set())
        versions.add(version)
        is_all_of_now = began == version  # others may have KV of earlier weights
        if len(versions) >= MAX_BAD_VERSIONS or (is_all_of_now and self.good_version == version):
            return False
        if is_all_of_now:
            self.bad_version, self.bad_prompt = version, prompt
        return True

    def forget(self, turn: int) -> None:
        """The prompt of this turn is over."""
        self._bad_versions.pop(turn, None)
