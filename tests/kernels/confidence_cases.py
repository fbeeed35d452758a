"""Inputs that every implementation of update_confidence must agree on."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

TOLERANCE = {"rtol": 2e-6, "atol": 1e-6, "equal_nan": True}


class Case(NamedTuple):
    """Arguments of update_confidence."""

    slots: Tensor
    positions: Tensor
    values: Tensor
    means: Tensor
    m2s: Tensor
    trace: Tensor

    def clone(self) -> "Case":
        return Case(*(value.clone() for value in self))


def random_case(num_rows: int, capacity: int, num_kept: int = 4, trace_length: int = 20, longest: int = 5000) -> Case:
    """Some candidates are new, some have grown beyond the trace; what other columns hold does not matter."""
    generator = torch.Generator().manual_seed(num_rows * 1_000_003 + capacity * 1009 + num_kept)
    positions = torch.randint(longest + 1, (num_rows,), generator=generator)
    positions[::3] %= trace_length + 2
    positions[::5] = 0
    return Case(
        slots=torch.randperm(capacity, generator=generator)[:num_rows],
        positions=positions,
        values=torch.randn(num_rows, generator=generator) * 3 + 8,
        means=torch.randn(capacity, num_kept, generator=generator) + 8,
        m2s=torch.rand(capacity, num_kept, generator=generator) * 9 * longest,
        trace=torch.randn(capacity, trace_length, generator=generator),
    )


def special_cases() -> dict[str, Case]:
    few = random_case(6, 20)
    with_nan, never_cleared = few.clone(), few.clone()
    with_nan.values[0] = torch.nan
    never_cleared.means.fill_(torch.nan)
    never_cleared.m2s.fill_(torch.nan)
    never_cleared.positions.fill_(0)
    return {
        "no row": few._replace(slots=few.slots[:0], positions=few.positions[:0], values=few.values[:0]),
        "one slot": random_case(1, 1, 2, 1),
        "nothing kept of a trace": few._replace(trace=few.trace[:, :0].contiguous()),
        "nan value": with_nan,
        "slots of somebody before": never_cleared,
        "positions up to 1e6": random_case(300, 1100, 16, 600, longest=1_000_000),
        "more rows than one block": random_case(600, 2500, 3, 7),
    }


def updated_in_float64(case: Case) -> tuple[Tensor, list[Tensor]]:
    """Moments and the state after Welford's step, in Python's floats; the case is left as it is."""
    means, m2s, trace = (values.tolist() for values in case[3:])
    num_kept, trace_length = case.means.shape[1], case.trace.shape[1]
    moments = []
    for slot, position, value in zip(*(values.tolist() for values in case[:3]), strict=True):
        mean, m2 = (0.0, 0.0) if position == 0 else (state[slot][position % num_kept] for state in (means, m2s))
        delta = value - mean
        mean += delta / (position + 1)
        m2 += delta * (value - mean)
        means[slot][(position + 1) % num_kept], m2s[slot][(position + 1) % num_kept] = mean, m2
        if position < trace_length:
            trace[slot][position] = value
        moments.append((mean, math.sqrt(m2 / (position + 1))))
    shapes = (case.means.shape, case.m2s.shape, case.trace.shape)
    state = [torch.tensor(values).reshape(shape) for values, shape in zip((means, m2s, trace), shapes, strict=True)]
    return torch.tensor(moments).reshape(-1, 2), state


def assert_updated(moments: Tensor, state: tuple[Tensor, ...], case: Case) -> None:
    """`state` is what became of the means, m2s and trace of `case`."""
    expected, expected_state = updated_in_float64(case)
    torch.testing.assert_close(moments, expected, **TOLERANCE)
    for name, actual, value in zip(("means", "m2s", "trace"), state, expected_state, strict=True):
        torch.testing.assert_close(actual, value, msg=lambda text, name=name: f"{name}: {text}", **TOLERANCE)
