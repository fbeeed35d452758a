"""`vllm-rollout serve --rollout-parallelism auto`: what it sets, and what does not go with it."""

import os
from argparse import ArgumentParser

import pytest

from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.parts.rounds.with_shaping.api.flags import refuse

AUTO = ("--rollout-parallelism", "auto", "--rollout-parallelism-devices", "4")


def test_the_size_stays_unless_the_user_says_auto(parsed):
    assert parsed().rollout_parallelism == "fixed"


def test_devices_and_auto_need_each_other(refusal):
    assert "add that flag" in refusal(*AUTO[2:])
    assert "needs --rollout-parallelism-devices" in refusal(*AUTO[:2])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--api-server-count", "2"), "Only one API process can wait for an engine"),
        (("--data-parallel-size", "2"), "--data-parallel-size does not go with --rollout-parallelism auto"),
        (("--data-parallel-hybrid-lb",), "an external or hybrid load balancer does not go"),
        (("--data-parallel-external-lb",), "an external or hybrid load balancer does not go"),
        (("--data-parallel-rank", "0"), "an external or hybrid load balancer does not go"),
        (("--headless",), "--headless does not go"),
        (("--nnodes", "2"), "stays within one server"),
        (("--pipeline-parallel-size", "2"), "--pipeline-parallel-size does not go"),
        (("--enable-lora",), "Adapters loaded while it ran would be gone"),
        (("--data-parallel-backend", "ray"), "--data-parallel-backend does not go"),
        (("--distributed-executor-backend", "ray"), "--distributed-executor-backend does not go"),
        (("--max-model-len", "auto"), "say how many tokens"),
        (("--tensor-parallel-size", "8"), "at most --rollout-parallelism-devices (4)"),
        (("--rollout-parallelism-devices", "1"), "with one device there is nothing to choose"),
    ],
)
def test_what_does_not_go_with_an_engine_that_is_rebuilt_is_refused_with_a_remedy(refusal, flags, said):
    assert said in refusal(*AUTO, *flags)


def test_two_front_ends_would_not_wait(parsed, monkeypatch, capsys):
    args = parsed(*AUTO)
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(SystemExit):
        refuse(args, ArgumentParser())
    assert "--rollout-parallelism auto does not go with VLLM_USE_RUST_FRONTEND=1." in capsys.readouterr().err


def test_engines_are_not_started_as_copies_of_a_server_with_threads(parsed, monkeypatch):
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    parsed()
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
    args = parsed(*AUTO, "--tensor-parallel-size", "2")
    assert args.distributed_executor_backend is None, "the worker is a process of its own"
    assert not ServeOptions.of(args).forks
    assert (args.rollout_parallelism, args.rollout_parallelism_devices) == ("auto", 4)
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
