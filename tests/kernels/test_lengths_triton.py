"""The Triton kernels of update_lengths and group_moments against float64: interpreted, and on a GPU if there is one."""

import pytest
import torch
from lengths_cases import Case, assert_moments, assert_updated, random_case, special_cases
from triton_runs import interpreted_runs

from vllm_rollout.tracker.ops import active_implementation, group_moments, update_group_lengths, update_lengths

pytest.importorskip("triton")


def all_cases() -> dict[str, Case]:
    return {"40 rows": random_case(40, 40, 3), "200 rows": random_case(200, 256, 17)} | special_cases()


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Results and arguments afterwards, by operator and case; and of a case that no reference accepts."""
    cases = {}
    for name, case in all_cases().items():
        cases[f"update_lengths {name}"] = ("update_lengths", case.clone().for_update)
        cases[f"group_moments {name}"] = ("group_moments", case.clone().for_moments)
        cases[f"update_group_lengths {name}"] = ("update_group_lengths", tuple(case.clone()))
    cases["outside"] = ("update_group_lengths", tuple(outside()))
    return interpreted_runs(cases, tmp_path_factory.mktemp("interpreted"))


def outside() -> Case:
    """A slot and a group too large."""
    case = random_case(6, 20, 3)
    case.slots[0] = 20
    case.groups[case.slots[1]] = 3
    return case


@pytest.mark.parametrize("name", all_cases())
def test_interpreted_update_agrees_with_float64(interpreted, name):
    running_means, arguments = interpreted[f"update_lengths {name}"]
    assert_updated(running_means, arguments[2:], all_cases()[name])


@pytest.mark.parametrize("name", all_cases())
def test_interpreted_moments_agree_with_float64(interpreted, name):
    moments, _ = interpreted[f"group_moments {name}"]
    assert_moments(moments, all_cases()[name])


@pytest.mark.parametrize("name", all_cases())
def test_interpreted_launch_of_both_agrees_with_float64(interpreted, name):
    (running_means, *moments), arguments = interpreted[f"update_group_lengths {name}"]
    assert_updated(running_means, arguments[2:5], all_cases()[name])
    assert_moments(moments, Case(*arguments))


def test_a_slot_or_group_that_does_not_exist_is_none(interpreted):
    (running_means, *moments), arguments = interpreted["outside"]
    case, after = outside(), Case(*arguments)
    case.slots[0] = -1
    assert_updated(running_means, after.for_update[2:], case)
    assert_moments(moments, after._replace(groups=after.groups.where(after.groups < 3, -1)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", all_cases())
def test_kernels_on_a_gpu_agree_with_float64(name):
    for operator in ("update_lengths", "group_moments", "update_group_lengths"):
        assert active_implementation("cuda", operator).name == "triton"
    case = all_cases()[name]
    apart, together = (Case(*(value.cuda() for value in case[:7]), case.num_groups) for _ in range(2))
    running_means = update_lengths(*apart.for_update)
    assert_updated(running_means.cpu(), tuple(value.cpu() for value in apart.for_update[2:]), case)
    after = Case(*(value.cpu() for value in apart[:7]), case.num_groups)
    assert_moments(tuple(value.cpu() for value in group_moments(*apart.for_moments)), after)

    running_means, moments = update_group_lengths(*together)
    assert_updated(running_means.cpu(), tuple(value.cpu() for value in together.for_update[2:]), case)
    assert_moments(tuple(value.cpu() for value in moments), after)
