"""`vllm-rollout serve`: what moves along with a group."""

from types import SimpleNamespace

import pytest

from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.extras import install_command
from vllm_rollout.kernel.api.engine_calls import EngineCalls
from vllm_rollout.parts.moving.api import flags as moving_flags
from vllm_rollout.parts.moving.api.moving import EngineMoves
from vllm_rollout.parts.moving.options import MovingOptions


@pytest.mark.parametrize(
    ("flag", "moves", "by_nixl"),
    [
        ("--enable-rollout-move-kv", True, False),
        ("--no-enable-rollout-move-kv", False, False),
        ("--enable-rollout-nixl", True, True),
    ],
)
def test_what_moves_along_with_a_group_is_chosen(parsed, monkeypatch, flag, moves, by_nixl):
    monkeypatch.setattr(moving_flags, "is_nixl_available", lambda: True)
    options = MovingOptions.of(parsed(flag))
    assert (options.moves_kv, options.moves_kv_by_nixl) == (moves, by_nixl)


def test_a_missing_nixl_is_said_with_the_command_that_helps(refusal, monkeypatch):
    monkeypatch.setattr(moving_flags, "is_nixl_available", lambda: False)
    assert install_command("nixl") in refusal("--enable-rollout-nixl")


def test_nixl_moves_nothing_where_nothing_moves(refusal):
    said = refusal("--enable-rollout-nixl", "--no-enable-rollout-move-kv")
    assert "Leave out --no-enable-rollout-move-kv" in said


def test_groups_are_not_moved_by_a_plan_that_cannot_see_all_of_them():
    for beside_rust in (True, False):
        config = SimpleNamespace(additional_config=ServeOptions(beside_rust=beside_rust).into({}))
        client = SimpleNamespace(num_api_processes=1, vllm_config=config)
        moves = EngineMoves(client, EngineCalls(client), None)
        assert ("Rust front end" in (moves.refusal(priced=False) or "")) is beside_rust
