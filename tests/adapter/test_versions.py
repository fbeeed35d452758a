"""What is done otherwise on one vLLM than on another, and what is said of it."""

import asyncio
from argparse import ArgumentParser
from types import SimpleNamespace

import pytest
from vllm.outputs import CompletionOutput

from vllm_rollout.adapter.api import versions
from vllm_rollout.adapter.api.versions import call_all_ranks, refuse_missing_flags, weight_spans
from vllm_rollout.adapter.compat import vllm_version


@pytest.fixture
def oldest(monkeypatch):
    """As if the installed vLLM had nothing that later ones brought."""
    monkeypatch.setattr(versions, "has", lambda fact: fact.holds_for("0.29.0"))


@pytest.mark.parametrize(
    ("argument", "variable"),
    [
        ("--log-level", "VLLM_LOGGING_LEVEL"),
        ("--log_level=DEBUG", "VLLM_LOGGING_LEVEL"),
        ("--logging-config.formatter=json", "VLLM_LOGGING_CONFIG_PATH"),
    ],
)
def test_a_flag_of_a_later_vllm_is_refused_with_what_helps(oldest, capsys, argument, variable):
    with pytest.raises(SystemExit) as ended:
        refuse_missing_flags(["model", "--seed", "1", argument], ArgumentParser())
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert f"{argument} needs vLLM 0.31 or later, found {vllm_version}" in message
    assert f"set {variable}" in message


def test_flags_that_the_oldest_vllm_has_are_left_to_its_own_parser(oldest):
    refuse_missing_flags(["log_level", "--log-config-file", "x", "--uvicorn-log-level", "info"], ArgumentParser())


def test_every_rank_is_called_and_answers_in_order_where_vllm_has_no_call_for_that(oldest):
    async def call(method, *args, engine):
        await asyncio.sleep(0.01 * (engine == b"first"))
        return method, args, engine

    core = SimpleNamespace(core_engines=[b"first", b"second"], _call_utility_async=call)
    answers = asyncio.run(call_all_ranks(core, "rollout_call", "operation", b"payload"))
    assert answers == [("rollout_call", ("operation", b"payload"), engine) for engine in (b"first", b"second")]


def test_there_are_no_weight_spans_where_vllm_makes_none(oldest):
    completion = CompletionOutput(0, "", [], None, None)
    assert weight_spans(completion) == ()
