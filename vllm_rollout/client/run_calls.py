"""What a server can be asked about runs. Invariant: as of `calls.py`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from typing_extensions import Unpack

from vllm_rollout.client.body import PromptLike, Redundancy, Selection, prompt_body
from vllm_rollout.client.calls import Call, EventsCall, typed
from vllm_rollout.config import DEFAULT_SPECULATION
from vllm_rollout.server.answers import RoundAnswer
from vllm_rollout.server.pruning_body import Pruning
from vllm_rollout.server.runs.answers import RunAnswer, RunsAnswer

_read_run = typed(RunAnswer)
_read_runs = typed(RunsAnswer)
_read_round = typed(RoundAnswer)


class RoundOptions(TypedDict, total=False):
    """Rollout fields of a round; what is left out is the run's:

    redundancy, early_stop, selection, pruning, migration, scale_down, on_engine_failure: as of a
        rollout.
    sampling: as of a rollout; a round's fields replace the run's.
    return_text, return_logprobs, return_unselected: what to send back.
    """

    redundancy: Redundancy
    early_stop: bool | str
    selection: Selection
    pruning: Mapping[str, Any] | Pruning
    migration: str
    scale_down: str
    on_engine_failure: str
    sampling: Mapping[str, Any]
    return_text: bool
    return_logprobs: bool
    return_unselected: bool


class RunOptions(RoundOptions, total=False):
    """Options of a run:

    prompt_speculation: a short round runs this many times prompts_per_round prompts.
    response_speculation: in a short round a prompt has this many times group_size candidates.
    queue_order: which waiting prompts a long round takes: "first_in", or by predicted length "shortest", "longest".
    resume: keep what a deferred prompt has generated, and go on from there in its long round.
    filter: "zero_variance": take out groups whose rewards are all the same. Its rounds are streamed.
    model: name of a served model.
    And rollout fields, the defaults of its rounds: see `RoundOptions`.
    """

    prompt_speculation: float
    response_speculation: float
    queue_order: str
    resume: bool
    filter: str
    model: str


def create_run(
    group_size: int, prompts_per_round: int, id: str | None = None, **options: Unpack[RunOptions]
) -> Call[RunAnswer]:
    """A run: rounds that return `prompts_per_round` prompts with `group_size` trajectories each (tail batching).

    `id`: your name for it. A run of that name on the same terms is gone on with, so that a trainer that starts again
    finds its queue. Options: see `RunOptions`; speculation factors are 1.25 unless you say so.

    Raises: RolloutError, 409 when there is one on other terms.
    """
    body = {"id": id, "group_size": group_size, "prompts_per_round": prompts_per_round, **_fields(options)}
    return Call("POST", "/v1/runs", _read_run, {field: value for field, value in body.items() if value is not None})


assert DEFAULT_SPECULATION == 1.25, "create_run says so"


def run(run_id: str) -> Call[RunAnswer]:
    """The run as it is now. Raises: RolloutError (404)."""
    return Call("GET", f"/v1/runs/{run_id}", _read_run)


def runs() -> Call[list[RunAnswer]]:
    """All runs of the server."""
    return Call("GET", "/v1/runs", lambda response: _read_runs(response).data)


def delete_run(run_id: str) -> Call[None]:
    """Forget a run and the prompts that wait in it. Raises: RolloutError (404; 409 while a round runs)."""
    return Call("DELETE", f"/v1/runs/{run_id}", lambda _: None)


def give_up_round(run_id: str, number: int) -> Call[RunAnswer]:
    """Put the prompts of an interrupted round back. Raises: RolloutError (404; 409 while it runs)."""
    return Call("DELETE", f"/v1/runs/{run_id}/rounds/{number}", _read_run)


def round(
    run_id: str,
    prompts: Iterable[PromptLike] = (),
    *,
    key: str,
    reserve: Iterable[PromptLike] = (),
    kind: str | None = None,
    epoch: int | None = None,
    timeout: float | None = None,
    **options: Unpack[RoundOptions],
) -> Call[RoundAnswer]:
    """One round of a run."""
    body = _round_body(prompts, reserve, key=key, kind=kind, epoch=epoch, **options)
    return Call("POST", f"/v1/runs/{run_id}/rounds", _read_round, body, timeout)


def stream_round(
    run_id: str,
    prompts: Iterable[PromptLike] = (),
    *,
    key: str,
    reserve: Iterable[PromptLike] = (),
    kind: str | None = None,
    epoch: int | None = None,
    stream_tokens: int | None = None,
    timeout: float | None = None,
    **options: Unpack[RoundOptions],
) -> EventsCall:
    """One round of a run, as events."""
    body = _round_body(prompts, reserve, key=key, kind=kind, epoch=epoch, **options)
    body["stream"] = True
    if stream_tokens is not None:
        body["stream_tokens"] = stream_tokens
    return EventsCall(body, timeout, f"/v1/runs/{run_id}/rounds")


def named(prompt: PromptLike, position: int) -> dict[str, Any]:
    """The prompt with an id: one made of what it says, where it has none."""
    body = prompt_body(prompt, position)
    if body.get("id") is None:
        said = json.dumps({field: value for field, value in body.items() if field != "id"}, sort_keys=True)
        body["id"] = f"prompt-{hashlib.sha256(said.encode()).hexdigest()[:16]}"
    return body


def _round_body(
    prompts: Iterable[PromptLike], reserve: Iterable[PromptLike], *, key: str, **fields: Any
) -> dict[str, Any]:
    own = {
        "prompts": [named(prompt, position) for position, prompt in enumerate(prompts)],
        "reserve": [named(prompt, position) for position, prompt in enumerate(reserve)],
        "kind": fields.pop("kind"),
        "epoch": fields.pop("epoch"),
    }
    return {
        "idempotency_key": key,
        **{field: value for field, value in own.items() if value not in (None, [])},
        **_fields(fields),
    }


def _fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as fields of a body. Raises: TypeError for one that there is not."""
    unknown = options.keys() - RunOptions.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"{sorted(unknown)[0]} is no option of a run; there are {', '.join(RunOptions.__annotations__)}"
        )
    returned = {"text": "return_text", "logprobs": "return_logprobs", "unselected": "return_unselected"}
    fields = {name: value for name, value in options.items() if name not in returned.values()}
    for name in ("selection", "pruning"):
        if isinstance(fields.get(name), Pruning):
            fields[name] = fields[name].model_dump(exclude_unset=True)
    wanted = {name: options[option] for name, option in returned.items() if option in options}
    return fields | ({"return": wanted} if wanted else {})
