"""`VLLM_USE_RUST_FRONTEND=1 vllm-rollout serve`: what goes with it, what does not, and what it sets."""

import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.entrypoints.cli import serve

from vllm_rollout.adapter import plugin
from vllm_rollout.adapter.api.calls.engine_calls import EngineCalls
from vllm_rollout.adapter.api.engine.moving import EngineMoves
from vllm_rollout.adapter.api.start import front_ends
from vllm_rollout.adapter.api.start.serve import parse
from vllm_rollout.adapter.compat import RUST_LISTENERS, has, vllm_version
from vllm_rollout.adapter.options import RolloutOptions

OPTIONS = RolloutOptions(beside_rust=True)


@pytest.fixture
def rust(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A binary, named as a user does."""
    if not has(RUST_LISTENERS):
        pytest.skip(f"vLLM {vllm_version} cannot have ours beside its Rust front end")
    binary = tmp_path / "vllm-rs"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv(front_ends.VARIABLE, "1")
    monkeypatch.setenv(front_ends.PATH_VARIABLE, str(binary))
    return binary


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `parse` sets for the process."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(plugin, "register", lambda: None)  # vLLM's classes stay as they are


def parsed(tiny_model: str, *flags: str):
    return parse([tiny_model, *flags], "vllm-rollout serve", "")


def refusal(tiny_model: str, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parsed(tiny_model, *flags)
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def options_of(args) -> RolloutOptions:
    return RolloutOptions.of(SimpleNamespace(additional_config=args.additional_config))


def test_vllm_starts_two_api_processes_of_which_one_is_made_in_rust(tiny_model, rust, monkeypatch):
    args = parsed(tiny_model, "--port", "7000")
    assert (args.api_server_count, args.port, args.rollout_port) == (2, 7000, 7001)
    assert args.rust_front_end == str(rust)
    assert args.mm_device_do_normalize is False
    assert options_of(args).beside_rust
    assert not {front_ends.VARIABLE, front_ends.PATH_VARIABLE} & os.environ.keys(), "vLLM would start nothing else"
    theirs = serve.APIServerProcessManager
    with front_ends.both(args):
        assert serve.APIServerProcessManager.func is front_ends.FrontEnds
    assert serve.APIServerProcessManager is theirs


def test_a_node_without_front_ends_gets_none(tiny_model, rust):
    args = parsed(tiny_model, "--headless")
    assert args.api_server_count is None
    assert options_of(args).beside_rust
    theirs = serve.APIServerProcessManager
    with front_ends.both(args):
        assert serve.APIServerProcessManager is theirs


def test_without_the_variable_nothing_changes(tiny_model, capsys):
    args = parsed(tiny_model)
    assert (args.api_server_count, args.rollout_port, args.rust_front_end) == (None, None, None)
    assert not options_of(args).beside_rust
    assert "set VLLM_USE_RUST_FRONTEND=1" in refusal(tiny_model, capsys, "--rollout-port", "7001")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--api-server-count", "2"), "--api-server-count does not go with VLLM_USE_RUST_FRONTEND=1"),
        (("--data-parallel-hybrid-lb",), "an external or hybrid load balancer does not go"),
        (("--data-parallel-rank", "0"), "an external or hybrid load balancer does not go"),
        (("--grpc-port", "7002"), "--grpc-port does not go"),
        (("--parallelism", "auto", "--parallelism-devices", "2"), "--parallelism auto does not go"),
        (("--port", "7000", "--rollout-port", "7000"), "It must differ from --port"),
    ],
)
def test_what_cannot_be_had_with_two_front_ends_is_refused_with_a_remedy(tiny_model, rust, capsys, flags, said):
    assert said in refusal(tiny_model, capsys, *flags)


def test_adapters_that_come_later_would_be_known_at_one_front_end_only(tiny_model, rust, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    assert "--lora-modules" in refusal(tiny_model, capsys)


def test_a_binary_that_is_not_there_is_said_with_the_other_door(tiny_model, rust, monkeypatch, capsys):
    rust.chmod(0o644)
    assert "is no file that can be executed" in refusal(tiny_model, capsys)
    monkeypatch.setenv(front_ends.PATH_VARIABLE, "auto")
    monkeypatch.setattr(os.path, "isfile", lambda path: False)
    assert "vLLM's CUDA wheel has it" in refusal(tiny_model, capsys)
    monkeypatch.setattr(front_ends, "has", lambda fact: False)
    assert "`vllm serve --scheduler-cls vllm_rollout.Scheduler`" in refusal(tiny_model, capsys)


def test_a_port_that_is_taken_is_said_before_anything_starts(tiny_model, rust):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        args = parsed(tiny_model, "--host", "127.0.0.1", "--rollout-port", str(port))
        said = pytest.raises(SystemExit, match=f"--rollout-port {port}: Address already in use")
        with said, front_ends.both(args):
            raise AssertionError("started")


def test_groups_are_not_moved_by_a_plan_that_cannot_see_all_of_them():
    for options, refused in ((OPTIONS, True), (RolloutOptions(), False)):
        config = SimpleNamespace(additional_config=options.into({}))
        client = SimpleNamespace(num_api_processes=1, vllm_config=config)
        moves = EngineMoves(client, EngineCalls(client), None, None)
        assert ("Rust front end" in (moves.refusal(priced=False) or "")) is refused
