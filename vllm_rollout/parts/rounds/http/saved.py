"""A saved state for a trainer's checkpoint: all runs, then everything learned.

    {"format": 3, "runs": num_bytes}     one line, then so many bytes of JSON, the runs, and a line end
    ...                                  everything learned, in the engine's format

Invariant: only bytes of this format are read. Anything else is a ValueError that says what is wrong.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from vllm_rollout.checks import fields_of, flag, integer, is_writable, listed, shown, text
from vllm_rollout.parts.rounds.http.body import RoundPrompt, RoundRequest, RunRequest
from vllm_rollout.parts.rounds.http.earlier import with_new_names
from vllm_rollout.parts.rounds.http.kept import read_kept
from vllm_rollout.parts.rounds.http.store import MAX_RUNS
from vllm_rollout.parts.rounds.http.stored import MAX_MODEL_CHARS
from vllm_rollout.parts.rounds.rules.rounds import Run
from vllm_rollout.parts.rounds.rules.rounds_state import MAX_ID_CHARS, run_from_state

FORMAT = 3
SEND_AS_IT_IS = "Send the bytes of GET /v1/rollouts/state as they are."
MAX_HEADER_BYTES = 256
RUN_FIELDS = ("id", "created", "model", "settings", "state", "memo", "keys", "prompts")


class Saved(NamedTuple):
    runs: list[Mapping[str, Any]]
    learned: bytes


def with_runs(runs: Sequence[Mapping[str, Any]], learned: bytes) -> bytes:
    body = json.dumps(runs).encode()
    return b"%s\n%s\n%s" % (json.dumps({"format": FORMAT, "runs": len(body)}).encode(), body, learned)


def parse_saved(state: bytes) -> Saved:
    """Split a saved state. Raises: ValueError for anything that is not one."""
    end = state.find(b"\n", 0, MAX_HEADER_BYTES)
    try:
        header = json.loads(state[: max(end, 0)])
    except ValueError as error:
        raise ValueError(f"its first line must be a header of at most {MAX_HEADER_BYTES} bytes of JSON") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"its header must say format {FORMAT}, got {shown(header)}")
    size = integer(header.get("runs"), "runs of a state, in bytes", 2, len(state))
    start = end + 1
    if state[start + size : start + size + 1] != b"\n":
        raise ValueError(f"it was cut off within its runs of {size} bytes, or they are of another size")
    try:
        runs = json.loads(state[start : start + size])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its runs are no JSON: {error}") from error
    runs = [_checked(run) for run in listed(runs, "runs of a state", MAX_RUNS)]
    ids = [run["id"] for run in runs]
    if len(set(ids)) != len(ids):
        raise ValueError(f"runs of a state must have different ids, got {shown(ids)}")
    return Saved(runs, state[start + size + 1 :])


def _checked(saved: Any) -> Mapping[str, Any]:
    """A saved run, checked to be complete and usable. Raises: ValueError."""
    saved = fields_of(saved, RUN_FIELDS, "a run of a state")
    id = text(saved["id"], "id of a run", MAX_MODEL_CHARS)
    text(saved["model"], "model of a run", MAX_MODEL_CHARS)
    integer(saved["created"], "created of a run")
    if saved["memo"] is not None:
        try:
            RoundRequest.from_memo(_written(saved["memo"], "memo of a run"))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"memo of a round of run {shown(id)} is none: {error}") from error
    try:
        settings = RunRequest.model_validate({**with_new_names(saved["settings"]), "id": id})
        said = settings.settings
    except (ValueError, TypeError) as error:
        raise ValueError(f"settings of run {shown(id)} are not those of a run: {error}") from error
    run = run_from_state(saved["state"])
    if run.terms != settings.terms:
        raise ValueError(f"terms of run {id!r} are not its settings', got {shown(run.terms)}")
    if (run.open is None) != (saved["memo"] is None):
        raise ValueError(f"run {id!r} has a memo while a round is open, and none else, got {shown(saved['memo'])}")
    _check_keys(run, saved["keys"])
    _check_prompts(run, saved["prompts"])
    return {**saved, "settings": said}


def _written(value: Any, where: str) -> str:
    """A string that the database takes. Raises: ValueError for any other value."""
    if not isinstance(value, str) or not is_writable(value):
        raise ValueError(f"{where} must be a string of characters of Unicode, got {shown(value)}")
    return value


def _check_keys(run: Run, keys: Any) -> None:
    """Check the keys of a run. Raises: ValueError unless every known round has its key, and no key comes twice."""
    used: set[str] = set()
    for row in listed(keys, "keys of a run"):
        key, number, given_up = listed(row, "a key of a run", length=3)
        if text(key, "a key of a run", MAX_ID_CHARS) in used:
            raise ValueError(f"keys of a run must be different, got {shown(key)} twice")
        used.add(key)
        integer(number, "round of a key")
        flag(given_up, "given_up of a key")
    known = {record.key for record in run.history} | ({run.open.key} if run.open else set())
    if not known <= used:
        raise ValueError(f"keys of a run must be those of its rounds, too, got none for {shown(sorted(known - used))}")


def _check_prompts(run: Run, prompts: Any) -> None:
    """Check the prompts of a run. Raises: ValueError unless every waiting prompt has its body."""
    waiting = {e.number: e.prompt_id for e in (*run.queue, *run.carried, *(run.open.all_entries if run.open else ()))}
    for row in listed(prompts, "prompts of a run"):
        number, body, kept = listed(row, "a prompt of a run", length=3)
        integer(number, "number of a prompt of a run")
        _written(body, "body of a prompt of a run")
        try:
            prompt = RoundPrompt.model_validate_json(body)
            if kept is not None:
                read_kept(base64.b64decode(kept, validate=True))
        except (ValidationError, TypeError) as error:
            raise ValueError(f"prompt {shown(number)} of a run is none: {error}") from error
        if waiting.pop(number, None) != prompt.id:
            raise ValueError(f"prompt {shown(number)} of a run is {prompt.id!r}, and does not wait in it under that id")
    if waiting:
        raise ValueError(f"prompts of a run have a body each, got none for {shown(sorted(waiting))}")
