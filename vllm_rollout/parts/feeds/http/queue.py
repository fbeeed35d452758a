"""Prompts of a feed that wait for a place. Invariant: a prompt waits in its turn, once, or is deferred."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.protocol import Prompt

OBJECT_BYTES = 800
"""Memory of a waiting prompt beside its text and token ids."""
TOKEN_BYTES = 32
"""Memory of a token id beside its digits."""


class WaitingPrompt(NamedTuple):
    turn: int
    """Number of the prompt among all that were put."""
    prompt: Prompt
    num_bytes: int
    """Memory that it needs, about."""
    is_long: bool = False
    """True if it was deferred, and starts in a long batch."""

    @classmethod
    def of(cls, turn: int, prompt: Prompt, *, is_long: bool = False) -> WaitingPrompt:
        num_bytes = OBJECT_BYTES + len(as_json(prompt)) + TOKEN_BYTES * len(prompt.prompt_token_ids or ())
        return cls(turn, prompt, num_bytes, is_long)


class PromptQueue:
    """Prompts that wait. Its length is their number, with deferred ones."""

    def __init__(self) -> None:
        self.waiting: deque[WaitingPrompt] = deque()
        self.deferred: list[WaitingPrompt] = []
        """Prompts whose groups became too old, and that wait for a long batch."""
        self.num_put = self.num_bytes = 0
        self._ids: set[str | None] = set()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.deferred)

    def checked(self, prompts: list[Prompt], running: Iterable[Prompt]) -> list[WaitingPrompt]:
        """Prompts with ids and turns of their own. `running`: prompts whose groups were not taken yet.

        Raises: RequestError (409) for an id that is in the feed.
        """
        alive = {each.id for each in running}
        named = []
        for position, prompt in enumerate(prompts):
            name = str(self.num_put + position) if prompt.id is None else prompt.id
            if name in alive or name in self._ids:
                said = "is" if prompt.id is not None else "is the number of this prompt's turn, its default, and is"
                raise RequestError(
                    f"prompts.{position}.id: {name!r} {said} in this feed, and its group was not taken yet. Put it "
                    "later, or under another id.",
                    status=409,
                    param=f"prompts.{position}.id",
                )
            alive.add(name)
            named.append(WaitingPrompt.of(self.num_put + position, prompt.model_copy(update={"id": name})))
        return named

    def put(self, prompts: list[WaitingPrompt]) -> None:
        """Add checked prompts."""
        self.num_put += len(prompts)
        for prompt in prompts:
            self._count(prompt)
        self.waiting.extend(prompts)

    def next(self) -> WaitingPrompt:
        """Take the first prompt that waits."""
        prompt = self.waiting.popleft()
        self.num_bytes -= prompt.num_bytes
        self._ids.discard(prompt.prompt.id)
        return prompt

    def again(self, prompt: WaitingPrompt) -> None:
        """Let a prompt wait in its turn."""
        self._count(prompt)
        self._insert(prompt)

    def defer(self, prompt: WaitingPrompt) -> None:
        """Let a prompt wait for a long batch."""
        self._count(prompt)
        self.deferred.append(prompt)

    def start_long(self, num: int) -> None:
        """Let the first `num` deferred prompts wait for places as long ones."""
        for prompt in self.deferred[:num]:
            self._insert(prompt._replace(is_long=True))
        del self.deferred[:num]

    def clear(self) -> None:
        self.waiting.clear()
        self.deferred.clear()
        self._ids.clear()
        self.num_bytes = 0

    def _count(self, prompt: WaitingPrompt) -> None:
        self.num_bytes += prompt.num_bytes
        self._ids.add(prompt.prompt.id)

    def _insert(self, prompt: WaitingPrompt) -> None:
        insort(self.waiting, prompt, key=lambda each: each.turn)


def as_json(prompt: Prompt) -> str:
    return prompt.model_dump_json(exclude_none=True)
