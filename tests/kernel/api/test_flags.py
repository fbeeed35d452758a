"""`vllm-rollout serve`: what our flags set, and what is refused before anything starts."""

import argparse
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_rollout import old_names
from vllm_rollout.adapter.names import CPU_EXECUTOR_CLS
from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.extras import install_command
from vllm_rollout.kernel.api import on_cpu, serve
from vllm_rollout.kernel.platform import choose_platform
from vllm_rollout.on_cpu import GIB, Cpu

pytestmark = pytest.mark.usefixtures("restored")

BACKENDS = ["--data-parallel-backend", "--distributed-executor-backend"]


@pytest.fixture
def parse_model(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The arguments of a server of another model, which is not fetched."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(serve, "resolve", lambda name: name if name.startswith(".") else f"/cache/{name}")
    return lambda model, *flags: serve.parse([model, *flags], "vllm-rollout serve", "")


def test_without_our_flags_nothing_changes(parsed):
    args = parsed()
    assert args.speculative_config is None
    assert args.worker_cls == serve.WORKER_CLS
    assert args.additional_config == ServeOptions(forks=True).into({})


@pytest.fixture
def ours() -> list[argparse.Action]:
    parser = FlexibleArgumentParser()
    theirs = set(parser._actions)
    serve.add_all_flags(parser)
    return [action for action in parser._actions if action not in theirs]


def test_names_of_our_flags_say_whose_they_are_what_they_take_and_in_which_unit(ours):
    for action in ours:
        is_switch = isinstance(action, argparse.BooleanOptionalAction)
        # vLLM 0.33 shows --disable-x, and takes --no-enable-x too
        prefix = "--((no-)?enable|disable)-rollout-" if is_switch else "--(rollout-|without$)"
        assert all(re.match(prefix, name) for name in action.option_strings), action.option_strings
        assert is_switch or action.nargs != 0, "say --enable-rollout-…"
        assert not {"on", "off"} & set(action.choices or ()), "say --enable-rollout-…"
        is_size = re.search("memory(?!-utilization)|ring|record-max", action.option_strings[0])
        assert bool(is_size) == action.option_strings[0].endswith(("-mib", "-gib")), action.option_strings
    units = {action.metavar for action in ours if action.option_strings[0].endswith(("-mib", "-gib"))}
    assert units <= {"MIB", "GIB"}


@pytest.mark.parametrize("old", old_names.SERVE)
def test_an_old_name_is_refused_wherever_it_stands(refusal, ours, tmp_path, old):
    new = old_names.SERVE[old]
    names = {name for action in ours for name in action.option_strings}
    replacing = set(re.findall(r"--[\w-]+", new.replace("--no-enable", "--enable")))
    assert replacing <= names or not replacing & names, "a part that is not there has none of them"
    assert old not in names
    assert f"{old} has a new name: {new}." in refusal(old, "x")
    for value in ("8", "off", "on"):
        config = tmp_path / "config.yaml"
        config.write_text(f"{old[2:]}: {value}\n")
        assert f"{old} has a new name: {new}." in refusal("--config", str(config))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--worker-cls", "other.Worker"), "would replace the worker"),
        (("--scheduler-cls", "other.Scheduler"), "would replace the scheduler"),
        (("--runner", "pooling"), "groups need --runner generate"),
        (("--rollout-admin-key", ""), "must not be empty. Leave the flag out for no key"),
    ],
)
def test_groups_that_could_not_work_are_refused_with_a_remedy(refusal, flags, said):
    assert said in refusal(*flags)


def test_one_worker_on_a_cpu_runs_inside_an_engine_core_that_is_a_copy_of_the_server(parsed, monkeypatch):
    for flags, in_core in (((), True), (("--tensor-parallel-size", "2"), False)):
        args = parsed(*flags)
        assert (args.distributed_executor_backend == CPU_EXECUTOR_CLS) is in_core
        assert ServeOptions.of(args).forks is in_core
    assert parsed("--distributed-executor-backend", "mp").distributed_executor_backend == "mp"
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")  # vLLM binds the threads of a process of its own only
    assert parsed().distributed_executor_backend is None


def test_an_embedded_model_gets_what_this_cpu_is_fast_with_and_other_models_advice(parse_model, monkeypatch, caplog):
    slow = Cpu("Old Xeon", frozenset({"avx2"}), 2)
    monkeypatch.setattr(on_cpu, "this_cpu", lambda: slow)
    caplog.set_level("INFO", on_cpu.logger.name)
    args = parse_model("tiny-random")
    assert (args.dtype, args.enforce_eager, args.kv_cache_memory_bytes) == ("float32", True, 2 * GIB)
    assert "Old Xeon with 2 cores: float32, as it lacks AVX512-BF16 or AMX" in caplog.text
    chosen = parse_model("tiny-random", "--dtype", "bfloat16", "--no-enforce-eager", "--gpu-memory-utilization", "0.5")
    assert (chosen.dtype, chosen.enforce_eager, chosen.kv_cache_memory_bytes) == ("bfloat16", False, None)
    other = parse_model("./somewhere")
    assert (other.dtype, other.enforce_eager, other.kv_cache_memory_bytes) == ("auto", False, None)
    assert "add --dtype float32 --enforce-eager" in caplog.text


def test_an_embedded_model_without_memory_is_one_sentence(parse_model, monkeypatch):
    monkeypatch.setattr("vllm_rollout.on_cpu.available_memory", lambda: 3 * GIB)
    with pytest.raises(SystemExit, match=r"needs 3\.5 GiB of memory, and 3\.0 GiB are available\. End other"):
        parse_model("tiny-random")


def test_threads_of_a_model_wait_asleep_on_a_cpu_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    choose_platform(["m"])
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    choose_platform(["m"])
    assert os.environ["OMP_WAIT_POLICY"] == "active"


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what vLLM's platform calls its devices in Ray, and whether Ray is there."""

    def set_up(device_key: str, *, is_there: bool) -> None:
        monkeypatch.setattr(type(serve.current_platform), "ray_device_key", device_key)
        monkeypatch.setattr(serve, "find_spec", lambda name: object() if is_there else None)

    return set_up


@pytest.mark.parametrize("flag", BACKENDS)
def test_where_ray_would_fail_later_it_is_refused(parsed, refusal, ray, flag):
    ray("", is_there=False)
    assert f"{flag} ray needs devices that Ray hands out" in refusal(flag, "ray")
    parsed(flag, "mp")  # asks nothing of Ray
    ray("GPU", is_there=False)
    assert install_command("ray") in refusal(flag, "ray")
    ray("GPU", is_there=True)
    args = parsed(flag, "ray")
    assert getattr(args, flag.removeprefix("--").replace("-", "_")) == "ray"
    assert (args.scheduler_cls, args.worker_cls) == (serve.SCHEDULER_CLS, serve.WORKER_CLS)


def test_pages_of_any_origin_are_allowed_only_where_the_user_says_so(parsed: Callable[..., Any]) -> None:
    assert (parsed().allowed_origins, parsed().rollout_allowed_hosts) == ([], [])
    assert parsed("--allowed-origins", '["*"]').allowed_origins == ["*"]
    assert parsed("--rollout-allowed-hosts", "a.example", "b").rollout_allowed_hosts == ["a.example", "b"]
