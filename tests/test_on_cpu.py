"""Settings chosen for a CPU, on machines that are files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_rollout import on_cpu, process
from vllm_rollout.on_cpu import GIB, Cpu, advice, available_memory, compiler, kv_cache_gib, this_cpu

AVX2, AVX512 = "fpu avx avx2", "fpu avx2 avx512f avx512bw"


def machine(root: Path, flags: str, siblings: list[str], field: str = "flags") -> Path:
    """A root folder with /proc and /sys: one entry of `siblings` for each logical CPU."""
    (root / "proc").mkdir()
    block = f"processor\t: 0\nmodel name\t: Some CPU @ 2.00GHz\n{field}\t\t: {flags}\n\n"
    (root / "proc/cpuinfo").write_text(block * len(siblings))
    for cpu, listed in enumerate(siblings):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{listed}\n")
    return root


@pytest.mark.parametrize(
    ("flags", "field", "dtype"),
    [
        (AVX2, "flags", "float32"),
        (AVX512, "flags", "float32"),
        (f"{AVX512} avx512_bf16", "flags", "bfloat16"),
        (f"{AVX2} amx_bf16", "flags", "bfloat16"),
        ("fp asimd bf16", "Features", "bfloat16"),
        ("fp asimd", "Features", "float32"),
    ],
)
def test_the_number_type_follows_from_the_instructions(tmp_path, flags, field, dtype):
    cpu = this_cpu(machine(tmp_path, flags, ["0"], field))
    assert (cpu.name, cpu.dtype) == ("Some CPU @ 2.00GHz", dtype)


@pytest.mark.parametrize(
    ("siblings", "allowed", "num_cores"),
    [
        (["0", "1"], {0, 1}, 2),
        (["0-1", "0-1"], {0, 1}, 1),
        (["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"], set(range(8)), 4),
        (["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"], {0, 4, 1}, 2),
        ([str(cpu) for cpu in range(64)], set(range(16)), 16),
        ([], {0, 1, 2}, 3),
    ],
    ids=["two cores", "one core with two threads", "four of those", "a part of them", "a container's", "not said"],
)
def test_threads_are_counted_by_cores_that_may_be_used(tmp_path, monkeypatch, siblings, allowed, num_cores):
    monkeypatch.setattr(on_cpu, "allowed_cpus", lambda: allowed)
    assert this_cpu(machine(tmp_path, AVX2, siblings)).num_cores == num_cores


@pytest.mark.parametrize(
    ("files", "num_cores"),
    [
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 4),
    ],
)
def test_a_container_has_no_more_threads_than_its_share_of_time(tmp_path, monkeypatch, files, num_cores):
    monkeypatch.setattr(on_cpu, "allowed_cpus", lambda: set(range(4)))
    root = machine(tmp_path, AVX2, ["0", "1", "2", "3"])
    for name, content in files.items():
        (root / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / name).write_text(f"{content}\n")
    assert this_cpu(root).num_cores == num_cores


def test_a_machine_that_says_nothing_of_its_cpu_has_cores_all_the_same(tmp_path):
    assert this_cpu(tmp_path).num_cores == len(os.sched_getaffinity(0))
    assert this_cpu(tmp_path).dtype == "float32"


@pytest.mark.parametrize(
    ("folder", "limit", "usage"),
    [
        ("sys/fs/cgroup", "memory.max", "memory.current"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_a_containers_limit_counts(tmp_path, folder, limit, usage):
    whole = available_memory(tmp_path)
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / limit).write_text(f"{GIB // 2}\n")
    (tmp_path / folder / usage).write_text(f"{GIB // 8}\n")
    assert available_memory(tmp_path) == 3 * GIB // 8 < whole
    (tmp_path / folder / limit).write_text("max\n")
    assert available_memory(tmp_path) > 3 * GIB // 8


def test_the_kv_cache_takes_what_a_small_model_needs_and_no_more():
    assert [kv_cache_gib(int(gib * GIB)) for gib in (3.5, 4.4, 4.5, 20, 500)] == [1, 1, 2, 2, 2]
    with pytest.raises(RuntimeError, match=r"needs 3\.5 GiB of memory, and 3\.4 GiB are available.*VLLM_CPU_KVCACHE"):
        kv_cache_gib(int(3.4 * GIB))


def test_advice_names_the_flags_that_would_help_and_no_others():
    slow, fast = Cpu("old", frozenset({"avx2"}), 2), Cpu("new", frozenset({"amx_bf16"}), 2)
    assert "add --dtype float32 --enforce-eager:" in str(advice(slow, "auto", enforce_eager=False))
    assert "add --dtype float32:" in str(advice(slow, "bfloat16", enforce_eager=True))
    assert "add --enforce-eager:" in str(advice(fast, "auto", enforce_eager=False))
    assert advice(slow, "float32", enforce_eager=True) is advice(fast, "auto", enforce_eager=True) is None


def test_the_compiler_is_the_one_that_torch_would_call(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert compiler() is None
    for name in ("g++", "my-c++"):
        (tmp_path / name).touch(mode=0o755)
    assert compiler() == str(tmp_path / "g++")
    monkeypatch.setenv("CXX", "my-c++")
    assert compiler() == str(tmp_path / "my-c++")


def test_a_stock_server_without_a_compiler_compiles_nothing_either(monkeypatch):
    monkeypatch.setattr(process, "runs_on_cpu", lambda: True)
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    monkeypatch.setattr(on_cpu, "compiler", lambda: "/usr/bin/g++")
    assert "TORCH_COMPILE_DISABLE" not in process.server_environment("m")
    monkeypatch.setattr(on_cpu, "compiler", lambda: None)
    assert process.server_environment("m")["TORCH_COMPILE_DISABLE"] == "1"
