"""Check that a stream's chunks of tokens join.

Invariant: the joined chunks of a candidate have as many tokens as its trajectory.
"""

from __future__ import annotations

from vllm_rollout.kernel.http.answers import CandidateEvent, Event, GroupEvent, TokensEvent, TrajectoryEvent, VoidsGroup

ENDED = -1


class Joints:
    """Checks a stream's events in order."""

    def __init__(self) -> None:
        self._num_tokens: dict[str, dict[int, int]] = {}
        """Tokens so far by prompt id and candidate index, ENDED after the candidate's end. Dropped when the group ends
        or runs again.
        """

    def problem(self, event: Event) -> str | None:
        """Problem with the next event, if any: a gap, an overlap, tokens after the end, or a trajectory of another
        length.
        """
        if isinstance(event, TokensEvent):
            return self._tokens(event)
        if isinstance(event, TrajectoryEvent):
            num_tokens = self._end(event.prompt_id, event.trajectory.index)
            if num_tokens != event.trajectory.num_tokens:
                return (
                    f"trajectory {event.trajectory.index} of prompt {event.prompt_id!r} has "
                    f"{event.trajectory.num_tokens} tokens, {num_tokens} were streamed."
                )
        elif isinstance(event, CandidateEvent):
            self._end(event.prompt_id, event.candidate.index)
        elif isinstance(event, GroupEvent | VoidsGroup):
            self._num_tokens.pop(event.prompt_id, None)
        return None

    def _tokens(self, event: TokensEvent) -> str | None:
        siblings = self._num_tokens.setdefault(event.prompt_id, {})
        num_tokens = siblings.get(event.index, 0)
        siblings[event.index] = num_tokens + len(event.token_ids)
        if num_tokens == event.offset:
            return None
        expected = "none, because it had ended" if num_tokens == ENDED else f"those from token {num_tokens} on"
        return (
            f"candidate {event.index} of prompt {event.prompt_id!r}: got tokens from token {event.offset} on, "
            f"expected {expected}."
        )

    def _end(self, prompt_id: str, index: int) -> int:
        siblings = self._num_tokens.setdefault(prompt_id, {})
        num_tokens, siblings[index] = siblings.get(index, 0), ENDED
        return num_tokens
