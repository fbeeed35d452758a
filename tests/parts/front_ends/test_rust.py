"""VLLM_USE_RUST_FRONTEND=1: two front ends, what they set, and what does not go with them."""

import os
import socket
from pathlib import Path

import pytest
from vllm.entrypoints.cli import serve as vllm_serve

from vllm_rollout.adapter.compat import RUST_LISTENERS, has, vllm_version
from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.parts.front_ends.api import rust as front_ends


@pytest.fixture
def rust(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The binary of vLLM's Rust front end, named as a user does."""
    if not has(RUST_LISTENERS):
        pytest.skip(f"vLLM {vllm_version} cannot have ours beside its Rust front end")
    binary = tmp_path / "vllm-rs"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv(front_ends.VARIABLE, "1")
    monkeypatch.setenv(front_ends.PATH_VARIABLE, str(binary))
    return binary


def test_without_the_variable_there_is_one_front_end(parsed, refusal):
    args = parsed()
    assert (args.rollout_port, args.rust_front_end, ServeOptions.of(args).beside_rust) == (None, None, False)
    assert "set VLLM_USE_RUST_FRONTEND=1" in refusal("--rollout-port", "7001")


def test_vllm_starts_two_api_processes_of_which_one_is_made_in_rust(parsed, rust):
    args = parsed("--port", "7000")
    assert (args.api_server_count, args.port, args.rollout_port) == (2, 7000, 7001)
    assert args.rust_front_end == str(rust)
    assert args.mm_device_do_normalize is False
    assert ServeOptions.of(args).beside_rust
    assert not {front_ends.VARIABLE, front_ends.PATH_VARIABLE} & os.environ.keys(), "vLLM would start nothing else"
    theirs = vllm_serve.APIServerProcessManager
    with front_ends.both(args):
        assert vllm_serve.APIServerProcessManager.func is front_ends.FrontEnds
    assert vllm_serve.APIServerProcessManager is theirs


def test_a_node_without_front_ends_gets_none(parsed, rust):
    args = parsed("--headless")
    assert args.api_server_count is None
    assert ServeOptions.of(args).beside_rust
    theirs = vllm_serve.APIServerProcessManager
    with front_ends.both(args):
        assert vllm_serve.APIServerProcessManager is theirs


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--api-server-count", "2"), "--api-server-count does not go with VLLM_USE_RUST_FRONTEND=1"),
        (("--data-parallel-hybrid-lb",), "an external or hybrid load balancer does not go"),
        (("--data-parallel-rank", "0"), "an external or hybrid load balancer does not go"),
        (("--grpc-port", "7002"), "--grpc-port does not go"),
        (("--rollout-port", "70000"), "must be from 1 to 65535, got 70000"),
        (("--port", "65535"), "must be from 1 to 65535, got 65536"),
        (("--port", "7000", "--rollout-port", "7000"), "It must differ from --port"),
    ],
)
def test_what_cannot_be_had_with_two_front_ends_is_refused_with_a_remedy(refusal, rust, flags, said):
    assert said in refusal(*flags)


def test_adapters_that_come_later_would_be_known_at_one_front_end_only(refusal, rust, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    assert "--lora-modules" in refusal()


def test_a_binary_that_is_not_there_is_said_with_the_other_door(refusal, rust, monkeypatch):
    rust.chmod(0o644)
    assert "is no file that can be executed" in refusal()
    monkeypatch.setenv(front_ends.PATH_VARIABLE, "auto")
    monkeypatch.setattr(os.path, "isfile", lambda path: False)
    assert "vLLM's CUDA wheel has it" in refusal()
    monkeypatch.setattr(front_ends, "has", lambda fact: False)
    assert "`vllm serve --scheduler-cls vllm_rollout.Scheduler`" in refusal()


def test_a_port_that_is_taken_is_said_before_anything_starts(parsed, rust):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        args = parsed("--host", "127.0.0.1", "--rollout-port", str(port))
        said = pytest.raises(SystemExit, match=f"--rollout-port {port}: Address already in use")
        with said, front_ends.both(args):
            raise AssertionError("started")
