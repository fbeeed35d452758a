"""Converts a run to JSON and back.

Invariant: a restored run goes on as the saved one would. Any other state raises a ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, fields
from functools import partial
from typing import Any, TypeVar

from vllm_rollout.checks import MAX_COUNT, fields_of, integer, listed, number, shown, text
from vllm_rollout.config import MAX_GROUP_SIZE, MAX_PROMPTS, MAX_SPECULATION
from vllm_rollout.kernel.rules.receipt import Receipt
from vllm_rollout.parts.rounds.rules.rounds import (
    MAX_HISTORY_ROUNDS,
    MAX_WAITING,
    QUEUE_ORDERS,
    ROUND_KINDS,
    Entry,
    FreshPrompt,
    OpenRound,
    RoundRecord,
    Run,
    RunTerms,
)
from vllm_rollout.parts.rounds.rules.savings import Savings

FORMAT = 1
MAX_ID_CHARS = 256
MAX_ENTRIES = 2 * MAX_WAITING
"""Most entries in one list of a run: those that may wait, and those that a round may add."""
MAX_TOKENS = 10_000_000
MAX_SECONDS = 1e9

Built = TypeVar("Built", RunTerms, FreshPrompt, OpenRound, RoundRecord)
Check = Callable[[Any, str], Any]


def run_to_state(run: Run) -> dict[str, Any]:
    opened = run.open and [
        list(map(_entry_to_state, value)) if isinstance(value, tuple) else value
        for value in (getattr(run.open, field.name) for field in fields(run.open))
    ]
    return {
        "format": FORMAT,
        "terms": list(astuple(run.terms)),
        "counts": [run.num_handed_in, run.num_rounds, run.num_returned, run.num_filtered, run.num_deferred],
        "totals": [run.generated_tokens, run.returned_tokens, run.latency_s],
        "queue": [_entry_to_state(entry) for entry in run.queue],
        "carried": [_entry_to_state(entry) for entry in run.carried],
        "open": opened,
        "history": [list(astuple(record)) for record in run.history],
        "savings": [
            run.savings.round_tokens,
            run.savings.synchronous_tokens,
            [[block, *found] for block, found in run.savings.blocks.items()],
        ],
        **({} if run.receipt is None else {"receipt": list(astuple(run.receipt))}),
    }


def run_from_state(state: Any) -> Run:
    """Restore a run. Raises: ValueError for a state that no run can have."""
    names = ("format", "terms", "counts", "totals", "queue", "carried", "open", "history", "savings")
    receipts = ("receipt",) if isinstance(state, Mapping) and "receipt" in state else ()  # none in older ones
    state = fields_of(state, (*names, *receipts), "a run")
    if state["format"] != FORMAT:
        raise ValueError(
            f"format of a run must be {FORMAT}, got {shown(state['format'])}. Use the version that wrote it."
        )
    counts = [integer(count, "counts of a run") for count in listed(state["counts"], "counts of a run", length=5)]
    num_handed_in, num_rounds, *over = counts
    run = Run(_built(RunTerms, state["terms"], "the terms of a run"), num_handed_in, num_rounds)
    run.num_returned, run.num_filtered, run.num_deferred = over
    generated, returned, latency_s = listed(state["totals"], "totals of a run", length=3)
    run.generated_tokens = integer(generated, "totals of a run")
    run.returned_tokens = integer(returned, "totals of a run")
    run.latency_s = number(latency_s, "totals of a run", 0, MAX_SECONDS)
    run.queue = _entries(state["queue"], "queue of a run")
    run.carried = _entries(state["carried"], "carried prompts of a run")
    run.open = None if state["open"] is None else _built(OpenRound, state["open"], "the open round of a run")
    records = listed(state["history"], "history of a run", MAX_HISTORY_ROUNDS)
    run.history = [_built(RoundRecord, record, "a round that is over") for record in records]
    run.savings = _savings(state["savings"])
    run.receipt = _receipt(state["receipt"]) if receipts else None
    _check_whole(run)
    return run


def _check_whole(run: Run) -> None:
    """Raises: ValueError unless every prompt that was handed in is in one place."""
    waiting = [*run.queue, *run.carried, *(run.open.all_entries if run.open else ())]
    numbers = {entry.number for entry in waiting}
    if len(numbers) != len(waiting) or not all(number < run.num_handed_in for number in numbers):
        raise ValueError(f"entries of a run must have numbers of their own below {run.num_handed_in}")
    if run.num_handed_in != len(waiting) + run.num_returned + run.num_filtered:
        raise ValueError(
            f"a run that was handed {run.num_handed_in} prompts holds or has returned as many, got {len(waiting)} that "
            f"wait, {run.num_returned} returned and {run.num_filtered} filtered"
        )


def _one_of(allowed: Sequence[str]) -> Check:
    def check(value: Any, where: str) -> Any:
        if value not in allowed:
            raise ValueError(f"{where} must be one of {', '.join(allowed)}, got {shown(value)}")
        return value

    return check


def _digest(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_ID_CHARS:
        raise ValueError(f"{where} must be a digest, got {shown(value)}")
    return value


def _epoch(value: Any, where: str) -> int | None:
    return None if value is None else integer(value, where)


def _entry_to_state(entry: Entry) -> list[Any]:
    return [entry.number, *astuple(entry.prompt), entry.num_deferred]


def _entries(values: Any, where: str) -> list[Entry]:
    return [_entry(value) for value in listed(values, where, MAX_ENTRIES)]


def _entry(values: Any) -> Entry:
    number, *prompt, num_deferred = listed(values, "an entry of a run", length=5)
    return Entry(
        integer(number, "number of an entry"),
        _built(FreshPrompt, prompt, "an entry"),
        integer(num_deferred, "num_deferred of an entry"),
    )


_COUNT: Check = integer
_NAME = partial(text, most=MAX_ID_CHARS)
_PROMPTS = partial(integer, least=1, most=MAX_PROMPTS)
_SPECULATION = partial(number, least=1, most=MAX_SPECULATION)
CHECKS: Mapping[str, Check] = {
    "group_size": partial(integer, least=1, most=MAX_GROUP_SIZE),
    "prompts_per_round": _PROMPTS,
    "prompt_speculation": _SPECULATION,
    "response_speculation": _SPECULATION,
    "queue_order": _one_of(QUEUE_ORDERS),
    "prompt_id": _NAME,
    "epoch": _epoch,
    "content": _digest,
    "key": _NAME,
    "kind": _one_of(ROUND_KINDS),
    "entries": lambda values, where: tuple(_entries(values, where)),
    "reserve": lambda values, where: tuple(_entries(values, where)),
    "num_wanted": _PROMPTS,
    "max_tokens": partial(integer, most=MAX_TOKENS),
    "latency_s": partial(number, least=0, most=MAX_SECONDS),
}
"""Checks by field name, for `RunTerms`, `FreshPrompt`, `OpenRound` and `RoundRecord`. Other fields are counts."""


def _built(of: type[Built], values: Any, where: str) -> Built:
    """An object from the list of its fields."""
    names = [field.name for field in fields(of)]
    found = zip(names, listed(values, where, length=len(names)), strict=True)
    return of(*(CHECKS.get(name, _COUNT)(value, f"{name} of {where}") for name, value in found))


def _receipt(values: Any) -> Receipt:
    where = "the receipt of a run"
    known = zip(fields(Receipt), listed(values, where, length=len(fields(Receipt))), strict=True)
    return Receipt(**{field.name: _of_receipt(field.name, value, where) for field, value in known})


def _of_receipt(name: str, value: Any, where: str) -> Any:
    if name.endswith("_tokens") or name.startswith("num_"):
        is_predicted = name in ("saved_tokens", "postponed_tokens")
        return None if is_predicted and value is None else integer(value, where, -MAX_COUNT if is_predicted else 0)
    return None if value is None else number(value, where, -MAX_SECONDS, MAX_SECONDS)


def _savings(values: Any) -> Savings:
    rounds, synchronous, blocks = listed(values, "savings of a run", length=3)
    found = {}
    for block in listed(blocks, "blocks of savings", MAX_ENTRIES):
        index, num_back, longest = listed(block, "a block of savings", length=3)
        found[integer(index, "a block of savings")] = (
            integer(num_back, "a block of savings", 1, MAX_PROMPTS),
            integer(longest, "a block of savings", 0, MAX_TOKENS),
        )
    return Savings(integer(rounds, "savings of a run"), integer(synchronous, "savings of a run", 0, MAX_COUNT), found)
