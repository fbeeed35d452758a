"""What a server recorded of a way -> the trace that an emulated device gets.

Invariant: a candidate that ended by itself is as long there as it was here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from vllm_rollout.trace.rows import STOPPED, End, PromptRow, RolloutPrompt


class Seen(NamedTuple):
    """What is known of a candidate's length."""

    num_tokens: int
    end: End

    @property
    def is_full(self) -> bool:
        return self.end not in STOPPED


Lengths = dict[str, list[Seen]]
"""Candidates by index, by prompt id."""


def lengths_of(rows: Iterable[Sequence[RolloutPrompt]]) -> Lengths:
    """Of rollouts in the order in which they were made. A prompt that was deferred comes twice: what was seen in full
    counts, the later one first.
    """
    found: Lengths = {}
    for prompts in rows:
        for prompt in prompts:
            ends = prompt.ends or ["stop"] * len(prompt.lengths)
            seen = [Seen(*each) for each in zip(prompt.lengths, ends, strict=True)]
            found[prompt.id] = _merged(found.get(prompt.id, []), seen)
    return found


def _merged(earlier: Sequence[Seen], later: Sequence[Seen]) -> list[Seen]:
    merged = list(later)
    for index, seen in enumerate(earlier):
        if index >= len(merged):
            merged.append(seen)
        elif seen.is_full and not merged[index].is_full:
            merged[index] = seen
    return merged


def emulated_rows(lengths: Lengths, full: Lengths, names: Mapping[str, str], max_tokens: int) -> list[str]:
    """Lines of a trace, prompts by their digest (`names`).

    A candidate that was stopped gets its length from `full`, where the same one was let run, if that is longer than it
    had become; otherwise it does not end before `max_tokens`.
    """
    rows = []
    for prompt_id, candidates in lengths.items():
        known = full.get(prompt_id, [])
        completed = [
            seen if seen.is_full else _completed(seen, known[index] if index < len(known) else None, max_tokens)
            for index, seen in enumerate(candidates)
        ]
        row = PromptRow(
            prompt_id=names[prompt_id],
            lengths=[seen.num_tokens for seen in completed],
            ends=[seen.end for seen in completed],
            step=0,
        )
        rows.append(row.model_dump_json(exclude_none=True, exclude_defaults=True))
    return rows


def _completed(stopped: Seen, full: Seen | None, max_tokens: int) -> Seen:
    if full is not None and full.is_full and full.num_tokens > stopped.num_tokens:
        return full
    return Seen(max_tokens, "length")
