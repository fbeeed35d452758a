"""Differences between vLLM versions in behaviour and in messages."""

from argparse import ArgumentParser

import pytest
from vllm.outputs import CompletionOutput

from vllm_rollout.adapter.compat import vllm_version
from vllm_rollout.kernel.api import versions
from vllm_rollout.kernel.api.versions import refuse_missing_flags, version_spans, weight_spans


@pytest.fixture
def oldest(monkeypatch):
    """As if the installed vLLM had nothing that later ones brought."""
    monkeypatch.setattr(versions, "has", lambda fact: fact.holds_for("0.29.0"))


@pytest.mark.parametrize(
    ("argument", "since", "instead"),
    [
        ("--log-level", "0.31", "set VLLM_LOGGING_LEVEL"),
        ("--log_level=DEBUG", "0.31", "set VLLM_LOGGING_LEVEL"),
        ("--logging-config.formatter=json", "0.31", "set VLLM_LOGGING_CONFIG_PATH"),
        ("--enable-scale-out", "0.30", "is always there"),
    ],
)
def test_a_flag_of_a_later_vllm_is_refused_with_what_helps(oldest, capsys, argument, since, instead):
    with pytest.raises(SystemExit) as ended:
        refuse_missing_flags(["model", "--seed", "1", argument], ArgumentParser())
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert f"{argument} needs vLLM {since} or later, found {vllm_version}" in message
    assert instead in message


def test_flags_that_the_oldest_vllm_has_are_left_to_its_own_parser(oldest):
    refuse_missing_flags(["log_level", "--log-config-file", "x", "--uvicorn-log-level", "info"], ArgumentParser())


def test_there_are_no_weight_spans_where_vllm_makes_none(oldest):
    completion = CompletionOutput(0, "", [], None, None)
    assert weight_spans(completion) == ()


@pytest.mark.parametrize(("starts", "num_tokens", "spans"), [
    ([], 5, []),
    ([(0, "a")], 0, []),
    ([(0, "a")], 5, [("a", 0, 5)]),
    ([(0, "a"), (3, "b"), (5, "c")], 5, [("a", 0, 3), ("b", 3, 5)]),
])  # fmt: skip
def test_spans_end_where_the_next_begins_or_the_tokens_do(starts, num_tokens, spans):
    assert [tuple(span.values()) for span in version_spans(starts, num_tokens)] == spans
