"""Groups of a replay: the final lengths and the progress of their candidates.

A replay launches the trace's candidates. Recorded candidates that were stopped are completed. If a replay wants more
candidates, recorded ones are resampled.

Invariant: a candidate depends only on the seed, its rollout, its prompt and its index, so every setting of a sweep gets
equal candidates. A candidate that does not run knows its number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, NamedTuple

from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.selection import conclude
from vllm_rollout.kernel.rules.types import CandidateId, Ending, GroupResult
from vllm_rollout.parts.shaping.rules.censoring import fit_log_lengths, length_beyond
from vllm_rollout.parts.shaping.rules.history import LengthHistory, ObservedLength
from vllm_rollout.parts.shaping.rules.moments import LengthMoments
from vllm_rollout.parts.shaping.rules.trace import Trace, TracedPrompt


class PoolCandidate(NamedTuple):
    """Final length, score and reward of a candidate that nothing stops."""

    num_tokens: int
    end: Literal["stop", "length"]
    num_known: int
    """Tokens that the trace recorded: fewer than `num_tokens` if the rest is drawn."""
    resampled: bool
    """True if this repeats another candidate of the prompt."""
    score: float | None
    reward: float | None


class Pools:
    """Candidates of every prompt of a trace, as many as a replay wants."""

    def __init__(self, trace: Trace, seed: int = 0) -> None:
        self.trace = trace
        self._seed = seed
        self._log_std = _log_std(trace) if trace.num_stopped else 0.0
        self._max_tokens = trace.max_tokens
        self._recorded: dict[tuple[int, int], list[PoolCandidate]] = {}
        self._resampled: dict[tuple[int, ...], tuple[Random, list[PoolCandidate]]] = {}

    def candidates(self, epoch: int, rollout: int, position: int, count: int, attempt: int = 0) -> list[PoolCandidate]:
        """The first `count` candidates of one prompt. After the first epoch or attempt all of them are resampled."""
        recorded = self._recorded_of(rollout, position)
        num_recorded = 0 if epoch or attempt else min(count, len(recorded))
        wanted = count - num_recorded
        if not wanted:
            return recorded[:num_recorded]
        key = (epoch, rollout, position, attempt) if attempt else (epoch, rollout, position)
        if key not in self._resampled:
            self._resampled[key] = Random(f"{self._seed}/more/{key}"), []
        chance, more = self._resampled[key]
        while len(more) < wanted:
            more.append(chance.choice(recorded)._replace(resampled=True))
        return recorded[:num_recorded] + more[:wanted]

    def _recorded_of(self, rollout: int, position: int) -> list[PoolCandidate]:
        key = (rollout, position)
        if key not in self._recorded:
            prompt = self.trace.rollouts[rollout].prompts[position]
            cap = self._max_tokens if prompt.max_tokens is None else prompt.max_tokens
            self._recorded[key] = _completed(prompt, self._log_std, cap, Random(f"{self._seed}/rest/{key}"))
        return self._recorded[key]


def _completed(prompt: TracedPrompt, log_std: float, cap: int, chance: Random) -> list[PoolCandidate]:
    if not any(candidate.is_stopped for candidate in prompt.candidates):
        return [PoolCandidate(c.num_tokens, c.end, c.num_tokens, False, c.score, c.reward) for c in prompt.candidates]
    finished = [c.num_tokens for c in prompt.candidates if c.end == "stop"]
    stops = [c.num_tokens for c in prompt.candidates if c.end != "stop" and c.num_tokens]
    fit = fit_log_lengths(finished, stops, log_std)
    completed = []
    for candidate in prompt.candidates:
        num_tokens, end = candidate.num_tokens, candidate.end
        if candidate.is_stopped:
            uniform = (chance.getrandbits(52) + 0.5) / 2**52
            drawn = round(length_beyond(fit, candidate.num_tokens, uniform))
            num_tokens, end = max(candidate.num_tokens + 1, drawn), "stop"
            if num_tokens >= cap:
                num_tokens, end = max(cap, candidate.num_tokens), "length"
        completed.append(PoolCandidate(num_tokens, end, candidate.num_tokens, False, candidate.score, candidate.reward))
    return completed


def _log_std(trace: Trace) -> float:
    """Standard deviation of log lengths within prompts, over the whole trace. The fit of one prompt relies on it."""
    history = LengthHistory()
    for prompt in trace.prompts:
        lengths = [ObservedLength(c.num_tokens, c.end != "stop") for c in prompt.candidates if c.num_tokens]
        history.observe("any prompt", lengths)
    return history.log_std()


@dataclass(slots=True, eq=False)
class Race:
    """One group of a replay."""

    prompt_id: str
    plan: GroupPlan
    pool: Sequence[PoolCandidate]
    """Candidates that the group may run: `plan.num_candidates`, or more for sessions."""
    prompt_tokens: int = 0
    said: dict[str, Any] = field(default_factory=dict)
    """Values of the group's candidates for parts."""
    scores: Any = None
    """Scores of the candidates, if a part has some (`parts/pruning/simulated.py`)."""
    lengths: LengthMoments | None = None
    """Statistics of known lengths: the prompt's, else the data set's."""
    max_tokens: int | None = None
    mean_tokens: float | None = None
    """Mean of all lengths observed before the group, in tokens, at most `max_tokens`."""
    candidates: list[Runner] = field(default_factory=list)
    group: Group = field(init=False)
    endings: tuple[Ending, ...] = ()
    """Ending of every candidate, by index. Empty until the group is over."""
    over_s: float = 0.0
    """Time at which the group was over."""
    started_s: float | None = None
    """Time at which the first candidate was admitted."""
    moves: list[tuple[float, int]] = field(default_factory=list)
    """Moves between ranks: (time, target rank)."""
    num_earlier: int = 0
    """Number of earlier answers to the prompt."""
    num_holding: int = 0
    """Number of running candidates that share the prompt's KV cache."""

    @property
    def ages_left(self) -> list[int]:
        """Estimated tokens of each running candidate: the length of the longest candidate that has ended."""
        running = set(self.group.running)
        ended = (runner.num_tokens for runner in self.candidates if runner.index not in running)
        return [max(ended, default=0)] * len(running)

    @property
    def result(self) -> GroupResult:
        """Result of the group, valid once the group is over."""
        return conclude(self.plan, self.endings)

    def close(self, seconds: float) -> None:
        self.over_s = seconds
        self.endings = tuple(runner.ending for runner in self.candidates)


@dataclass(slots=True, eq=False)
class Runner:
    """One candidate of a race."""

    id: CandidateId
    race: Race
    future: PoolCandidate
    start: int | None = None
    """Step at which the candidate had, or would have had, no token. None: it does not run."""
    num_tokens: int = 0
    """Generated tokens, up to date while the candidate does not run."""
    num_behind_kv: float | None = None
    """Tokens to compute when the candidate resumes after a transfer of its KV. None: no KV was transferred."""
    ended_s: float | None = None

    @property
    def index(self) -> int:
        return self.id.index

    @property
    def is_wanted(self) -> bool:
        return self.race.group.state(self.index) == "running"

    @property
    def detection_length(self) -> int | None:
        """Tokens after which the candidate is scored, or None if it has no score."""
        scores = self.race.scores
        return None if scores is None else scores.length(self.future)

    @property
    def ending(self) -> Ending:
        state = self.race.group.state(self.index)
        truncated = state == "finished" and self.future.end == "length"
        by_itself = self.future.end == "stop" and self.num_tokens == self.future.num_tokens and state != "pruned"
        return Ending(self.index, state, self.num_tokens, truncated, self.race.group.end_step(self.index), by_itself)
