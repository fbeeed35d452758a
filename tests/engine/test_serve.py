"""`vllm-rollout serve` as a drop-in: flags, help, exit codes, OpenAPI, plugins, refusals."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.engine.conftest import ENVIRONMENT, TIMEOUT_S, run_script
from vllm_rollout.adapter.api.start.serve import allowed_plugins
from vllm_rollout.adapter.compat import LOGGING_FLAGS, SCALE_OUT_FLAG, has, vllm_version


def serve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_rollout.cli", "serve", *arguments],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, **environment},
        timeout=TIMEOUT_S,
    )


def test_help_lists_every_flag_of_vllm_serve() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    stock = {
        flag
        for action in make_arg_parser(FlexibleArgumentParser())._actions
        for flag in action.option_strings
        if flag.startswith("--")
    }
    shown = set(re.findall(r"--[a-z][a-z0-9_.-]*", serve("--help=all").stdout))
    assert len(stock) > 200
    # A help text breaks long lists of flags across lines; the parser is the same, so a few breaks are all there can be.
    assert len(stock - shown) < 0.02 * len(stock)


def test_short_help_says_what_is_added_and_what_the_default_model_is() -> None:
    done = serve("--help")
    assert done.returncode == 0
    assert "vllm-rollout serve" in done.stdout
    assert "/v1/rollouts" in done.stdout
    assert "smollm2-135m-instruct" in done.stdout


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
def test_a_bad_or_unsupported_flag_exits_with_2_and_says_why(arguments: tuple[str, ...], words: list[str]) -> None:
    done = serve("tiny-random", *arguments)
    assert done.returncode == 2
    for word in words:
        assert word in done.stderr


def test_a_rust_front_end_that_is_not_there_is_said() -> None:
    done = serve("tiny-random", VLLM_USE_RUST_FRONTEND="1", VLLM_RUST_FRONTEND_PATH="/nowhere/vllm-rs")
    assert done.returncode == 2
    assert "VLLM_RUST_FRONTEND_PATH=/nowhere/vllm-rs is no file" in " ".join(done.stderr.split())


def test_plugins_chosen_by_the_user_are_kept_and_ours_is_added() -> None:
    assert allowed_plugins("mine,other") == ["mine", "other", "vllm_rollout"]
    assert allowed_plugins("mine,vllm_rollout") == ["mine", "vllm_rollout"]
    assert allowed_plugins("") == ["vllm_rollout"]


def test_unset_plugins_become_all_that_are_installed() -> None:
    # vLLM's own two resolvers are registered as general plugins; an allow-list without them would switch them off.
    assert {"lora_filesystem_resolver", "lora_hf_hub_resolver", "vllm_rollout"} <= set(allowed_plugins(None))


def test_openapi_has_everything_of_stock_and_only_additions(tiny_model: str) -> None:
    stock = run_script("openapi.py", tiny_model)
    ours = run_script("openapi.py", tiny_model, VLLM_PLUGINS="vllm_rollout")
    added = {path for path in ours["paths"] if path not in stock["paths"]}
    assert added == {
        "/v1/rewards",
        "/v1/rollouts",
        "/v1/rollouts/{rollout_id}/rewards",
        "/v1/rollouts/prompts",
        "/v1/rollouts/state",
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
        "/v1/votes",
    }
    for path, operations in stock["paths"].items():
        assert ours["paths"][path] == operations
    for name, schema in stock["components"]["schemas"].items():
        assert ours["components"]["schemas"][name] == schema
