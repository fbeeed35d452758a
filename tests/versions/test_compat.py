"""The contract with vLLM: the snapshot and the rows against the installed vLLM, and our code against them."""

import ast
import importlib
import inspect
import sys
import textwrap
from functools import cache
from typing import Any

import pytest

from tests.versions import vllm_snapshot
from tests.versions.vllm_snapshot import (
    ABSENT,
    Call,
    asked,
    called_with,
    has,
    line,
    lines,
    our_classes,
    our_names,
    parts,
    path_of,
    paths_of,
    positional,
    read,
    recorded,
    signature_of,
)
from tests.versions.vllm_types import imported, said_in, scope_of
from vllm_rollout.adapter.compat import (
    CONTRACT,
    FEATURES,
    LOGGING_FLAGS,
    Fact,
    check_vllm_version,
    lacking,
    vllm_version,
)
from vllm_rollout.versions import PREFERRED_VLLM, SUPPORTED_VLLM, minor_of

CLOSEST = vllm_version if minor_of(vllm_version) in SUPPORTED_VLLM else SUPPORTED_VLLM[-1]
"""The version whose snapshot the installed vLLM is held against."""
every_version = pytest.mark.parametrize("version", SUPPORTED_VLLM)


@pytest.fixture(scope="module", autouse=True)
def no_llvmlite_for_later_tests():
    """vLLM on a CPU looks at every module when it starts, and fails at one that what is imported here brings along."""
    yield
    sys.modules.pop("llvmlite.binding.ffi", None)


# -- the installed vLLM


def test_vllm_is_as_the_file_of_names_says():
    said = [path + its for path, its in sorted(recorded(CLOSEST).items())]
    assert said == sorted(lines(asked())), "make snapshot writes it anew"


@pytest.mark.parametrize("fact", CONTRACT, ids=lambda fact: f"{fact.kind}-{fact.of}.{fact.name}")
def test_vllm_is_as_the_contract_says(fact):
    if fact.holds_for(vllm_version):
        assert problem(fact) is None
    else:
        assert problem(fact) is not None, f"vLLM {vllm_version} has it"


def problem(fact: Fact) -> str | None:
    """Error of a row against the installed vLLM, or None."""
    if fact.kind == "flag":
        return None if fact.name in serve_flags() else "no such setting"
    if fact.kind == "replaces":
        return None if looks_up(imported(fact.of), fact.name) else "the name is not looked up when it is called"
    if (owner := imported(fact.of)) is None:
        return f"there is no {fact.of}"
    if fact.kind == "adds":
        return "the name is taken" if has(owner, fact.name) and not is_ours(owner, fact.name) else None
    if not has(owner, fact.name):
        return "no such attribute"
    if fact.kind == "does":
        is_so = fact.parameters in inspect.getsource(getattr(owner, fact.name))
        return None if is_so else "its source does not say so"
    if fact.kind == "takes":
        names = fact.parameters.split()
        by_position = [name for name in names if name[-1] != "="]
        call = Call("", len(by_position), tuple(name[:-1] for name in names if name[-1] == "="), is_whole=True)
        reached = called_with(call, line(f"{fact.of}.{fact.name}").removeprefix(f"{fact.of}.{fact.name}"))
        return None if reached == by_position else f"it takes {reached}"
    return None


@cache
def serve_flags() -> set[str]:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    return {action.dest for action in parser._actions}


def looks_up(function: Any, name: str) -> bool:
    """True if a function imports `name` in its body, or calls it as a name of its own module."""
    module, _, last = name.rpartition(".")
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    if function.__module__ == module:
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        return any(isinstance(called, ast.Name) and called.id == last for called in calls)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == module]
    return any(alias.name == last for node in imports for alias in node.names)


def is_ours(owner: Any, name: str) -> bool:
    """True if an earlier test of this process has added the name, as a server does."""
    return getattr(getattr(owner, name, None), "__module__", "").startswith("vllm_rollout.")


