"""Choice of an operator's implementation, and the log message if it is not the fastest one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vllm_rollout
from tests.kernels.confidence_cases import assert_updated, random_case
from tests.support.waiting import WAIT_S
from vllm_rollout.build_command import build_command
from vllm_rollout.parts.observing.tracker import dispatch
from vllm_rollout.parts.observing.tracker.dispatch import active_implementation
from vllm_rollout.parts.observing.tracker.ops import update_confidence

IN_TORCH_ON_CPU = {"quality_head"}


@pytest.fixture(autouse=True)
def _implementation_chosen_anew(monkeypatch):
    monkeypatch.delenv(dispatch.OPS_VARIABLE, raising=False)
    active_implementation.cache_clear()
    yield
    active_implementation.cache_clear()


@pytest.mark.parametrize("operator", dispatch.operators())
def test_every_operator_has_the_implementation_it_should(operator):
    pytest.importorskip("vllm_rollout._C")
    implementation = active_implementation("cpu", operator)
    assert (implementation.name, implementation.reason) == ("torch" if operator in IN_TORCH_ON_CPU else "c++", None)
    pytest.importorskip("triton")
    implementation = active_implementation("cuda", operator)
    assert (implementation.name, implementation.reason) == ("triton", None)


@pytest.mark.parametrize("operator", dispatch.operators())
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_environment_forces_every_reference(monkeypatch, device_type, operator):
    monkeypatch.setenv(dispatch.OPS_VARIABLE, "torch")
    implementation = active_implementation(device_type, operator)
    assert (implementation.name, implementation.reason) == ("torch", "VLLM_ROLLOUT_OPS=torch")
    assert implementation.compute is dispatch.operators()[operator].reference


def test_without_the_extension_the_reference_serves_and_the_remedy_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm_rollout._C", None)
    monkeypatch.delattr("vllm_rollout._C", raising=False)
    implementation = active_implementation("cpu", "update_confidence")
    assert implementation.name == "torch"
    assert implementation.reason == f"vllm_rollout._C is not built: run `{build_command()}`"
    case = random_case(6, 20)
    after = case.clone()
    assert_updated(update_confidence(*after), after[3:], case)


BUILT_FOR_ANOTHER_TORCH = """
extern "C" void* aoti_torch_of_another_version();
extern "C" void* PyInit__C() { return aoti_torch_of_another_version(); }
"""


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("torch_version", "remedy"), [(None, "pip install"), ("2.9.1", "it needs torch 2.10 or later, found 2.9.1")]
)
def test_an_extension_for_another_torch_leaves_the_reference_and_says_what_is_missing(tmp_path, torch_version, remedy):
    package = tmp_path / "vllm_rollout"
    package.mkdir()
    for path in Path(vllm_rollout.__file__).parent.iterdir():
        if path.suffix != ".so":
            (package / path.name).symlink_to(path)
    command = ["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(package / "_C.abi3.so")]
    subprocess.run(command, input=BUILT_FOR_ANOTHER_TORCH, text=True, check=True, timeout=WAIT_S)
    code = (
        "import torch\n"
        f"torch.__version__ = torch.torch_version.TorchVersion({torch_version!r} or torch.__version__)\n"
        "from vllm_rollout.parts.observing.tracker.dispatch import active_implementation\n"
        "implementation = active_implementation('cpu')\n"
        "print(implementation.name, implementation.reason, sep=' | ')"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment,
        timeout=WAIT_S,
    )
    name, reason = done.stdout.strip().split(" | ")
    assert name == "torch"
    assert "vllm_rollout._C does not load" in reason
    assert "aoti_torch_of_another_version" in reason
    assert remedy in reason


@pytest.mark.parametrize(
    ("operator", "fake", "said"),
    [
        ("quality_head", lambda: None, "was built before it had quality_head"),
        ("token_confidence", lambda logits, rows, sampled: None, "has another token_confidence than this version"),
    ],
)
def test_an_extension_of_another_version_is_named_with_its_remedy(monkeypatch, operator, fake, said):
    pytest.importorskip("vllm_rollout._C")
    monkeypatch.setitem(dispatch.operators(), operator, dispatch.operators()[operator]._replace(fake=fake))
    implementation = active_implementation("cpu", operator)
    assert implementation.name == "torch"
    assert implementation.reason == f"vllm_rollout._C {said}: run `{build_command()}` to rebuild it"


@pytest.mark.parametrize("operator", dispatch.operators())
def test_without_triton_the_reference_serves_and_the_remedy_is_said(monkeypatch, operator):
    monkeypatch.setitem(sys.modules, "triton", None)
    name = dispatch.operators()[operator].triton
    monkeypatch.delitem(sys.modules, f"vllm_rollout.kernels.{name}", raising=False)
    implementation = active_implementation("cuda", operator)
    assert (implementation.name, implementation.reason) == ("torch", "triton is not installed: pip install triton")


def test_a_device_type_without_kernels_gets_the_reference_and_a_reason():
    implementation = active_implementation("meta", "quality_head")
    assert (implementation.name, implementation.reason) == ("torch", "no kernel for device type 'meta'")


def test_an_unknown_operator_and_an_unknown_choice_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"operator must be one of token_confidence, .*, got 'softmax'"):
        active_implementation("cpu", "softmax")
    monkeypatch.setenv(dispatch.OPS_VARIABLE, "fast")
    with pytest.raises(ValueError, match="VLLM_ROLLOUT_OPS must be one of auto, torch, got 'fast'"):
        active_implementation("cpu")


def test_fakes_have_the_shapes_and_dtypes_of_the_results():
    case = random_case(6, 20)
    fake, actual = (
        dispatch.OPERATORS["update_confidence"].fake(*case),
        torch.ops.vllm_rollout.update_confidence(*case.clone()),
    )
    assert (fake.shape, fake.dtype, fake.stride()) == (actual.shape, actual.dtype, actual.stride())
