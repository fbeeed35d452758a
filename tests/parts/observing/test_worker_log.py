"""Log messages of the worker about the operators in use."""

import logging
import sys

import pytest

from vllm_rollout.build_command import build_command
from vllm_rollout.parts.observing.tracker import dispatch
from vllm_rollout.parts.observing.tracker.dispatch import active_implementation
from vllm_rollout.parts.observing.worker.part import logger, say_what_serves


@pytest.fixture
def said(monkeypatch):
    """Records of the worker's log, of a process in which nothing has been chosen.

    A line is said once per process: who asks for one of its own names a runner that no other test has.
    """
    monkeypatch.delenv(dispatch.OPS_VARIABLE, raising=False)
    active_implementation.cache_clear()
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    monkeypatch.setattr(logger, "handlers", [handler])
    level = logger.level
    logger.setLevel(logging.INFO)
    yield records
    logger.setLevel(level)
    active_implementation.cache_clear()


def test_compiled_operators_are_named_in_a_line_of_information(said):
    pytest.importorskip("vllm_rollout._C")
    say_what_serves("V1 of this test", "cpu")
    (line,) = said
    assert line.levelno == logging.INFO
    assert "model runner V1 of this test, token_confidence: c++, update_confidence: c++" in line.getMessage()


def test_operators_that_do_not_load_are_a_warning_with_reason_and_remedy(said, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm_rollout._C", None)
    monkeypatch.delattr("vllm_rollout._C", raising=False)
    say_what_serves("V2 of this test", "cpu")
    (line,) = said
    assert line.levelno == logging.WARNING
    assert f"token_confidence: torch (vllm_rollout._C is not built: run `{build_command()}`)" in line.getMessage()
