"""`--rollout-parallelism auto`: between rounds the engine gets the tensor-parallel size that the planner wants.

Invariant: no round runs while the engine is rebuilt, and none begins before it is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, Protocol

from vllm_rollout.background import to_its_end
from vllm_rollout.kernel.http.engine import RequestError
from vllm_rollout.kernel.http.metrics import Metrics
from vllm_rollout.parts.rounds.http.answers import ForecastAnswer, ParallelismAnswer, RebuildAnswer
from vllm_rollout.parts.rounds.http.body import RunRequest
from vllm_rollout.parts.rounds.http.rollout_round import RolloutRound
from vllm_rollout.parts.rounds.rules.planner import ParallelismDecision, ParallelismPlanner, RoundPressure
from vllm_rollout.parts.rounds.with_shaping.http.metrics import ParallelismMetrics
from vllm_rollout.parts.rounds.with_shaping.rules.forecast import (
    EngineSize,
    ExpectedRound,
    StartChoice,
    choose_start,
    expected_round,
    forecast,
)
from vllm_rollout.parts.shaping.rules.moments import LengthMoments

HISTORY_ROUNDS = 4096
"""Most rounds that the planner remembers."""
PATIENCE_S = 60.0
"""Seconds that a new round waits for other rounds to end, and again for other requests to leave the engine. After
that it runs at the current size, and the engine is rebuilt another time."""
PROMPT_TOKENS = 256
"""Assumed tokens of a prompt. Siblings share them, so they matter little beside the answers."""


@dataclass(frozen=True, slots=True)
class Resized:
    """Result of a rebuild."""

    outcome: Literal["rebuilt", "busy", "failed"]
    """`busy`: something else ran or the engine was paused, and nothing was done. `failed`: no engine of that size
    starts, and the engine was rebuilt at the old size."""
    size: int
    """The engine's tensor-parallel size now."""
    seconds: float
    """Seconds for which requests had to wait."""


class Resizable(Protocol):
    """The part of an engine that can change its tensor-parallel size."""

    @property
    def tensor_parallel_size(self) -> int: ...

    async def resize(self, size: int, patience_s: float) -> Resized:
        """Rebuild the engine at this size. Raises: RequestError (503) if the engine does not come back."""


