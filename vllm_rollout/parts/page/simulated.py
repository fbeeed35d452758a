"""Turns rollouts of a replay into rows as a server records them, so that a page shows simulated beside real rollouts.

Invariant: a row has the groups, lengths and ends of its replay, and an id that no other row has. Every reader of traces
reads it.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from vllm_rollout.kernel.rules.types import Ending, GroupResult
from vllm_rollout.parts.page.recording.rows import MAX_ROW_NAME_CHARS, RolloutPrompt, RolloutRow
from vllm_rollout.parts.shaping.rules.trace import Trace, end_of
from vllm_rollout.simulator.race import Race
from vllm_rollout.simulator.replay import Ran
from vllm_rollout.whole_file import PUBLIC, write_whole

SECONDS_DIGITS = 6


class Recording:
    """Rows of a sweep. Rows of one rollout are adjacent, so that the last rows of the file show all settings."""

    def __init__(self, trace: Trace, *, in_steps: bool) -> None:
        """`in_steps`: no duration is known in seconds, so rows hold no times."""
        self._model = trace.models[0] if len(trace.models) == 1 else None
        self._in_steps = in_steps
        self._ids: set[str] = set()
        self._rows: dict[tuple[int, int], list[str]] = defaultdict(list)

    def add(self, ran: Ran) -> None:
        row = self._row(ran)
        self._rows[ran.epoch, ran.number].append(row.model_dump_json(exclude_none=True, exclude_defaults=True))

    def write(self, path: Path) -> None:
        """Replace the file at `path`. Raises: OSError."""
        rows = (row for place in sorted(self._rows) for row in self._rows[place])
        write_whole(path, "".join(f"{row}\n" for row in rows).encode(errors="surrogateescape"), PUBLIC)

    def _row(self, ran: Ran) -> RolloutRow:
        rank_of = {race: rank for rank, own in enumerate(ran.ranks) for race in own}
        pruning = ran.setting.pruning
        caps = [prompt.max_tokens for prompt in ran.rollout.prompts if prompt.max_tokens is not None]
        return RolloutRow(
            rollout_id=self._new_id(ran),
            model=self._model,
            group_size=ran.setting.group_size,
            max_tokens=max(caps, default=None),
            detection_length=None if pruning is None else pruning.detection_length,
            seconds=self._seconds(ran.run.seconds),
            num_prompts=len(ran.races),
            num_candidates=sum(len(race.candidates) for race in ran.races),
            setting=ran.setting.name,
            state="over",
            prompts=[
                self._prompt(position, prompt.key, race, result, rank_of[race])
                for position, (prompt, race, result) in enumerate(
                    zip(ran.rollout.prompts, ran.races, ran.results, strict=True)
                )
            ],
        )

    def _prompt(self, position: int, key: str, race: Race, result: GroupResult, rank: int) -> RolloutPrompt:
        moves = [(self._seconds(race.started_s), rank), *((self._seconds(at_s), to) for at_s, to in race.moves)]
        scores = [_score(race, ending) for ending in result.endings]
        selected = set(result.selected)
        rewards = [race.pool[e.index].reward if e.index in selected else None for e in result.endings]
        return RolloutPrompt(
            id=race.prompt_id,
            position=position,
            prompt_tokens=race.prompt_tokens,
            key=key,
            rank=moves[-1][1],
            moves=moves if len(moves) > 1 and not self._in_steps else None,
            status=result.status,
            reason=result.reason,
            audit=race.plan.audit,
            started_s=self._seconds(race.started_s),
            over_s=self._seconds(race.over_s),
            lengths=[ending.num_tokens for ending in result.endings],
            ends=[end_of(ending) for ending in result.endings],
            ended_s=None
            if self._in_steps
            else [self._seconds(race.candidates[e.index].ended_s) for e in result.endings],
            selected=list(result.selected),
            scores=scores if any(score is not None for score in scores) else None,
            rewards=rewards if any(reward is not None for reward in rewards) else None,
        )

    def _seconds(self, seconds: float | None) -> float | None:
        return None if self._in_steps or seconds is None else round(seconds, SECONDS_DIGITS)

    def _new_id(self, ran: Ran) -> str:
        again = f" again {ran.epoch}" if ran.epoch else ""
        whole = f"{ran.setting.name}/{ran.rollout.id or f'step-{ran.number}'}{again}"
        id, number = whole[:MAX_ROW_NAME_CHARS], 1
        while id in self._ids:
            number += 1
            id = f"{whole[: MAX_ROW_NAME_CHARS - 12]} ({number})"
        self._ids.add(id)
        return id


def _score(race: Race, ending: Ending) -> float | None:
    """Score by which the candidate was judged, or None if it ended before its detection length."""
    detection_length = race.candidates[ending.index].detection_length
    known = detection_length is not None and ending.num_tokens >= detection_length
    return race.pool[ending.index].score if known else None
