"""The torch reference of quality_head against float64, and what it refuses."""

import pytest
import torch

from tests.parts.pruning.quality_head_cases import DTYPES, assert_agrees, random_case, special_cases
from vllm_rollout.parts.pruning.worker.operators import quality_head, quality_head_reference


def test_reference_gives_the_value_computed_by_hand():
    # Row 1: relu(1*1 + 2*3 - 1) = 6 and relu(1*-2 + 2*0.5 - 1) = 0; 6*0.5 + 0*9 + 0.25.
    hidden = torch.tensor([[7.0, 7.0], [1.0, 2.0]])
    w1, b1 = torch.tensor([[1.0, 3.0], [-2.0, 0.5]]), torch.tensor([-1.0, -1.0])
    score = quality_head_reference(hidden, torch.tensor([1]), w1, b1, torch.tensor([0.5, 9.0]), torch.tensor([0.25]))
    assert score.tolist() == [3.25]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_due", "hidden_size"), [(1, 64), (5, 576), (70, 896), (3, 4096)])
def test_reference_agrees_with_float64(num_due, hidden_size, dtype):
    case = random_case(num_due + 3, num_due, hidden_size, dtype=dtype)
    assert_agrees(quality_head_reference(*case), case)


@pytest.mark.parametrize("name", special_cases())
def test_reference_agrees_with_float64_at_the_edges(name):
    case = special_cases()[name]
    assert_agrees(quality_head_reference(*case), case)


def wrong_arguments() -> dict[str, tuple[tuple, str]]:
    hidden, rows, w1, b1, w2, b2 = random_case(4, 2, 8, num_hidden=3)
    return {
        "dtype of hidden": ((hidden.double(), rows, w1, b1, w2, b2), "hidden must be float32, bfloat16 or float16"),
        "one hidden state": ((hidden[0], rows, w1, b1, w2, b2), r"hidden must be \[num_rows, hidden_size\].*got \[8\]"),
        "transposed hidden": ((hidden.T.contiguous().T, rows, w1, b1, w2, b2), r"hidden must have stride\(1\) == 1"),
        "dtype of rows": ((hidden, rows.int(), w1, b1, w2, b2), r"rows must be int64 \[num_due\], got torch.int32"),
        "row too large": ((hidden, torch.tensor([0, 4]), w1, b1, w2, b2), r"rows\[1\] must be in \[0, 4\), got 4"),
        "negative row": ((hidden, torch.tensor([-1]), w1, b1, w2, b2), r"rows\[0\] must be in \[0, 4\), got -1"),
        "row of no rows": ((hidden[:0], torch.tensor([0]), w1, b1, w2, b2), r"rows\[0\] must be in \[0, 0\), got 0"),
        "size of w1": ((hidden, rows, w1[:, :7].contiguous(), b1, w2, b2), r"hidden_size = 8, got .*\[3, 7\]"),
        "dtype of w1": ((hidden, rows, w1.bfloat16(), b1, w2, b2), "w1 must be float32.*got torch.bfloat16"),
        "strides of w1": ((hidden, rows, w1.T.contiguous().T, b1, w2, b2), r"w1 must be contiguous.*\[1, 3\]"),
        "size of b1": ((hidden, rows, w1, b1[:2], w2, b2), r"b1 must be \[num_hidden\] = \[3\], got \[2\]"),
        "shape of w2": ((hidden, rows, w1, b1, w2[None], b2), r"w2 must be \[num_hidden\] = \[3\], got \[1, 3\]"),
        "shape of b2": ((hidden, rows, w1, b1, w2, b2[0]), r"b2 must be \[1\], got \[\]"),
        "device of w2": (
            (hidden, rows, w1, b1, w2.to("meta"), b2),
            "w2 must be on the device of hidden, cpu, got meta",
        ),
    }


@pytest.mark.parametrize("name", wrong_arguments())
def test_wrong_arguments_are_named_with_value_and_allowed(name):
    arguments, message = wrong_arguments()[name]
    with pytest.raises(ValueError, match=message):
        quality_head(*arguments)
