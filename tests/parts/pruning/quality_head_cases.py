"""Inputs that every implementation of quality_head must agree on, and how nearly."""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

AGREEMENT = 1e-5
"""Allowed difference relative to the sums without signs, as in the operator's docstring."""

Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def random_case(
    num_rows: int, num_due: int, hidden_size: int, num_hidden: int = 128, dtype: torch.dtype = torch.float32
) -> Case:
    """Arguments of quality_head: hidden, rows, w1, b1, w2, b2."""
    generator = torch.Generator().manual_seed(num_rows * 1_000_003 + num_due * 1009 + hidden_size)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    return (
        (normal(num_rows, hidden_size) * 3).to(dtype),
        torch.randperm(num_rows, generator=generator)[:num_due],
        normal(num_hidden, hidden_size) / hidden_size**0.5,
        normal(num_hidden),
        normal(num_hidden) / num_hidden**0.5,
        normal(1),
    )


def special_cases() -> dict[str, Case]:
    hidden, rows, *weights = random_case(20, 6, 96)
    with_undefined = hidden.clone()
    with_undefined[rows[0], 5] = torch.nan
    with_undefined[rows[1], 95] = torch.inf
    bias_only = (torch.zeros_like(weights[0]), *weights[1:])
    dead = (weights[0], torch.full_like(weights[1], -1e6), *weights[2:])
    return {
        "no due row": (hidden, rows[:0], *weights),
        "no row at all": (hidden[:0], rows[:0], *weights),
        "a row twice, backwards": (hidden, torch.tensor([19, 3, 3, 0]), *weights),
        "strided rows": (hidden, torch.arange(20)[::3], *weights),
        "hidden of a wider batch": (torch.cat([hidden, hidden], dim=1)[:, 30:126], rows, *weights),
        "every second hidden": (hidden[::2], torch.tensor([9, 0]), *weights),
        "one column of one row": random_case(1, 1, 1),
        "one unit": random_case(4, 2, 33, num_hidden=1),
        "units that are no power of 2": random_case(40, 20, 70, num_hidden=100),
        "nan and inf": (with_undefined, rows, *weights),
        "bias alone": (hidden, rows, *bias_only),
        "no unit active": (hidden, rows, *dead),
    }


def score_in_float64(case: Case) -> tuple[Tensor, Tensor]:
    """The definition in float64, and the sums without signs."""
    hidden, rows, w1, b1, w2, b2 = (values if values.dtype == torch.int64 else values.double() for values in case)
    first = hidden[rows] @ w1.T + b1
    score = (torch.where(first < 0, 0.0, first) * w2).sum(dim=1) + b2
    magnitude = (hidden[rows].abs() @ w1.abs().T + b1.abs()) @ w2.abs() + b2.abs()
    return score, magnitude


def assert_agrees(score: Tensor, case: Case) -> None:
    expected, magnitude = score_in_float64(case)
    assert score.dtype == torch.float32
    assert score.shape == expected.shape
    finite = magnitude.isfinite()
    assert (score.double() - expected).abs()[finite].le(AGREEMENT * magnitude[finite]).all()
    torch.testing.assert_close(score.double()[~finite], expected[~finite], equal_nan=True)
