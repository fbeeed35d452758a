"""A run as JSON, and back. Invariant: a run restored goes on as the saved one; whatever else is a ValueError."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any, TypeVar

from vllm_rollout.config import MAX_GROUP_SIZE, MAX_PROMPTS, MAX_SPECULATION
from vllm_rollout.group.checks import MAX_COUNT, fields_of, integer, listed, number, shown, text
from vllm_rollout.group.rounds.rounds import (
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
from vllm_rollout.group.rounds.savings import Savings

FORMAT = 1
MAX_ID_CHARS = 256
MAX_ENTRIES = 2 * MAX_WAITING
"""Entries in one list of a run: what may wait, and what a round may add to it."""
MAX_TOKENS = 10_000_000
MAX_SECONDS = 1e9

T = TypeVar("T", bound=str)


def run_to_state(run: Run) -> dict[str, Any]:
    opened = run.open
    return {
        "format": FORMAT,
        "terms": list(astuple(run.terms)),
        "counts": [run.num_handed_in, run.num_rounds, run.num_returned, run.num_filtered, run.num_deferred],
        "totals": [run.generated_tokens, run.returned_tokens, run.latency_s],
        "queue": [_entry_to_state(entry) for entry in run.queue],
        "carried": [_entry_to_state(entry) for entry in run.carried],
        "open": opened
        and [
            opened.number,
            opened.key,
            opened.kind,
            [_entry_to_state(entry) for entry in opened.entries],
            [_entry_to_state(entry) for entry in opened.reserve],
            opened.num_wanted,
        ],
        "history": [list(astuple(record)) for record in run.history],
        "savings": [
            run.savings.round_tokens,
            run.savings.synchronous_tokens,
            [[block, *found] for block, found in run.savings.blocks.items()],
        ],
    }


def run_from_state(state: Any) -> Run:
    """Raises: ValueError for what no run can have been."""
    names = ("format", "terms", "counts", "totals", "queue", "carried", "open", "history", "savings")
    state = fields_of(state, names, "a run")
    if state["format"] != FORMAT:
        raise ValueError(
            f"format of a run must be {FORMAT}, got {shown(state['format'])}. Use the version that wrote it."
        )
    counts = [integer(count, "counts of a run") for count in listed(state["counts"], "counts of a run", length=5)]
    num_handed_in, num_rounds, *over = counts
    run = Run(_terms(state["terms"]), num_handed_in, num_rounds)
    run.num_returned, run.num_filtered, run.num_deferred = over
    generated, returned, latency_s = listed(state["totals"], "totals of a run", length=3)
    run.generated_tokens = integer(generated, "totals of a run")
    run.returned_tokens = integer(returned, "totals of a run")
    run.latency_s = number(latency_s, "totals of a run", 0, MAX_SECONDS)
    run.queue = _entries(state["queue"], "queue of a run")
    run.carried = _entries(state["carried"], "carried prompts of a run")
    run.open = None if state["open"] is None else _open_round(state["open"])
    run.history = [_record(record) for record in listed(state["history"], "history of a run", MAX_HISTORY_ROUNDS)]
    run.savings = _savings(state["savings"])
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


def _terms(values: Any) -> RunTerms:
    size, prompts, for_prompts, for_responses, order = listed(values, "terms of a run", length=5)
    return RunTerms(
        integer(size, "group_size of a run", 1, MAX_GROUP_SIZE),
        integer(prompts, "prompts_per_round of a run", 1, MAX_PROMPTS),
        number(for_prompts, "prompt_speculation of a run", 1, MAX_SPECULATION),
        number(for_responses, "response_speculation of a run", 1, MAX_SPECULATION),
        _one_of(order, QUEUE_ORDERS, "queue_order of a run"),
    )


def _entry_to_state(entry: Entry) -> list[Any]:
    return [entry.number, *astuple(entry.prompt), entry.num_deferred]


def _entries(values: Any, where: str) -> list[Entry]:
    return [_entry(value) for value in listed(values, where, MAX_ENTRIES)]


def _entry(values: Any) -> Entry:
    index, prompt_id, epoch, content, num_deferred = listed(values, "an entry of a run", length=5)
    if not isinstance(content, str) or len(content) > MAX_ID_CHARS:
        raise ValueError(f"content of an entry must be a digest, got {shown(content)}")
    prompt = FreshPrompt(
        text(prompt_id, "prompt_id of an entry", MAX_ID_CHARS),
        None if epoch is None else integer(epoch, "epoch of an entry"),
        content,
    )
    return Entry(integer(index, "number of an entry"), prompt, integer(num_deferred, "num_deferred of an entry"))


def _open_round(values: Any) -> OpenRound:
    index, key, kind, entries, reserve, num_wanted = listed(values, "open round of a run", length=6)
    return OpenRound(
        integer(index, "number of a round"),
        text(key, "key of a round", MAX_ID_CHARS),
        _one_of(kind, ROUND_KINDS, "kind of a round"),
        tuple(_entries(entries, "entries of a round")),
        tuple(_entries(reserve, "reserve of a round")),
        integer(num_wanted, "num_wanted of a round", 1, MAX_PROMPTS),
    )


def _record(values: Any) -> RoundRecord:
    index, key, kind, returned, filtered, deferred, *rest = listed(values, "record of a round", length=10)
    longest, latency_s, generated_tokens, returned_tokens = rest
    return RoundRecord(
        integer(index, "number of a round"),
        text(key, "key of a round", MAX_ID_CHARS),
        _one_of(kind, ROUND_KINDS, "kind of a round"),
        integer(returned, "prompts of a round", 0, MAX_ENTRIES),
        integer(filtered, "prompts of a round", 0, MAX_ENTRIES),
        integer(deferred, "prompts of a round", 0, MAX_ENTRIES),
        integer(longest, "max_tokens of a round", 0, MAX_TOKENS),
        number(latency_s, "latency_s of a round", 0, MAX_SECONDS),
        integer(generated_tokens, "tokens of a round"),
        integer(returned_tokens, "tokens of a round"),
    )


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


def _one_of(value: Any, allowed: tuple[T, ...], where: str) -> T:
    for known in allowed:
        if value == known:
            return known
    raise ValueError(f"{where} must be one of {', '.join(allowed)}, got {shown(value)}")
