"""Differences between supported versions of vLLM in the API process: one function per difference.

Invariant: only this file asks the contract which variant applies in the API process.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm.outputs import CompletionOutput

from vllm_rollout.adapter.compat import (
    LOGGING_FLAGS,
    RETRYABLE,
    SCALE_OUT_FLAG,
    STARTUP,
    WEIGHT_SPANS,
    has,
    vllm_version,
)

LATER_FLAGS = {
    "log_level": (LOGGING_FLAGS, ", and set VLLM_LOGGING_LEVEL"),
    "logging_config": (LOGGING_FLAGS, ", and set VLLM_LOGGING_CONFIG_PATH"),
    "enable_scale_out": (SCALE_OUT_FLAG, ": what it switches on is always there"),
}
"""Flags that some versions lack, with the row of the contract and the replacement."""


def _rejections() -> tuple[type[Exception], ...]:
    """Exceptions for requests that come during a pause of mode `abort` or `wait`. Empty if such requests wait."""
    if not has(RETRYABLE):
        return ()
    from vllm.exceptions import RetryableRequestError

    return (RetryableRequestError,)


REJECTIONS = _rejections()


def weight_spans(completion: CompletionOutput) -> Sequence[Any]:
    """Weight versions by token spans. Empty if vLLM has none."""
    return (completion.weight_versions or ()) if has(WEIGHT_SPANS) else ()


def mend_weight_spans(completion: CompletionOutput, starts: Sequence[tuple[int, str]]) -> None:
    """Correct start and version of vLLM's spans, if it has some."""
    if starts and (spans := weight_spans(completion)):
        known = version_spans(starts, spans[-1].end)
        completion.weight_versions = [replace(spans[0], **span) for span in known]


def version_spans(starts: Sequence[tuple[int, str]], num_tokens: int) -> list[dict[str, Any]]:
    """Spans `{"version", "start", "end"}` over `num_tokens` output tokens. Each span ends where the next begins.

    Empty if `starts` is empty: the request was in no group any more when it ended.
    """
    ends = [*(start for start, _ in starts), num_tokens][1:]
    return [
        {"version": version, "start": start, "end": min(end, num_tokens)}
        for (start, version), end in zip(starts, ends, strict=True)
        if start < num_tokens
    ]


def set_up_environment() -> None:
    """Run vLLM's own first steps of a command."""
    if has(STARTUP):
        from vllm.entrypoints.common.startup import cli_env_setup
    else:
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    cli_env_setup()


def refuse_missing_flags(arguments: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Exit with status 2 and a remedy if a flag needs a later version of vLLM."""
    for argument in arguments:
        flag = argument.partition("=")[0].partition(".")[0]
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in LATER_FLAGS:
            continue
        row, instead = LATER_FLAGS[name]
        if not has(row):
            parser.error(f"{argument} needs vLLM {row.since} or later, found {vllm_version}. Leave it out{instead}.")


def configure_logging(args: argparse.Namespace) -> None:
    if has(LOGGING_FLAGS):
        from vllm.logger import configure_logging_from_args

        configure_logging_from_args(args)
