"""`vllm-rollout profile` on the real engine: the tiny model, a handful of points."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.engine.conftest import ENVIRONMENT, TIMEOUT_S
from tests.support.waiting import WAIT_S
from vllm_rollout.parts.shaping.profile_file import Profile

PROGRAM = "import typer; from vllm_rollout.profiling.command import register; app = typer.Typer(); "
PROGRAM += "app.callback()(lambda: None); register(app); app()"
SIZES, CONTEXTS = (1, 2, 3, 4, 6, 8), (64, 128)
FLAGS = ("--enforce-eager", "--max-num-seqs", "8", "--max-model-len", "256")


def command(model, output, *options):
    sizes, contexts = ",".join(map(str, SIZES)), ",".join(map(str, CONTEXTS))
    asked = ["--output", str(output), "--batch-sizes", sizes, "--contexts", contexts, "--steps", "6", *options]
    return [sys.executable, "-c", PROGRAM, "profile", model, *asked, "--", *FLAGS]


def processes_of(session):
    """Living processes in a session, zombies aside."""
    listed = subprocess.run(
        ["ps", "-eo", "sid=,pid=,stat="], capture_output=True, text=True, check=True, timeout=WAIT_S
    )
    rows = [line.split() for line in listed.stdout.splitlines()]
    return [int(pid) for sid, pid, state in rows if int(sid) == session and not state.startswith("Z")]


@pytest.fixture(scope="module")
def profile(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "ptl.json"
    done = subprocess.run(
        command(tiny_model, path), capture_output=True, text=True, env=ENVIRONMENT, timeout=3 * TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert path.with_suffix(".png").exists()
    return Profile.read(path)


def test_every_point_is_measured_on_as_many_candidates_at_its_context(profile):
    assert {(p.batch_size, p.context_tokens) for p in profile.points} == {(s, c) for s in SIZES for c in CONTEXTS}
    for point in profile.points:
        assert point.num_steps == 6
        assert 0 < point.p10_s <= point.median_s <= point.p90_s
        # Prompts end one token into a block, half of the steps before the context.
        assert point.context_tokens - 40 <= point.mean_context_tokens <= point.context_tokens + 6


def test_prefill_and_the_kv_cache_are_measured(profile):
    facts = profile.engine(1)
    assert {p.chunk_tokens for p in profile.prefill} >= {16, 64}
    assert facts.prefill_s_per_token + facts.step_prefill_s > 0
    assert facts.max_num_seqs == 8
    assert facts.kv_capacity_tokens > 8 * 256
    shape = profile.model
    assert facts.kv_bytes_per_token == 2 * shape["num_layers"] * shape["num_kv_heads"] * shape["head_size"] * 2


def test_the_profile_says_what_it_is_of(profile, tiny_model):
    assert profile.model_name == tiny_model
    assert profile.model["architecture"] == "Qwen3ForCausalLM"
    assert profile.model["dtype"] == "bfloat16"
    assert profile.flags["enforce_eager"] is True
    assert profile.versions["vllm"].startswith("0.32")
    assert profile.hardware["num_cpus"] == os.cpu_count()


def test_the_cost_model_is_of_the_measured_points(profile):
    cost, medians = profile.cost(), {(p.context_tokens, p.batch_size): p.median_s for p in profile.points}
    for fit in profile.fits:
        for size, residual in fit.residuals.items():
            expected = medians[fit.context_tokens, size] * (1 + residual)
            assert cost.ptl(size, fit.mean_context_tokens) == pytest.approx(expected)


def test_ctrl_c_stops_the_engine_and_keeps_the_points(tiny_model, tmp_path):
    path = tmp_path / "ptl.json"
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            command(tiny_model, path, "--steps", "100"),
            env=ENVIRONMENT,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        deadline = time.monotonic() + TIMEOUT_S
        while not (path.exists() and Profile.read(path).points):
            assert process.poll() is None, (tmp_path / "said").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, timeout=WAIT_S
        ).stdout.split()
        process.send_signal(signal.SIGINT)
        status = process.wait(TIMEOUT_S)
    assert status == 130, (tmp_path / "said").read_text()[-3000:]
    assert children
    assert [pid for child in children for pid in processes_of(int(child))] == []
    partial = Profile.read(path)
    assert 0 < len(partial.points) < len(SIZES) * len(CONTEXTS)
    assert partial.cost().ptl(4, 64) > 0
    assert "interrupted: " in (tmp_path / "said").read_text()
