"""Endings and choices from vLLM's outputs of candidates. Invariant: nothing here waits or sends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput

from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.types import Ending, GroupResult
from vllm_rollout.kernel.wire import EndingNote

TRUNCATED = frozenset({"length", "repetition"})
NO_NOTE = EndingNote("failed", 0, None)
"""Stands for the note of a candidate that the scheduler did not end."""


@dataclass(frozen=True, slots=True)
class CandidateOutput:
    """One output of a candidate. `note` comes with the last output of a candidate that the scheduler ended."""

    index: int
    output: RequestOutput | None
    """None for the end of a candidate that raised an exception in our code or vLLM's. Its siblings go on."""
    note: EndingNote | None


def ending_of(index: int, completion: CompletionOutput, note: EndingNote | None, num_tokens: int) -> Ending:
    """Ending from a candidate's last output. `num_tokens`: all its output tokens, also those of earlier outputs."""
    note, failed = note or NO_NOTE, completion.finish_reason == "error"
    return Ending(
        index=index,
        state="failed" if failed else note.state,
        num_tokens=num_tokens,
        truncated=completion.finish_reason in TRUNCATED,
        end_step=note.end_step,
        ended_by_itself=not failed and note.ended_by_itself,
        num_preemptions=note.num_preemptions,
    )


def pad_prompt_logprobs(output: RequestOutput) -> None:
    """Pad prompt log probabilities with None to one per prompt token, for a request that was stopped before its
    prefill.
    """
    given = output.prompt_logprobs
    if given and (num_missing := len(output.prompt_token_ids or ()) - len(given)) > 0:
        output.prompt_logprobs = [*given, *[None] * num_missing]


def chosen(plan: GroupPlan, result: GroupResult, finals: Collection[int]) -> list[int]:
    """Indices of the choices, at most `group_size`: the selected candidates, then the others with the most tokens
    first.

    `finals`: indices of candidates that have a last output.
    """
    indices = list(result.selected)
    others = [e for e in result.endings if e.index not in result.selected and e.index in finals]
    others.sort(key=lambda e: (-e.num_tokens, e.index))
    return indices + [e.index for e in others][: plan.group_size - len(indices)]


def choices_of(plan: GroupPlan, indices: Sequence[int], finals: dict[int, RequestOutput]) -> list[CompletionOutput]:
    """Exactly `group_size` choices. Empty choices fill the places without a candidate."""
    choices = []
    for position, index in enumerate(indices):
        (choice,) = finals[index].outputs
        choice.index = position
        choices.append(choice)
    logprobs: list[Any] | None = None if choices[0].logprobs is None else []
    for position in range(len(choices), plan.group_size):
        choices.append(CompletionOutput(position, "", [], None, logprobs, finish_reason="abort"))
    return choices


class NoTokens(list[int]):
    """An empty list that is true. vLLM's stream takes an empty false list before the first token for a part of the
    prefill.
    """

    def __bool__(self) -> bool:
        return True


def let_stream(output: RequestOutput) -> None:
    """Let vLLM stream the finish reasons of candidates that were stopped before their first token."""
    for completion in output.outputs:
        if completion.finish_reason is not None and not completion.token_ids:
            completion.token_ids = NoTokens()
