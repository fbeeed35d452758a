"""windowed_confidence against the definition, window by window."""

import math

import pytest
import torch

from vllm_rollout.parts.pruning.worker.operators import windowed_confidence


def by_the_definition(trace: torch.Tensor, lengths: torch.Tensor, window: int) -> torch.Tensor:
    rows = []
    for row, length in zip(trace.tolist(), lengths.tolist(), strict=True):
        tokens = row[:length]
        if not tokens or not all(map(math.isfinite, tokens)):
            rows.append([math.nan] * 3)
            continue
        size = min(window, length)
        means = sorted(math.fsum(tokens[i : i + size]) / size for i in range(length - size + 1))
        lowest = means[: max(1, len(means) // 10)]
        rows.append([math.fsum(tokens) / length, means[0], math.fsum(lowest) / len(lowest)])
    return torch.tensor(rows).reshape(-1, 3)


def random_case(num_due: int, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Traces of every length; what comes after a trace is not to be read."""
    generator = torch.Generator().manual_seed(num_due * 1009 + max_len)
    trace = torch.randn(num_due, max_len, generator=generator) * 3 + 8
    lengths = torch.randint(max_len + 1, (num_due,), generator=generator)
    lengths[: min(num_due, 1)] = max_len
    trace[torch.arange(max_len) >= lengths[:, None]] = torch.nan
    return trace, lengths


def test_values_computed_by_hand():
    # Windows of two: 2, 1.5, 3, 5, 5.5; the lowest tenth of five windows is one window.
    trace = torch.tensor([[3.0, 1.0, 2.0, 4.0, 6.0, 5.0]])
    assert windowed_confidence(trace, torch.tensor([6]), 2).tolist() == [[3.5, 1.5, 1.5]]


def test_the_lowest_tenth_of_forty_windows_is_four():
    trace = torch.arange(40.0).flip(0)[None]
    assert windowed_confidence(trace, torch.tensor([40]), 1).tolist() == [[19.5, 0.0, 1.5]]


def test_a_trace_shorter_than_the_window_is_one_window():
    trace = torch.tensor([[1.0, 2.0, 6.0, 100.0]])
    assert windowed_confidence(trace, torch.tensor([3]), 50).tolist() == [[3.0, 3.0, 3.0]]


@pytest.mark.parametrize("window", [1, 2, 7, 64, 200])
@pytest.mark.parametrize(("num_due", "max_len"), [(0, 5), (1, 1), (1, 130), (40, 130), (3, 0)])
def test_agrees_with_the_definition(num_due, max_len, window):
    trace, lengths = random_case(num_due, max_len)
    actual = windowed_confidence(trace, lengths, window)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, by_the_definition(trace, lengths, window), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_a_trace_need_not_be_contiguous():
    trace, lengths = random_case(6, 40)
    expected = windowed_confidence(trace, lengths, 8)
    torch.testing.assert_close(windowed_confidence(trace.T.contiguous().T, lengths, 8), expected, equal_nan=True)


@pytest.mark.parametrize("undefined", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 5, 19])
def test_nan_or_infinity_makes_its_trace_nan_and_leaves_others_alone(undefined, position):
    trace = torch.ones(2, 20)
    trace[1, position] = undefined
    result = windowed_confidence(trace, torch.tensor([20, 20]), 4)
    assert result[0].tolist() == [1, 1, 1]
    assert result[1].isnan().all()


def test_a_long_trace_keeps_its_digits():
    trace = torch.full((1, 100_000), 11.9)
    trace[0, -10:] = 11.8
    result = windowed_confidence(trace, torch.tensor([100_000]), 10)
    assert result[0, 1].item() == pytest.approx(11.8, rel=1e-7)


WRONG_ARGUMENTS = {
    "dtype of the trace": ((torch.zeros(2, 3).double(), torch.zeros(2).long(), 1), "trace must be float32.*float64"),
    "one trace": ((torch.zeros(3), torch.zeros(3).long(), 1), r"trace must be float32 \[num_due, max_len\].*\[3\]"),
    "dtype of lengths": ((torch.zeros(2, 3), torch.zeros(2), 1), "lengths must be int64, got torch.float32"),
    "number of lengths": (
        (torch.zeros(2, 3), torch.zeros(3).long(), 1),
        r"lengths must be \[num_due\] = \[2\], got \[3\]",
    ),
    "length too large": ((torch.zeros(2, 3), torch.tensor([3, 4]), 1), r"lengths\[1\] must be in \[0, 4\), got 4"),
    "negative length": ((torch.zeros(1, 3), torch.tensor([-1]), 1), r"lengths\[0\] must be in \[0, 4\), got -1"),
    "window": ((torch.zeros(2, 3), torch.zeros(2).long(), 0), "window must be at least 1, got 0"),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_wrong_arguments_are_named_with_value_and_allowed(name):
    arguments, message = WRONG_ARGUMENTS[name]
    with pytest.raises(ValueError, match=message):
        windowed_confidence(*arguments)