def test_a_name_that_we_have_added_is_not_taken():
    from vllm_rollout.kernel.core.calls import add_rollout_calls

    add_rollout_calls()
    assert problem(Fact("adds", "vllm.v1.engine.core.EngineCore", "rollout_call")) is None


def test_a_row_that_is_not_true_is_found():
    scheduler = "vllm.v1.core.sched.scheduler.Scheduler"
    assert problem(Fact("has", scheduler, "rollouts")) == "no such attribute"
    assert problem(Fact("has", "vllm.v1.nowhere.Scheduler", "running")) == "there is no vllm.v1.nowhere.Scheduler"
    assert problem(Fact("takes", scheduler, "finish_requests", "request_ids reason="))
    assert problem(Fact("takes", scheduler, "finish_requests", "finished_status request_ids"))
    assert problem(Fact("takes", scheduler, "finish_requests", "request_ids finished_status")) is None
    assert problem(Fact("adds", scheduler, "add_request")) == "the name is taken"
    assert problem(Fact("does", scheduler, "add_request", "race(")) == "its source does not say so"
    assert problem(Fact("flag", "vllm serve", "rollouts")) == "no such setting"


# -- our code, and every supported vLLM


def test_every_snapshot_says_something_of_the_same_names():
    asked_for = [set(recorded(version)) for version in SUPPORTED_VLLM]
    assert asked_for == [asked_for[0]] * len(SUPPORTED_VLLM)


@every_version
def test_what_a_version_lacks_is_a_row_of_the_contract(version):
    absent = {path for path, said in recorded(version).items() if said == ABSENT}
    assert absent - lacked(version) == set()


def lacked(version: str) -> set[str]:
    """Names that a version lacks by the rows, so that our code asks before it uses them."""
    return {f"{fact.of}.{fact.name}" for fact in CONTRACT if not fact.holds_for(version)}


@every_version
def test_what_our_calls_pass_has_a_parameter(version):
    says = recorded(version)
    refused = {call: says[call.path] for call in our_calls() if called_with(call, says[call.path]) is None}
    assert {call: said for call, said in refused.items() if call.path not in lacked(version)} == {}


def our_calls() -> list[Call]:
    return [call for call in read()[1] if call.path in recorded(PREFERRED_VLLM)]


def test_what_our_calls_pass_by_position_goes_to_the_same_parameters_of_every_version():
    for call in our_calls():
        reached = [called_with(call, recorded(version)[call.path]) for version in SUPPORTED_VLLM]
        assert len({tuple(names) for names in reached if names is not None}) <= 1, (call, reached)


@every_version
def test_our_overrides_take_what_vllms_methods_take(version):
    says = recorded(version)
    for each in read()[2]:
        if says.get(each.path, ABSENT) != ABSENT and each.path not in lacked(version):
            theirs = signature_of(says[each.path])
            assert positional(theirs)[: len(each.positional)] == list(each.positional), each
            assert each.keywords <= set(theirs.parameters), each


SET_ANEW = {
    "vllm.v1.engine.utils.CoreEngineProcManager.failed_proc_name",
    "vllm.v1.utils.APIServerProcessManager.processes",
    "vllm.v1.worker.gpu_worker.Worker.device",
    "vllm.v1.worker.worker_base.WorkerBase.device",
}
"""Attributes of vLLM's objects that our code sets on purpose."""


def test_nothing_that_ours_set_on_themselves_hides_something_of_vllms():
    hidden = {
        f"{path_of(base)}.{name}"
        for cls, bases in our_classes().items()
        for base in bases
        for name in our_names(cls) & said_in(cls).keys()
        if has(base, name)
    }
    assert hidden == SET_ANEW


