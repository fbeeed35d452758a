"""Groups whose candidates continue from an earlier round, and output that is kept for a later one.

Invariant: results read as if each candidate had run at once from its first token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from vllm_rollout.kernel.http.engine import (
    Beginnings,
    CandidateEnd,
    CandidateTokens,
    Engine,
    GroupOrder,
    Happening,
    PreparedPrompt,
)
from vllm_rollout.kernel.http.plan_port import GroupRecord
from vllm_rollout.kernel.rules.types import Ending
from vllm_rollout.parts.rounds.http.kept import MAX_KEPT_BYTES, KeptCandidate, keep
from vllm_rollout.parts.rounds.rules.resumption import (
    choose_resumed,
    joined_ending,
    joined_moments,
    joined_spans,
    spans_of,
)


@dataclass(slots=True)
class Resumption:
    """Output that candidates carry from round to round, in one rollout of a run that resumes."""

    keeps: bool
    """True if the output of deferred groups is kept, so that they can go on later."""
    before: Mapping[int, Sequence[KeptCandidate]]
    """Candidates that continue from an earlier round, by position."""
    kept: dict[int, bytes] = field(default_factory=dict)
    """Packed candidates for a later round, by position."""

    async def keep(self, position: int, record: GroupRecord) -> tuple[Sequence[Ending], str | None]:
        """Keep the candidates of a deferred group that go on later.

        Returns the endings of all other candidates, whose lengths are final, and a warning if there is too much to
        keep. Lengths of candidates that go on are reported when they are whole.
        """
        ends = record.ends.values()
        blob, chosen = await packed(record, ends, record.plan.group_size)
        if blob is None:
            return [end.ending for end in ends], (
                f"prompt {record.prompt.id!r} starts anew in its long round: its candidates have more than "
                f"{MAX_KEPT_BYTES} bytes."
            )
        self.kept[position] = blob
        return [end.ending for end in ends if end.ending.index not in chosen], None


async def packed(record: GroupRecord, ends: Collection[CandidateEnd], most: int) -> tuple[bytes | None, Sequence[int]]:
    """Pack candidates of the group that go on later, at most `most`. Returns them and their indices. None: too many
    bytes."""
    blob = await asyncio.to_thread(keep, ends, most, record.fields_of)
    return blob, choose_resumed([end.ending for end in ends], most)


class ResumedGroup:
    """The candidates of one prompt in a long round: kept ones, then new ones if there are too few."""

    def __init__(
        self,
        kept: Sequence[KeptCandidate],
        engine: Engine,
        order: GroupOrder,
        *,
        want_text: bool,
        indices: Sequence[int] | None = None,
    ) -> None:
        """`order`: the group's order as if all candidates were new. `indices`: of the kept ones. None: from 0."""
        self._kept = kept
        self._indices = range(len(kept)) if indices is None else indices
        self._engine = engine
        self._order = order
        self._want_text = want_text

    async def events(self) -> AsyncGenerator[Happening, None]:
        """Tokens and ends of the candidates. Unfinished ones run. In a stream, kept tokens come first."""
        order, plan = self._order, self._order.plan
        kept = dict(zip(self._indices, self._kept[: plan.num_candidates], strict=False))
        running: dict[int, Sequence[int]] = dict.fromkeys(range(len(kept), plan.num_candidates), ())
        for index, candidate in kept.items():
            if order.stream_tokens is not None and candidate.num_tokens:
                yield CandidateTokens(index, 0, candidate.token_ids, candidate.logprobs)
            if _is_over(candidate, order.prompt):
                yield self._whole(index, candidate)
            else:
                running[index] = candidate.token_ids
        if not running:
            return
        num_valid = sum(each.whole and not each.truncated for each in kept.values())
        wanted = max(1, min(len(running), plan.group_size - num_valid))
        rest = replace(plan, group_size=wanted, redundancy=len(running) - wanted)
        survival = {index: kept[index].survival_probability for index in running if index in kept}
        next_index = max(plan.num_candidates, *(index + 1 for index in running))
        beginnings = Beginnings(dict(sorted(running.items())), next_index, survival)
        async with aclosing(self._engine.run_group(replace(order, plan=rest, beginnings=beginnings))) as happenings:
            async for happening in happenings:
                yield self._joined(happening, kept)

    def _joined(self, happening: Happening, kept: dict[int, KeptCandidate]) -> Happening:
        if isinstance(happening, CandidateTokens):
            before = kept.get(happening.index)
            return happening if before is None else replace(happening, offset=happening.offset + before.num_tokens)
        before = kept.get(happening.ending.index)
        if before is None:
            return self._with_text(happening)
        num = before.num_tokens
        logprobs = None
        if before.logprobs is not None and happening.logprobs is not None:
            logprobs = [*before.logprobs, *happening.logprobs]
        spans = joined_spans(before.spans, num, spans_of(happening.weight_versions))
        joined = replace(
            happening,
            ending=joined_ending(happening.ending, num),
            token_ids=[*before.token_ids, *happening.token_ids],
            logprobs=logprobs,
            confidence=joined_moments(before.confidence, num, happening.confidence, happening.ending.num_tokens),
            weight_versions=[span._asdict() for span in spans],
            survival_before=before.survival_probability,
        )
        return self._with_text(joined)

    def _whole(self, index: int, kept: KeptCandidate) -> CandidateEnd:
        truncated = kept.truncated or not kept.whole
        num = kept.num_tokens
        end = CandidateEnd(
            ending=Ending(index, "finished", num, truncated, ended_by_itself=not truncated, num_resumed=num),
            token_ids=list(kept.token_ids),
            logprobs=None if kept.logprobs is None else list(kept.logprobs),
            text=None,
            finish_reason=kept.finish_reason if kept.whole else "length",
            stop_reason=kept.stop_reason,
            confidence=kept.confidence,
            weight_versions=[span._asdict() for span in kept.spans],
            survival_before=kept.survival_probability,
        )
        return self._with_text(end)

    def _with_text(self, end: CandidateEnd) -> CandidateEnd:
        if not self._want_text:
            return end
        stopped = end.finish_reason == "stop"
        return replace(end, text=self._engine.text_of(self._order.prompt, end.token_ids, stopped=stopped))


def _is_over(kept: KeptCandidate, prompt: PreparedPrompt) -> bool:
    """True if the candidate has nothing left to generate, even if it was stopped at its last allowed token."""
    return kept.whole or (prompt.max_tokens is not None and kept.num_tokens >= prompt.max_tokens)
