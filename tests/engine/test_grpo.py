"""The reference trainer at a real server, with a tiny random model: what it learns, and what it survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.grpo import server as asked
from examples.grpo.train import Step, Training, parse
from tests.engine.conftest import ENVIRONMENT, TIMEOUT_S, Server, serve_command
from vllm_rollout import RolloutError
from vllm_rollout.integrations.served import check_served
from vllm_rollout.kernel.http.answers import GroupAnswer
from vllm_rollout.model_files import tiny

ROOT = Path(__file__).parents[2]
NUM_STEPS = 3


@pytest.fixture(scope="module")
def server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--max-model-len", "512", "--max-num-seqs", "64", "--dtype", "float32"]
    flags += ["--rollout-reward", "digit_sum=tests.engine.grpo_reward:odd"]
    log = tmp_path_factory.mktemp("grpo") / "server.log"
    environment = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(ROOT)}
    with Server(serve_command(tiny_model, *flags), log, **environment) as server:
        yield server


def words(model: str, output: Path, url: str, *more: str) -> list[str]:
    small = "--task digit_sum --seeded --prompts 4 --group-size 4 --max-tokens 16 --held-out 4 --evaluate-every 2"
    return [model, str(output), "--url", url, "--steps", str(NUM_STEPS), "--lr", "1e-3", *small.split(), *more]


def training(args: list[str]) -> Training:
    said = parse(args)
    said.output.mkdir(parents=True, exist_ok=True)
    server = asked.Server(said)
    server.bring_back()
    return Training(said, server)


def curve(output: Path) -> list[dict[str, Any]]:
    """The record, without what the clock and the last bits of floats say."""
    said = ("kind", "step", "success", "quarters", "lengths", "rewards", "teaching", "filtered", "gradient_norm")
    lines = [json.loads(line) for line in (output / "record.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in said if key in line} for line in lines if line["kind"] != "start"]


def start(args: list[str]) -> subprocess.Popen[bytes]:
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "examples.grpo.train", *args], env=environment, cwd=ROOT)


def kill_when(process: subprocess.Popen[bytes], happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not happened():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait(TIMEOUT_S)


def test_a_training_that_was_killed_goes_on_as_if_it_had_not(tiny_model: str, server: Server, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole" / "run", tmp_path / "broken" / "run"
    flags = ("--race", "--algorithm", "dapo")
    training(words(tiny_model, whole, server.url, *flags)).go()
    steps = [json.loads(line) for line in (whole / "record.jsonl").read_text().splitlines() if '"kind": "step"' in line]
    assert [line["step"] for line in steps] == list(range(NUM_STEPS))
    assert max(line["difference_max"] for line in steps) < 1e-4
    assert all(line["teaching"] and line["gradient_norm"] > 0 for line in steps)

    args = words(tiny_model, broken, server.url, *flags)
    record, checkpoint = broken / "record.jsonl", broken / "checkpoint.pt"
    process = start(args)
    kill_when(process, lambda: record.exists() and '"kind": "step"' in record.read_text())  # not in the checkpoint yet
    process = start(args)
    kill_when(process, checkpoint.exists)  # amid the next step
    assert start(args).wait(TIMEOUT_S) == 0
    for line, expected in zip(curve(broken), curve(whole), strict=True):
        assert line.pop("gradient_norm", 0) == pytest.approx(expected.pop("gradient_norm", 0), rel=1e-3)
        assert line == expected
    saved = [torch.load(path / "checkpoint.pt", weights_only=False)["weights"] for path in (whole, broken)]
    for name, tensor in saved[0].items():
        torch.testing.assert_close(saved[1][name], tensor, rtol=1e-3, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"was made with \{'prompts': '4'\}"):
        training([*args, "--prompts", "5"]).go()


def test_a_step_whose_server_is_lost_is_done_again(tiny_model: str, server: Server, tmp_path: Path) -> None:
    """Gradients of groups that had come before are dropped."""
    steady = training(words(tiny_model, tmp_path / "steady", server.url, "--stream"))
    shaken = training(words(tiny_model, tmp_path / "shaken", server.url, "--stream"))
    whole = shaken.groups

    def lost_once(step: Step) -> Iterator[GroupAnswer]:
        shaken.groups = whole  # type: ignore[method-assign]
        groups = whole(step)
        yield next(groups)
        raise RolloutError(None, "the connection broke", "ReadError")

    steady.prepare_server()
    expected = steady.persist(steady.roll_out_and_learn)
    shaken.prepare_server()
    shaken.groups = lost_once  # type: ignore[method-assign]
    step = shaken.persist(shaken.roll_out_and_learn)
    assert expected.result is not None
    assert step.result is not None
    assert step.result.gradient_norm == pytest.approx(expected.result.gradient_norm, rel=1e-4)
    assert shaken.progress.num_prompts == steady.progress.num_prompts == 4


def test_lora_learns_and_goes_on(tiny_model: str, server: Server, tmp_path: Path) -> None:
    whole, broken = (words(tiny_model, tmp_path / name / "run", server.url, "--lora", "4") for name in "ab")
    training(whole).go()
    training([*broken, "--steps", "2"]).go()
    training(broken).go()
    for line, expected in zip(curve(tmp_path / "b" / "run"), curve(tmp_path / "a" / "run"), strict=True):
        assert line.pop("gradient_norm", 0) == pytest.approx(expected.pop("gradient_norm", 0), rel=1e-3)
        assert line == expected
    steps = [json.loads(line) for line in (tmp_path / "b" / "run" / "record.jsonl").read_text().splitlines()]
    assert [line["difference_max"] < 1e-4 for line in steps if line["kind"] == "step"] == [True] * NUM_STEPS
    saved = torch.load(tmp_path / "a" / "run" / "checkpoint.pt", weights_only=False)["weights"]
    assert all("lora" in name for name in saved)


def test_what_does_not_fit_is_refused(tiny_model: str, server: Server, tmp_path: Path) -> None:
    tiny(tmp_path / "other", hidden_size=128)
    with pytest.raises(RuntimeError, match=r"'hidden_size': 256.*'hidden_size': 128.*Start the server"):
        training(words(str(tmp_path / "other"), tmp_path / "run", server.url))

    trained = training(words(tiny_model, tmp_path / "run", server.url))
    trained.prepare_server()
    version = server.http.get("/weight_info").json()
    wrong = Namespace(encode=lambda text, add_special_tokens: [1, 2])
    with pytest.raises(RuntimeError, match="tokenizer"):
        check_served(trained.server.client, trained.model.config, wrong, "1 + 1")

    weights = next(trained.model.parameters()).data
    kept = weights.clone()
    weights += 1.0  # not those that the server has
    with pytest.raises(RuntimeError, match="other weights"):
        trained.roll_out_and_learn()
    weights.copy_(kept)
    weights[0] = torch.nan
    with pytest.raises((FloatingPointError, ValueError), match=r"finite|nan"):
        trained.roll_out_and_learn()
    assert trained.progress.step == 0
    assert server.http.get("/weight_info").json() == version
    assert os.listdir(tmp_path / "run") == ["weights"]


def test_a_feed_trains_on_older_groups_and_a_trainer_that_was_killed_goes_on(
    tiny_model: str, server: Server, tmp_path: Path
) -> None:
    output = tmp_path / "fed" / "run"
    flags = ("--feed", "--max-staleness", "1", "--correct", "tis", "--race", "--steps", "5")
    args = words(tiny_model, output, server.url, *flags)
    record, checkpoint = output / "record.jsonl", output / "checkpoint.pt"
    process = start(args)
    kill_when(process, lambda: record.exists() and record.read_text().count('"kind": "step"') >= 2)
    feed_id = f"run-{torch.load(checkpoint, weights_only=False)['progress']['id']}"
    assert start(args).wait(TIMEOUT_S) == 0
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(5))
    assert {age for line in steps[-2:] for age in line["staleness"]} <= {0, 1}
    assert 1 in steps[-1]["staleness"]
    assert all(0 < line["ess_share"] <= 1 for line in steps)
    assert server.http.get(f"/v1/feeds/{feed_id}").status_code == 404, "what is over leaves no feed"
