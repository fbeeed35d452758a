"""The Triton kernel of update_confidence against float64: interpreted, and on a GPU if there is one."""

import pytest
import torch

from tests.kernels.confidence_cases import Case, assert_updated, random_case, special_cases
from tests.kernels.triton_runs import interpreted_runs
from vllm_rollout.parts.observing.tracker.dispatch import active_implementation
from vllm_rollout.parts.observing.tracker.ops import update_confidence

pytest.importorskip("triton")

pytestmark = pytest.mark.thorough


def all_cases() -> dict[str, Case]:
    return {"40 rows": random_case(40, 40), "200 rows": random_case(200, 256, 16, 512)} | special_cases()


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Results and arguments afterwards, by case; and of a case that no reference accepts."""
    cases = {name: ("update_confidence", tuple(case.clone())) for name, case in all_cases().items()}
    cases["outside"] = ("update_confidence", tuple(outside()))
    return interpreted_runs(cases, tmp_path_factory.mktemp("interpreted"))


def outside() -> Case:
    """Slots and a position that do not exist."""
    case = random_case(6, 20)
    case.slots[0], case.slots[1], case.positions[2] = 20, -1, -3
    return case


@pytest.mark.thorough
@pytest.mark.parametrize("name", all_cases())
def test_interpreted_update_agrees_with_float64(interpreted, name):
    moments, arguments = interpreted[name]
    assert_updated(moments, arguments[3:], all_cases()[name])


def test_a_slot_or_position_that_does_not_exist_is_nan_and_changes_nothing(interpreted):
    moments, arguments = interpreted["outside"]
    assert moments[:3].isnan().all()
    case = outside()
    assert_updated(moments[3:], arguments[3:], Case(*(value[3:] for value in case[:3]), *case[3:]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", all_cases())
def test_kernel_on_a_gpu_agrees_with_float64(name):
    assert active_implementation("cuda", "update_confidence").name == "triton"
    case = all_cases()[name]
    on_device = [value.cuda() for value in case]
    moments = update_confidence(*on_device)
    assert_updated(moments.cpu(), tuple(value.cpu() for value in on_device[3:]), case)
