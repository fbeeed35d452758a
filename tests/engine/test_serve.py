"""`vllm-rollout serve` as a drop-in: flags, help, exit codes, OpenAPI, plugins, refusals."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.engine.conftest import ENVIRONMENT, TIMEOUT_S, run_script
from vllm_rollout.adapter import plugin
from vllm_rollout.adapter.compat import LOGGING_FLAGS, SCALE_OUT_FLAG, has, vllm_version
from vllm_rollout.kernel.api.serve import allowed_plugins, parse


def parsed(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status with which `vllm-rollout serve ARGUMENTS` ends before it starts anything."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(plugin, "register", lambda: None)  # vLLM's classes stay as they are
    for name in ("VLLM_PLUGINS", "VLLM_WORKER_MULTIPROC_METHOD"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        monkeypatch.delenv(name)
    with pytest.raises(SystemExit) as ended:
        parse(arguments, "vllm-rollout serve", "[model_tag] [options]")
    return ended.value.code


def test_help_lists_every_flag_of_vllm_serve(monkeypatch, capsys) -> None:
    stock = {
        flag
        for action in make_arg_parser(FlexibleArgumentParser())._actions
        for flag in action.option_strings
        if flag.startswith("--")
    }
    assert parsed(["--help=all"], monkeypatch) == 0
    shown = set(re.findall(r"--[a-z][a-z0-9_.-]*", capsys.readouterr().out))
    assert len(stock) > 200
    # A help text breaks long lists of flags across lines; the parser is the same, so a few breaks are all there can be.
    assert len(stock - shown) < 0.02 * len(stock)


def test_short_help_says_what_is_added_and_what_the_default_model_is() -> None:
    command = [sys.executable, "-m", "vllm_rollout.cli", "serve", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=TIMEOUT_S)
    assert done.returncode == 0
    for word in ("vllm-rollout serve", "/v1/rollouts", "smollm2-135m-instruct"):
        assert word in done.stdout
    assert "Qwen" not in done.stdout
    assert "vllm serve --help" not in done.stdout


LATER_FLAGS = [
    ((flag,), [flag, row.since, vllm_version])
    for flag, row in (("--log-level=DEBUG", LOGGING_FLAGS), ("--enable-scale-out", SCALE_OUT_FLAG))
    if not has(row)
]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--no-such-flag",), ["unrecognized arguments", "--no-such-flag"]),
        (("--max-num-seqs", "many"), ["--max-num-seqs", "many"]),
        (("--grpc",), ["--grpc", "HTTP"]),
        (("--scheduler-cls", "other.Scheduler"), ["--scheduler-cls other.Scheduler", "Leave it out"]),
        (("--worker-cls", "other.Worker"), ["--worker-cls other.Worker", "--worker-extension-cls"]),
        (("--runner", "pooling"), ["--runner pooling", "--runner generate"]),
        *LATER_FLAGS,
    ],
)
@pytest.mark.versions
def test_a_bad_or_unsupported_flag_exits_with_2_and_says_why(arguments, words, monkeypatch, capsys) -> None:
    assert parsed(["tiny-random", *arguments], monkeypatch) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


def test_plugins_chosen_by_the_user_are_kept_and_ours_is_added() -> None:
    assert allowed_plugins("mine,other") == ["mine", "other", "vllm_rollout"]
    assert allowed_plugins("mine,vllm_rollout") == ["mine", "vllm_rollout"]
    assert allowed_plugins("") == ["vllm_rollout"]


def test_unset_plugins_become_all_that_are_installed() -> None:
    # vLLM's own two resolvers are registered as general plugins; an allow-list without them would switch them off.
    assert {"lora_filesystem_resolver", "lora_hf_hub_resolver", "vllm_rollout"} <= set(allowed_plugins(None))


def test_openapi_has_everything_of_stock_and_only_additions(tiny_model: str) -> None:
    found = run_script("openapi.py", tiny_model)
    stock, ours = found["stock"], found["ours"]
    added = {path for path in ours["paths"] if path not in stock["paths"]}
    assert added == {
        "/v1/rewards",
        "/v1/rollouts",
        "/v1/rollouts/{rollout_id}/rewards",
        "/v1/rollouts/prompts",
        "/v1/rollouts/state",
        "/v1/rollouts/watch",
        "/v1/rollouts/watch/{rollout_id}/{position}",
        "/v1/groups",
        "/v1/groups/{group_id}",
        "/v1/sessions/events",
        "/v1/sessions/{session_id}",
        "/v1/sessions/{session_id}/finish",
        "/v1/quality_head",
        "/v1/quality_head/report",
        "/v1/quality_head/detection_lengths",
        "/v1/engines",
        "/v1/engines/advice",
        "/v1/engines/{rank}/drain",
        "/v1/engines/{rank}/restore",
        "/v1/runs",
        "/v1/runs/{run_id}",
        "/v1/runs/{run_id}/rounds",
        "/v1/runs/{run_id}/rounds/{number}",
        "/v1/feeds",
        "/v1/feeds/{feed_id}",
        "/v1/feeds/{feed_id}/events",
        "/v1/feeds/{feed_id}/prompts",
        "/v1/feeds/{feed_id}/batches",
        "/v1/votes",
        "/v1/weights/recompute",
        "/v1/weights/adapter_version",
    }
    for path, operations in stock["paths"].items():
        assert ours["paths"][path] == operations
    for name, schema in stock["components"]["schemas"].items():
        assert ours["components"]["schemas"][name] == schema
