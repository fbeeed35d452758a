"""The front-end benchmark's arithmetic: its ideal, its medians, its table; and where it gets the Rust front end."""

import argparse
import os
import zipfile
from pathlib import Path

import pytest

from benchmarks.front_end import binary
from benchmarks.front_end import run as benchmark
from benchmarks.front_end.results import table
from benchmarks.front_end.run import medians
from benchmarks.front_end.workload import GROUP_SIZE, NUM_CANDIDATES, Ideal, ideal, lengths_of, prompts_of
from vllm_rollout import wheels


def seconds(num_steps_by_batch: dict[int, int]) -> float:
    return sum(steps * (8.0 + 0.02 * batch) / 1e3 for batch, steps in num_steps_by_batch.items())


def test_a_group_runs_until_its_eighth_candidate_ends():
    lengths = [10] * 3 + [20] * 5 + [30] * 8
    best = ideal([lengths])
    assert best.generated_tokens == 3 * 10 + 13 * 20
    assert best.seconds == pytest.approx(seconds({16: 10, 13: 10}))


def test_groups_share_steps_and_ranks_do_not():
    one, other = [10] * 16, [30] * 16
    assert ideal([one, other]).seconds == pytest.approx(seconds({32: 10, 16: 20}))
    assert ideal([one, other], num_ranks=2) == Ideal(pytest.approx(seconds({16: 30})), 16 * 40)


def test_the_workload_is_the_same_again_and_has_the_stated_mean():
    lengths = lengths_of(prompts_of(64, seed=1))
    assert lengths == lengths_of(prompts_of(64, seed=1)) != lengths_of(prompts_of(64, seed=2))
    assert {len(group) for group in lengths} == {NUM_CANDIDATES}
    assert sum(map(sum, lengths)) / (64 * NUM_CANDIDATES) == pytest.approx(375, rel=0.1)  # 400 before the cap
    assert NUM_CANDIDATES > GROUP_SIZE


def run(wall_s: float) -> dict[str, float]:
    names = ("api_cpu_s", "engine_cpu_s", "host_ms_per_step", "device_busy_s", "num_steps")
    return {"wall_s": wall_s, **dict.fromkeys(names, 2.0)}


def test_a_part_of_the_ideal_is_taken_within_each_repeat():
    size = {
        "candidates": 256,
        "ideal": [{"seconds": 1.0}, {"seconds": 8.0}, {"seconds": 3.0}],
        "runs": {"rollouts": [run(2.0), run(10.0), run(5.0)]},
    }
    size["medians"] = medians(size)
    assert size["medians"]["rollouts"]["of_ideal"] == pytest.approx(0.6)
    assert size["medians"]["rollouts"]["wall_s"] == 5.0
    shown = table({"sizes": [size], "workload": {"speed": 1.0, "ranks": 1}})
    assert "| 256 | **vllm-rollout**, `group_size: 8, redundancy: 8` | 5.00 | 3.00 | 60.0 % |" in shown


@pytest.fixture
def registry(monkeypatch, tmp_path):
    """An empty cache, and a registry with a wheel of vLLM; the packages that were asked for."""
    monkeypatch.setenv("VLLM_ROLLOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(binary, "installed_version", lambda: "0.99.0")
    asked = []

    def download(package: str, folder: Path) -> Path:
        asked.append(package)
        folder.mkdir()
        with zipfile.ZipFile(folder / "vllm-0.99.0.whl", "w") as archive:
            archive.writestr("vllm/vllm-rs", "#!/bin/sh\n")
            archive.writestr("vllm/_C.abi3.so", "large")
        return folder / "vllm-0.99.0.whl"

    monkeypatch.setattr(wheels, "download", download)
    return asked


def test_the_rust_front_end_is_taken_out_of_the_wheel_of_the_installed_version_once(registry, tmp_path):
    assert binary.found() is None
    path = binary.fetch()
    assert (path, registry) == (tmp_path / "cache/vllm-rs-0.99.0/vllm-rs", ["vllm==0.99.0"])
    assert os.access(path, os.X_OK)
    assert binary.fetch() == binary.found() == path
    assert len(registry) == 1
    assert [file for file in (tmp_path / "cache").rglob("*") if file.is_file()] == [path], "the wheel is not kept"


def test_without_the_rust_front_end_its_ways_are_left_out_and_it_is_said(registry, monkeypatch, capsys):
    def refuse(*arguments):
        raise RuntimeError("pip could not download vllm==0.99.0")

    monkeypatch.setattr(wheels, "download", refuse)
    arguments = argparse.Namespace(ways=["rollouts", "rust-close", "close"], api_servers=1)
    path, why = benchmark.rust_front_end(arguments)
    assert path is None
    assert why == "cannot be had: pip could not download vllm==0.99.0"
    assert "Without vLLM's Rust front end" in capsys.readouterr().err
    assert arguments.ways == ["rollouts", "close"]


def test_where_nobody_asks_for_the_rust_front_end_it_is_not_fetched(registry):
    for ways, api_servers in ((["rollouts"], 1), (["rollouts", "rust-join"], 2)):
        arguments = argparse.Namespace(ways=ways, api_servers=api_servers)
        assert benchmark.rust_front_end(arguments)[0] is None
        assert arguments.ways == ["rollouts"]
    assert registry == []