@pytest.fixture
def uses_of(tmp_path, monkeypatch):
    """The paths that are read out of the functions of a module."""

    def read(source: str) -> set[str]:
        (tmp_path / "vllm_made_up.py").write_text("from __future__ import annotations\n" + textwrap.dedent(source))
        monkeypatch.syspath_prepend(tmp_path)
        module = importlib.import_module("vllm_made_up")
        monkeypatch.delitem(sys.modules, "vllm_made_up")
        monkeypatch.setattr(vllm_snapshot, "all_our_names", frozenset)
        scopes = [(node, scope_of(node, module, cls)) for node, cls in parts(module)]
        attributes = [(each, scope) for node, scope in scopes for each in ast.walk(node)]
        return {path for each, scope in attributes if isinstance(each, ast.Attribute) for path in paths_of(each, scope)}

    return read


def test_what_is_used_is_read_out_of_annotations_loops_calls_and_vllms_own_attributes(uses_of):
    used = uses_of("""
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.request import Request

        def renamed(requests: dict[str, list[Request]]) -> None:
            for same in requests.values():
                print([request.old_name for request in same])

        def of_vllms_own(scheduler: Scheduler) -> None:
            manager = scheduler.kv_cache_manager
            found, *_ = manager.get_computed_blocks(None)
            if (parameters := scheduler.requests["name"].sampling_params) is not None:
                print(found.old_blocks, parameters.old_stop)
    """)
    request, blocks = "vllm.v1.request.Request", "vllm.v1.core.kv_cache_manager.KVCacheBlocks"
    parameters = "vllm.sampling_params.SamplingParams"
    gone = {f"{request}.old_name", f"{blocks}.old_blocks", f"{parameters}.old_stop"}
    assert {path for path in used if line(path) == path + ABSENT} == gone
    manager = "vllm.v1.core.kv_cache_manager.KVCacheManager.get_computed_blocks"
    assert {manager, f"{request}.sampling_params", "vllm.v1.core.sched.scheduler.Scheduler.requests"} <= used


def test_a_call_whose_parameter_is_gone_is_refused():
    call = Call("path", 1, ("priority",), is_whole=True)
    assert called_with(call, "(request, *, priority=...)") == ["request"]
    assert called_with(call, "(request, *, order=...)") is None
    assert called_with(call, "(request, priority, needed)") is None
    assert called_with(call, "(request, **others)") is None
    assert called_with(call, ABSENT) is None
    assert called_with(call._replace(is_whole=False), "(request, priority, given)") == ["request"]


# -- versions


def test_a_row_holds_from_the_version_that_brings_it_to_the_last_that_has_it():
    fact = Fact("has", "vllm.a.B", "c", since="0.30", until="0.31")
    assert [version for version in SUPPORTED_VLLM if fact.holds_for(f"{version}.0")] == ["0.30", "0.31"]
    assert LOGGING_FLAGS.holds_for("0.31.2rc1")
    assert not LOGGING_FLAGS.holds_for("0.30.9")


def test_the_row_of_every_feature_is_in_the_contract():
    assert all(feature.row in CONTRACT for feature in FEATURES)


def test_what_a_version_lacks_is_said_with_the_version_that_brings_it():
    assert [line.partition(" (")[0] for line in lacking("0.29.0")] == [feature.name for feature in FEATURES]
    assert lacking("0.32.1") == [
        "refusing requests while paused (since 0.33; they wait until generation is resumed)",
    ]
    assert lacking("0.33.0") == []


@pytest.mark.parametrize("version", ["0.24.0", "0.28.1", "0.34.0", "1.0.0", "0.3.2"])
def test_another_vllm_is_refused_with_the_command_that_helps(version):
    with pytest.raises(RuntimeError, match=rf"0\.29 to 0\.33, found {version}.*vllm==0\.32"):
        check_vllm_version(version)


@pytest.mark.parametrize("version", [f"{minor}.7" for minor in SUPPORTED_VLLM])
def test_every_patch_of_a_supported_version_is_taken(version):
    check_vllm_version(version)