class Parallelism:
    """Decides on the engine's size after each round. Acts before the next round, or before a trainer sends weights,
    which a later rebuild would lose."""

    def __init__(
        self,
        engine: Resizable,
        planner: ParallelismPlanner,
        metrics: Metrics,
        profiled: Mapping[int, EngineSize] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`profiled`: profiles by tensor-parallel size. `say`: prints a line for the server's operator."""
        self._engine = engine
        self._planner = planner
        self._metrics = metrics.of(ParallelismMetrics)
        self._profiled = profiled or {}
        self._say = say
        self._start: StartChoice | None = None
        self._rebuilt: RebuildAnswer | None = None
        """The rebuild since the newest round began, if there was one."""
        self._history: deque[RoundPressure] = deque(maxlen=HISTORY_ROUNDS)
        self._decision = planner.next_size(())
        self._turn = asyncio.Lock()
        self._round_over = asyncio.Event()
        self._num_rebuilds = 0
        self._last: Resized | None = None
        self._metrics.engine_sized(engine.tensor_parallel_size)
        self.has_live_round: Callable[[], bool] = lambda: False
        """Returns True if a round of any run is running."""

    @property
    def wants_start(self) -> bool:
        """True if no round has run yet and a profile can choose the first size."""
        return self._start is None and not self._history and bool(self._profiled)

    async def begin(self, settings: RunRequest, seen: LengthMoments | None, max_model_len: int, run: str) -> None:
        """Choose the size for the first round from forecasts. They are computed in a thread, since they may take a
        second.

        Arguments are those of `expected_of_run`, and the id of the run."""
        expected = expected_of_run(settings, seen, max_model_len)
        allowed = {size: self._profiled[size] for size in self._planner.allowed_sizes}
        choice = await asyncio.to_thread(choose_start, allowed, expected)
        if not self.wants_start:  # another run came first
            return
        self._start = choice
        self._decision = ParallelismDecision(self._start.size, "profile", 0.0)
        self._say(
            f"--rollout-parallelism auto: run {run!r} begins at tensor-parallel size {self._start.size}. The profile "
            f"expects of a round of {len(expected.lengths)} candidates, by size: {self._start}"
        )

    def take_rebuilt(self) -> RebuildAnswer | None:
        """The rebuild since the round before, if there was one. It is returned once, with the round that begins."""
        rebuilt, self._rebuilt = self._rebuilt, None
        return rebuilt

    def round_over(self, live: RolloutRound, num_places: int) -> None:
        """Decide on the next size. If the round ran at another size than decided, that decision still has to be
        carried out.

        `num_places`: candidates that run at once.
        """
        if self._is_due:
            return
        pressure = pressure_of(live, self._engine.tensor_parallel_size, num_places)
        if pressure is not None:
            self._history.append(pressure)
            self._decision = self._planner.next_size(tuple(self._history), self._seconds_at(live))
            if self._is_due:
                self._say(
                    f"--rollout-parallelism auto: tensor-parallel size {self._decision.size} from the next round on "
                    f"({self._decision.reason}). Round {live.opened.number} of run {live.run_id!r} preempted "
                    f"{pressure.rate:.2f} times per candidate, at size {pressure.size}; comparable rounds before it "
                    f"{self._decision.level:.2f}"
                )

    def round_left(self) -> None:
        """Note that a round no longer runs."""
        self._round_over.set()

    async def before_round(self) -> None:
        """Bring the engine to the decided size, once no other round runs.

        Raises: RequestError (503) if the engine does not come back.
        """
        try:
            async with asyncio.timeout(PATIENCE_S):
                while self._is_due and self.has_live_round():
                    self._round_over.clear()
                    await self._round_over.wait()
        except TimeoutError:  # the other round may wait for this one's client
            return
        await self._acted(PATIENCE_S)

    async def before_weights(self) -> None:
        """Bring the engine to the decided size, if that can be done at once. Raises: RequestError (503)."""
        if self._is_due and not self.has_live_round():
            await self._acted(0.0)

    def _seconds_at(self, live: RolloutRound) -> Callable[[int], float] | None:
        """Predicted seconds of a finished round, as a function of the size. None without profiles."""
        if not self._profiled:
            return None
        expected = expected_again(live)

        @cache
        def seconds(size: int) -> float:
            return forecast(self._profiled[size], expected).seconds

        return seconds

    @property
    def _is_due(self) -> bool:
        return self._decision.size != self._engine.tensor_parallel_size

    async def _acted(self, patience_s: float) -> None:
        """Rebuild to the end even if the caller goes away: half a rebuild would leave a dead engine."""
        await to_its_end(self._act(patience_s), "a rebuild of the engine", refusals=(RequestError,))

    async def _act(self, patience_s: float) -> None:
        async with self._turn:
            if not self._is_due:
                return
            size, before = self._decision.size, self._engine.tensor_parallel_size
            resized = await self._engine.resize(size, patience_s)
            if resized.outcome == "busy":
                return
            self._last = resized
            self._rebuilt = RebuildAnswer(
                wanted_size=size,
                size_before=before,
                tensor_parallel_size=resized.size,
                reason=self._decision.reason,
                seconds=resized.seconds,
            )
            self._num_rebuilds += 1
            self._metrics.engine_rebuilt(resized.outcome, resized.seconds)
            self._metrics.engine_sized(resized.size)
            if resized.outcome == "failed":
                self._forget(size)

    def _forget(self, size: int) -> None:
        """Disallow a size at which no engine starts, and all sizes beyond it."""
        now = self._engine.tensor_parallel_size
        kept = (each for each in self._planner.allowed_sizes if each != size and (each < size) is (now < size))
        self._planner = ParallelismPlanner(tuple(kept), now)
        self._decision = replace(self._decision, size=now)

    def answer(self) -> ParallelismAnswer:
        return ParallelismAnswer(
            tensor_parallel_size=self._engine.tensor_parallel_size,
            allowed_sizes=list(self._planner.allowed_sizes),
            next_size=self._decision.size,
            reason=self._decision.reason,
            preemptions_per_candidate=self._history[-1].rate if self._history else None,
            level=self._decision.level,
            is_rebuilding=self._turn.locked(),
            num_rebuilds=self._num_rebuilds,
            last_rebuild_s=None if self._last is None else self._last.seconds,
            forecasts=self._start
            and {size: ForecastAnswer.model_validate(each) for size, each in sorted(self._start.forecasts.items())},
        )


def expected_of_run(settings: RunRequest, seen: LengthMoments | None, max_model_len: int) -> ExpectedRound:
    """The expected first short round of a run.

    Args:
        seen: lengths of the data set. None if there are none yet.
        max_model_len: limit of answers if the run sets none.
    """
    terms = settings.terms
    spare = settings.redundancy if isinstance(settings.redundancy, int) else 0
    num_candidates = terms.num_candidates + spare
    max_tokens = (settings.sampling_params or {}).get("max_tokens") or max_model_len
    return expected_round(
        terms.num_prompts * num_candidates,
        terms.prompts_per_round * terms.group_size,
        min(max_tokens, max_model_len),
        mean_tokens=None if seen is None else seen.mean,
        std_tokens=None if seen is None else seen.std,
        prompt_tokens=PROMPT_TOKENS,
        group_size=num_candidates,
    )


def expected_again(live: RolloutRound) -> ExpectedRound:
    """A finished round, described as if it were to come."""
    lengths = [num_tokens for of_prompt in live.course.lengths.values() for num_tokens in of_prompt]
    num_prompts = max(1, len(live.course.lengths))
    prompt_tokens = sum(len(live.rollout.prompts[position].token_ids) for position in live.course.lengths)
    return ExpectedRound(lengths, len(lengths), prompt_tokens // num_prompts, max(1, len(lengths) // num_prompts))


def pressure_of(live: RolloutRound, size: int, num_places: int) -> RoundPressure | None:
    """The load of a finished round on the KV cache. None if nothing of it ran.

    Args:
        size: the tensor-parallel size that it ran at.
        num_places: candidates that run at once.
    """
    prompts, course = live.rollout.prompts, live.course
    contexts = sorted(
        len(prompts[position].token_ids) + num_tokens
        for position, lengths in course.lengths.items()
        for num_tokens in lengths
    )
    if not contexts:
        return None
    return RoundPressure(
        run=live.run_id,
        kind=live.opened.kind,
        size=size,
        num_candidates=len(contexts),
        num_preemptions=course.num_preemptions,
        kv_tokens=sum(contexts[-num_places:]),
    )
