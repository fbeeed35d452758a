"""Checks that `serve` and `demo` run first, before vLLM ends with a traceback. They take milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from vllm_rollout import models
from vllm_rollout.doctor.machine import check_model, check_port
from vllm_rollout.doctor.packages import builds_here, check_python, check_torch, check_vllm, vllm_here

DEFAULT_PORT = 8000


def refuse_installation() -> str | None:
    """Reason why no server starts with these packages, or None. The checks cost milliseconds."""
    findings = (check_python(), check_vllm(*vllm_here()), check_torch(builds_here()))
    return next((finding.found for finding in findings if finding.level == "problem"), None)


def refuse_start(arguments: Sequence[str]) -> str | None:
    """Reason why a server with these flags would not start, or None. The checks cost milliseconds."""
    if refusal := refuse_installation():
        return refusal
    address, model = address_of(arguments), embedded_model_of(arguments)
    findings = [check_port(*address)] if address else []
    findings += [check_model(model)] if model else []
    return next((finding.found for finding in findings if finding.level == "problem"), None)


def address_of(arguments: Sequence[str]) -> tuple[str | None, int] | None:
    """Host and port that flags of `vllm serve` name. None if others decide, or nothing listens."""
    values: dict[str, str] = {}
    for argument, following in pairwise([*arguments, ""]):
        name, has_value, value = argument.partition("=")
        values[name] = value if has_value else following
    if values.keys() & {"--help", "-h", "--headless", "--uds", "--config", "--grpc"}:
        return None
    port = values.get("--port", str(DEFAULT_PORT))
    return (values.get("--host"), int(port)) if port.isdecimal() and int(port) else None


def embedded_model_of(arguments: Sequence[str]) -> str | None:
    """The embedded model that flags of `vllm serve` ask for. None for another model, and if only vLLM can tell."""
    bare = [
        argument
        for before, argument in pairwise(["", *arguments])
        if not argument.startswith("-") and before not in ("--host", "--port")
    ]
    if {argument.partition("=")[0] for argument in arguments} & {"--model", "--config", "--help", "-h"}:
        return None
    named = arguments[0] if bare else models.DEFAULT_MODEL
    return named if named in {model.name for model in models.list_models()} else None
