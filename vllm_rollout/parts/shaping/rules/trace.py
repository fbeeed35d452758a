"""Traces: how long every candidate of every prompt became. Invariant: a trace can be replayed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from vllm_rollout.kernel.rules.types import STOP_STATES, Ending

End = Literal["stop", "length", "surplus", "pruned", "deferred", "failed"]
"""Ended by itself, cut at `max_tokens`, stopped as surplus, by its score, as nobody wanted the group now, or lost."""
STOPPED: tuple[End, ...] = STOP_STATES
"""Ends that hide how long the candidate would have become."""
MAX_REASONS = 3
"""Number of broken rows whose reasons are reported."""


class TracedCandidate(NamedTuple):
    num_tokens: int
    end: End = "stop"
    score: float | None = None
    reward: float | None = None

    @property
    def is_stopped(self) -> bool:
        return self.end in STOPPED


@dataclass(frozen=True, slots=True)
class TracedPrompt:
    """A prompt of a rollout."""

    id: str
    candidates: tuple[TracedCandidate, ...]
    """At least one. Failed candidates are left out."""
    prompt_tokens: int = 0
    max_tokens: int | None = None
    key: str = ""
    """Its name over all rollouts. Empty if that is its id."""

    @property
    def has_tokens(self) -> bool:
        return any(candidate.num_tokens for candidate in self.candidates)

    @property
    def history_key(self) -> str:
        return self.key or self.id


@dataclass(frozen=True, slots=True)
class TracedRollout:
    prompts: tuple[TracedPrompt, ...]
    id: str = ""
    """The recorded id, or empty."""


@dataclass(frozen=True, slots=True)
class Trace:
    rollouts: tuple[TracedRollout, ...]
    models: tuple[str, ...] = ()
    """Names of the models it was recorded with."""
    group_size: int | None = None
    """The recorded group size. None when there are none or several."""
    detection_length: int | None = None
    """Number of tokens after which scores were taken. None when that is not said, or differs."""
    num_failed: int = 0
    """Number of candidates left out because they failed."""
    num_empty: int = 0
    """Prompts left out because no candidate had a token."""
    others: str = ""
    """Other rows of the trace's file, and how they are replayed."""
    skipped: tuple[str, ...] = ()
    """Reason why each skipped row was skipped."""

    @property
    def prompts(self) -> list[TracedPrompt]:
        return [prompt for rollout in self.rollouts for prompt in rollout.prompts]

    @property
    def max_tokens(self) -> int:
        """The largest recorded cap. Without a cap, the longest length."""
        caps = [prompt.max_tokens for prompt in self.prompts if prompt.max_tokens is not None]
        return max(caps) if caps else max(c.num_tokens for prompt in self.prompts for c in prompt.candidates)

    @property
    def longest_context(self) -> int:
        """The most tokens, its prompt's among them, of any candidate."""
        return max(p.prompt_tokens + max(c.num_tokens for c in p.candidates) for p in self.prompts)

    @property
    def num_stopped(self) -> int:
        """Candidates whose full length is not known."""
        return sum(c.is_stopped for prompt in self.prompts for c in prompt.candidates)

    @property
    def has_scores(self) -> bool:
        return any(c.score is not None for prompt in self.prompts for c in prompt.candidates)

    @property
    def has_rewards(self) -> bool:
        return any(c.reward is not None for prompt in self.prompts for c in prompt.candidates)


def end_of(ending: Ending) -> End:
    """An ending's name in a trace. A candidate that lost a tie ended by itself, so its length is known."""
    if ending.ended_by_itself:
        return "stop"
    if ending.state == "finished":
        return "length" if ending.truncated else "stop"
    assert ending.state != "running", f"candidate {ending.index} has not ended"
    return ending.state


def told_reasons(broken: tuple[str, ...]) -> str:
    """A sentence with the number of skipped rows and the reasons of the first of them."""
    rows = "1 broken row was skipped" if len(broken) == 1 else f"{len(broken)} broken rows were skipped"
    more = "; …" if len(broken) > MAX_REASONS else ""
    return f"{rows}: {'; '.join(broken[:MAX_REASONS])}{more}"
