"""The Triton kernel of quality_head against float64: interpreted, and on a GPU where there is one."""

import pytest
import torch

from tests.kernels.triton_runs import interpreted_runs
from tests.parts.pruning.quality_head_cases import DTYPES, Case, assert_agrees, random_case, special_cases
from vllm_rollout.parts.observing.tracker.dispatch import active_implementation
from vllm_rollout.parts.pruning.worker.operators import quality_head

pytest.importorskip("triton")

pytestmark = pytest.mark.thorough

NUM_PROGRAMS = 7
"""For the interpreter: several parts of the hidden axis, none of which divides it evenly."""
SHAPES = [(1, 1, 64), (20, 16, 96), (40, 17, 300), (130, 129, 70), (4, 3, 1024)]


def all_cases() -> dict[str, Case]:
    cases = special_cases()
    for num_rows, num_due, hidden_size in SHAPES:
        for dtype in DTYPES:
            case = random_case(num_rows, num_due, hidden_size, dtype=dtype)
            cases[f"{num_due} of {num_rows}, {hidden_size} {dtype}"] = case
    return cases


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory) -> dict[str, torch.Tensor]:
    """Scores of every case, and of two that no reference accepts."""
    cases = {name: ("quality_head", (*case, NUM_PROGRAMS)) for name, case in all_cases().items()}
    hidden, rows, *weights = random_case(40, 20, 96)
    cases["one program"] = ("quality_head", (hidden, rows, *weights, 1))
    outside = rows.clone()
    outside[[3, 8]] = torch.tensor([-1, 40])
    cases["rows that do not exist"] = ("quality_head", (hidden, outside, *weights, NUM_PROGRAMS))
    runs = interpreted_runs(cases, tmp_path_factory.mktemp("interpreted"))
    return {name: score for name, (score, _) in runs.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("name", all_cases())
def test_interpreted_kernel_agrees_with_float64(interpreted, name):
    assert_agrees(interpreted[name], all_cases()[name])


def test_one_program_per_block_gives_the_same(interpreted):
    assert_agrees(interpreted["one program"], random_case(40, 20, 96))


def test_a_row_that_does_not_exist_is_nan_and_leaves_others_alone(interpreted):
    score, expected = interpreted["rows that do not exist"], interpreted["one program"]
    assert score.isnan().nonzero()[:, 0].tolist() == [3, 8]
    others = ~score.isnan()
    torch.testing.assert_close(score[others], expected[others])


def test_nothing_is_launched_when_no_row_is_due(monkeypatch):
    from vllm_rollout.kernels import quality_head as module

    monkeypatch.setattr(module, "quality_head_kernel", None)
    hidden, rows, *weights = random_case(4, 2, 64)
    assert module.quality_head_triton(hidden, rows[:0], *weights).shape == (0,)
    with pytest.raises(TypeError, match="NoneType"):
        module.quality_head_triton(hidden, rows, *weights, num_programs=8)


@pytest.mark.parametrize("hidden_size", [1, 31, 32, 33, 576, 896, 4096, 5120])
@pytest.mark.parametrize("num_blocks", [1, 2, 16, 300])
def test_parts_cover_the_hidden_axis_and_none_is_empty(hidden_size, num_blocks):
    from vllm_rollout.kernels.quality_head import BLOCK_SIZE, MAX_SPLITS, split

    num_splits, split_steps = split(hidden_size, num_blocks, num_programs=132)
    assert 1 <= num_splits <= MAX_SPLITS
    assert num_splits * num_blocks <= max(132, num_blocks)
    assert (num_splits - 1) * split_steps * BLOCK_SIZE < hidden_size <= num_splits * split_steps * BLOCK_SIZE


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", all_cases())
def test_kernel_on_a_gpu_agrees_with_float64(name):
    assert active_implementation("cuda", "quality_head").name == "triton"
    hidden, rows, *weights = all_cases()[name]
    on_device = torch.empty_strided(hidden.shape, hidden.stride(), dtype=hidden.dtype, device="cuda").copy_(hidden)
    arguments = (on_device, rows.cuda(), *(weight.cuda() for weight in weights))
    first = quality_head(*arguments)
    assert_agrees(first.cpu(), all_cases()[name])
    # The counters are back at zero, and the order in which programs end changes nothing.
    for _ in range(20):
        assert quality_head(*arguments).equal(first) or first.isnan().any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_due", [1, 16, 17, 64, 256, 1024])
def test_kernel_on_a_gpu_agrees_with_float64_at_full_size(num_due):
    case = random_case(1024, num_due, 4096, dtype=torch.bfloat16)
    score = quality_head(*(values.cuda() for values in case))
    assert_agrees(score.cpu(), case)
