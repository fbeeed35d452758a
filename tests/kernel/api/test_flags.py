"""`vllm-rollout serve`: what our flags set, what goes with them, and what is refused before anything starts."""

import argparse
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.cli import serve as vllm_serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_rollout import old_names
from vllm_rollout.extras import install_command
from vllm_rollout.kernel import plugin
from vllm_rollout.kernel.api import on_cpu, serve
from vllm_rollout.kernel.api.engine_calls import EngineCalls
from vllm_rollout.kernel.compat import RUST_LISTENERS, has, vllm_version
from vllm_rollout.kernel.names import CPU_EXECUTOR_CLS
from vllm_rollout.kernel.options import DRAFTS_CONFIG, EmulationOptions, ServeOptions
from vllm_rollout.kernel.platform import choose_platform
from vllm_rollout.on_cpu import GIB, Cpu
from vllm_rollout.parts.emulation.api import EMULATED_EXECUTOR_CLS, EMULATED_WORKER_CLS
from vllm_rollout.parts.front_ends import api as front_ends
from vllm_rollout.parts.moving.api.moving import EngineMoves

AUTO = ("--rollout-parallelism", "auto", "--rollout-parallelism-devices", "4")
BACKENDS = ["--data-parallel-backend", "--distributed-executor-backend"]
SETS = ("VLLM_PLUGINS", "VLLM_TARGET_DEVICE", "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "VLLM_WORKER_MULTIPROC_METHOD")
"""Environment variables that `parse` sets."""


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in SETS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(plugin, "register", lambda: None)  # vLLM's classes stay as they are


@pytest.fixture
def parsed(tiny_model: str) -> Callable[..., Any]:
    """The arguments of a server with these flags; `options` beside them: what its engine cores are told."""

    def parse(*flags: str) -> Any:
        args = serve.parse([tiny_model, *flags], "vllm-rollout serve", "")
        args.options = ServeOptions.of(SimpleNamespace(additional_config=args.additional_config))
        return args

    return parse


@pytest.fixture
def parse_model(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The arguments of a server of another model, which is not fetched."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(serve, "resolve", lambda name: name if name.startswith(".") else f"/cache/{name}")
    return lambda model, *flags: serve.parse([model, *flags], "vllm-rollout serve", "")


@pytest.fixture
def refusal(parsed: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Error message of flags that end the start."""

    def refuse(*flags: str) -> str:
        with pytest.raises(SystemExit) as ended:
            parsed(*flags)
        assert ended.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    return refuse


@pytest.fixture
def device(tmp_path: Path) -> str:
    """A file that says what an emulated device does."""
    path = tmp_path / "device.json"
    path.write_text('{"sizes": {"1": {}, "2": {}}}')
    return str(path)


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


def test_without_our_flags_nothing_changes(parsed):
    args = parsed()
    assert (args.rollout_parallelism, args.rollout_compat) == ("fixed", [])
    assert (args.rollout_port, args.rust_front_end) == (None, None)
    assert (args.enable_rollout_page, args.enable_rollout_drafts, args.speculative_config) == (True, False, None)
    assert (args.options.moves_kv, args.options.moves_kv_by_nixl) == (True, False)
    assert args.api_server_count is None
    assert args.worker_cls != EMULATED_WORKER_CLS
    assert (args.options.emulation, args.options.beside_rust) == (None, False)


@pytest.fixture
def ours() -> list[argparse.Action]:
    parser = FlexibleArgumentParser()
    theirs = set(parser._actions)
    serve.add_all_flags(parser)
    return [action for action in parser._actions if action not in theirs]


def test_names_of_our_flags_say_whose_they_are_what_they_take_and_in_which_unit(ours):
    assert len(ours) > 25
    for action in ours:
        is_switch = isinstance(action, argparse.BooleanOptionalAction)
        # vLLM 0.33 shows --disable-x, and takes --no-enable-x too
        prefix = "--((no-)?enable|disable)-rollout-" if is_switch else "--rollout-"
        assert all(re.match(prefix, name) for name in action.option_strings), action.option_strings
        assert is_switch or action.nargs != 0, "say --enable-rollout-…"
        assert not {"on", "off"} & set(action.choices or ()), "say --enable-rollout-…"
        is_size = re.search("memory(?!-utilization)|ring|record-max", action.option_strings[0])
        assert bool(is_size) == action.option_strings[0].endswith(("-mib", "-gib")), action.option_strings
    units = {action.metavar for action in ours if action.option_strings[0].endswith(("-mib", "-gib"))}
    assert units == {"MIB", "GIB"}


def test_sizes_are_whole_powers_of_two(parsed):
    options = parsed("--rollout-feature-ring-mib", "3", "--rollout-draft-memory-mib", "0.5").options
    assert (options.feature_ring_bytes, options.draft_memory_bytes) == (3 * 2**20, 2**19)


@pytest.mark.parametrize("old", old_names.SERVE)
def test_an_old_name_is_refused_wherever_it_stands(refusal, ours, tmp_path, old):
    new = old_names.SERVE[old]
    names = {name for action in ours for name in action.option_strings}
    assert set(re.findall(r"--[\w-]+", new.replace("--no-enable", "--enable"))) <= names
    assert old not in names
    assert f"{old} has a new name: {new}." in refusal(old, "x")
    for value in ("8", "off", "on"):
        config = tmp_path / "config.yaml"
        config.write_text(f"{old[2:]}: {value}\n")
        assert f"{old} has a new name: {new}." in refusal("--config", str(config))


def test_a_switch_of_a_configuration_file_is_never_left_out_silently(parsed, refusal, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("enable-rollout-page: false\n")
    assert "Write no-enable-rollout-page: true" in refusal("--config", str(config))
    config.write_text("no-enable-rollout-page: true\nenable-rollout-drafts: true\nrollout-feature-ring-mib: 3\n")
    args = parsed("--config", str(config))
    assert (args.enable_rollout_page, args.enable_rollout_drafts, args.rollout_feature_ring_mib) == (False, True, 3)


ALONE = [
    (("--rollout-audit-ratio", "1.5"), "must be in [0, 1], got '1.5'"),
    (("--worker-cls", "other.Worker"), "would replace the worker"),
    (("--rollout-emulate-speed", "2"), "name one with --rollout-emulate FILE"),
    (("--rollout-emulate-log", "here"), "name one with --rollout-emulate FILE"),
    (("--rollout-record-max-mib", "-1"), "must be a whole number of MiB, 0 for no bound, got '-1'"),
    (("--rollout-port", "7001"), "set VLLM_USE_RUST_FRONTEND=1"),
    (("--rollout-judge-cores", "0"), "name one with --rollout-judge MODEL"),
    (("--enable-rollout-nixl", "--no-enable-rollout-move-kv"), "Leave out --no-enable-rollout-move-kv"),
    (AUTO[2:], "add that flag"),
    (AUTO[:2], "needs --rollout-parallelism-devices"),
    (("--rollout-compat", "nobody"), "prime-rl"),
    (("--rollout-compat", "prime-rl"), "VLLM_SERVER_DEV_MODE=1"),
    (("--rollout-compat", "trl-legacy"), "Install TRL 1.14 to 1.16, and write --rollout-compat trl."),
]
WITH_AUTO = [
    (("--api-server-count", "2"), "Only one API process can wait for an engine"),
    (("--data-parallel-size", "2"), "--data-parallel-size does not go with --rollout-parallelism auto"),
    (("--data-parallel-hybrid-lb",), "an external or hybrid load balancer does not go"),
    (("--data-parallel-external-lb",), "an external or hybrid load balancer does not go"),
    (("--data-parallel-rank", "0"), "an external or hybrid load balancer does not go"),
    (("--headless",), "--headless does not go"),
    (("--nnodes", "2"), "stays within one server"),
    (("--pipeline-parallel-size", "2"), "--pipeline-parallel-size does not go"),
    (("--enable-lora",), "Adapters loaded while it ran would be gone"),
    (("--data-parallel-backend", "ray"), "--data-parallel-backend does not go"),
    (("--distributed-executor-backend", "ray"), "--distributed-executor-backend does not go"),
    (("--max-model-len", "auto"), "say how many tokens"),
    (("--tensor-parallel-size", "8"), "at most --rollout-parallelism-devices (4)"),
    (("--rollout-parallelism-devices", "1"), "with one device there is nothing to choose"),
]


@pytest.mark.parametrize(("flags", "said"), [*ALONE, *(((*AUTO, *flags), said) for flags, said in WITH_AUTO)])
def test_what_does_not_go_together_is_refused_with_a_remedy(refusal, monkeypatch, flags, said):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "0")
    assert said in refusal(*flags)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--enable-lora",), "--enable-lora does not go with --rollout-emulate"),
        (("--tensor-parallel-size", "4"), "it has no tensor-parallel size 4, but 1, 2. Say what a step costs there"),
        (("--pipeline-parallel-size", "2"), "--pipeline-parallel-size does not go"),
        (("--enable-prompt-embeds",), "Send prompts as text or tokens"),
        (("--distributed-executor-backend", "mp"), "--distributed-executor-backend does not go"),
        (("--speculative-config", '{"method": "ngram"}'), "Leave it out, or take --enable-rollout-drafts"),
        (("--async-scheduling", "--enable-rollout-drafts"), "vLLM schedules synchronously"),
        (("--rollout-emulate-speed", "0"), "must be in [0.001, 1000], got '0'"),
    ],
)
def test_what_cannot_be_emulated_is_refused_with_a_remedy(refusal, device, flags, said):
    assert said in refusal("--rollout-emulate", device, *flags)


def test_a_broken_device_is_refused(refusal, device):
    Path(device).write_text('{"step": {"ms": 0}}')
    assert "step.ms: input should be greater than 0, got 0" in refusal("--rollout-emulate", device)


def test_settings_of_a_device_reach_the_engine_cores(parsed, device, tmp_path):
    log = str(tmp_path / "log")
    flags = ("--rollout-emulate-speed", "0.5", "--rollout-emulate-log", log, "--data-parallel-size", "4")
    args = parsed("--rollout-emulate", device, *flags)
    assert (args.worker_cls, args.distributed_executor_backend) == (EMULATED_WORKER_CLS, EMULATED_EXECUTOR_CLS)
    assert args.options.emulation == EmulationOptions(device, 0.5, log, async_scheduling=True, num_ranks=4)
    assert not parsed("--rollout-emulate", device, "--no-async-scheduling").options.emulation.async_scheduling


def test_an_emulated_device_drafts_in_the_synchronous_loop(parsed, device):
    args = parsed("--rollout-emulate", device, "--enable-rollout-drafts")
    assert args.speculative_config == DRAFTS_CONFIG
    assert not args.options.emulation.async_scheduling


@pytest.mark.parametrize(
    ("arguments", "platform"),
    [
        (["m", "--rollout-emulate", "f"], "cpu"),
        (["--rollout-emulate=f"], "cpu"),
        (["m"], None),
        (["--rollout-emulate-log", "x"], None),
    ],
)
def test_an_emulated_device_needs_no_platform_of_its_own(arguments, platform):
    choose_platform(arguments)
    assert os.environ.get("VLLM_TARGET_DEVICE") == platform


def test_one_worker_on_a_cpu_runs_inside_an_engine_core_that_is_a_copy_of_the_server(parsed, monkeypatch):
    for flags, in_core in (((), True), (("--tensor-parallel-size", "2"), False), (AUTO, False)):
        args = parsed(*flags)
        assert (args.distributed_executor_backend == CPU_EXECUTOR_CLS, args.options.forks) == (in_core, in_core)
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


def test_engines_are_not_started_as_copies_of_a_server_with_threads(parsed, monkeypatch):
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    parsed()
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
    args = parsed(*AUTO, "--tensor-parallel-size", "2")
    assert (args.rollout_parallelism, args.rollout_parallelism_devices) == ("auto", 4)
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_an_emulated_engine_that_may_be_rebuilt_is_no_copy_either(parsed, device):
    for flags, forks in ((("--tensor-parallel-size", "2"), True), (AUTO, False)):
        assert parsed("--rollout-emulate", device, *flags).options.forks is forks


def test_trainers_are_named_one_by_one(parsed, monkeypatch):
    assert parsed("--rollout-compat", "trl").rollout_compat == ["trl"]
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    both = parsed("--rollout-compat", "skyrl", "--rollout-compat", "prime-rl")
    assert both.rollout_compat == ["skyrl", "prime-rl"]


@pytest.mark.parametrize(
    ("flag", "moves", "by_nixl"),
    [
        ("--enable-rollout-move-kv", True, False),
        ("--no-enable-rollout-move-kv", False, False),
        ("--enable-rollout-nixl", True, True),
    ],
)
def test_what_moves_along_with_a_group_is_chosen(parsed, monkeypatch, flag, moves, by_nixl):
    monkeypatch.setattr(serve, "is_nixl_available", lambda: True)
    options = parsed(flag).options
    assert (options.moves_kv, options.moves_kv_by_nixl) == (moves, by_nixl)


def test_a_missing_nixl_is_said_with_the_command_that_helps(refusal, monkeypatch):
    monkeypatch.setattr(serve, "is_nixl_available", lambda: False)
    assert install_command("nixl") in refusal("--enable-rollout-nixl")


# -- Ray


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


# -- VLLM_USE_RUST_FRONTEND=1


def test_vllm_starts_two_api_processes_of_which_one_is_made_in_rust(parsed, rust):
    args = parsed("--port", "7000")
    assert (args.api_server_count, args.port, args.rollout_port) == (2, 7000, 7001)
    assert args.rust_front_end == str(rust)
    assert args.mm_device_do_normalize is False
    assert args.options.beside_rust
    assert not {front_ends.VARIABLE, front_ends.PATH_VARIABLE} & os.environ.keys(), "vLLM would start nothing else"
    theirs = vllm_serve.APIServerProcessManager
    with front_ends.both(args):
        assert vllm_serve.APIServerProcessManager.func is front_ends.FrontEnds
    assert vllm_serve.APIServerProcessManager is theirs


def test_a_node_without_front_ends_gets_none(parsed, rust):
    args = parsed("--headless")
    assert args.api_server_count is None
    assert args.options.beside_rust
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
        (
            ("--rollout-parallelism", "auto", "--rollout-parallelism-devices", "2"),
            "--rollout-parallelism auto does not go",
        ),
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


def test_groups_are_not_moved_by_a_plan_that_cannot_see_all_of_them():
    for beside_rust in (True, False):
        config = SimpleNamespace(additional_config=ServeOptions(beside_rust=beside_rust).into({}))
        client = SimpleNamespace(num_api_processes=1, vllm_config=config)
        moves = EngineMoves(client, EngineCalls(client), None)
        assert ("Rust front end" in (moves.refusal(priced=False) or "")) is beside_rust


def test_pages_of_any_origin_are_allowed_only_where_the_user_says_so(parsed: Callable[..., Any]) -> None:
    assert (parsed().allowed_origins, parsed().rollout_allowed_hosts) == ([], [])
    assert parsed("--allowed-origins", '["*"]').allowed_origins == ["*"]
    assert parsed("--rollout-allowed-hosts", "a.example", "b").rollout_allowed_hosts == ["a.example", "b"]
