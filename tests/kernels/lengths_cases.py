"""Inputs that every implementation of update_lengths and group_moments must agree on."""

from typing import NamedTuple

import torch
from torch import Tensor

UPDATE_TOLERANCE = {"rtol": 1e-6, "atol": 1e-6, "equal_nan": True}
MOMENTS_TOLERANCE = {"rtol": 1.2e-7, "atol": 0.0}
"""One rounding to float32."""


class Case(NamedTuple):
    """Arguments of update_group_lengths."""

    slots: Tensor
    values: Tensor
    counts: Tensor
    means: Tensor
    m2s: Tensor
    groups: Tensor
    finished: Tensor
    num_groups: int

    @property
    def for_update(self) -> tuple[Tensor, ...]:
        return self[:5]

    @property
    def for_moments(self) -> tuple[Tensor, Tensor, Tensor, int]:
        return self.counts, self.groups, self.finished, self.num_groups

    def clone(self) -> "Case":
        return Case(*(value.clone() for value in self[:7]), self.num_groups)


def random_case(num_rows: int, capacity: int, num_groups: int, longest: int = 5000) -> Case:
    """Some rows are no candidate's, some slots are free and some candidates are new or have finished."""
    generator = torch.Generator().manual_seed(num_rows * 1_000_003 + capacity * 1009 + num_groups)
    slots = torch.randperm(capacity, generator=generator)[:num_rows]
    slots[2::5] = -1
    counts = torch.randint(longest + 1, (capacity,), generator=generator).float()
    counts[::7] = 0
    means = torch.randn(capacity, generator=generator) + 8
    groups = torch.randint(-1, max(num_groups, 1), (capacity,), generator=generator)
    return Case(
        slots=slots,
        values=torch.randn(num_rows, generator=generator) * 3 + 8,
        counts=counts,
        means=means.where(counts > 0, 0.0),
        m2s=(torch.rand(capacity, generator=generator) * 9 * counts).where(counts > 0, 0.0),
        groups=groups if num_groups else torch.full_like(groups, -1),
        finished=torch.rand(capacity, generator=generator) < 0.4,
        num_groups=num_groups,
    )


def special_cases() -> dict[str, Case]:
    few = random_case(6, 20, 3)
    with_nan = few.clone()
    with_nan.values[0] = torch.nan
    nearly_equal = random_case(40, 1500, 2)
    nearly_equal.counts.copy_(1e6 - torch.arange(1500) % 3)
    strided = Case(*few)._replace(
        slots=few.slots.repeat_interleave(2)[::2], values=few.values.repeat_interleave(3)[::3]
    )
    return {
        "no row": few._replace(slots=few.slots[:0], values=few.values[:0]),
        "no group": random_case(6, 20, 0),
        "neither": random_case(0, 3, 0),
        "one slot": random_case(1, 1, 1),
        "no row is a candidate's": few._replace(slots=torch.full_like(few.slots, -1)),
        "no candidate has a group": few._replace(groups=torch.full_like(few.groups, -1)),
        "all finished": few._replace(finished=torch.ones_like(few.finished)),
        "a group without candidates": few._replace(num_groups=9),
        "nan value": with_nan,
        "strided rows": strided,
        "lengths up to 1e6": random_case(300, 1100, 4, longest=1_000_000),
        "nearly equal lengths of 1e6": nearly_equal,
        "more rows than one block": random_case(600, 2500, 5),
    }


def updated_in_float64(case: Case) -> tuple[Tensor, list[Tensor]]:
    """Running means and the state after Welford's step, in Python's floats; the case is left as it is."""
    counts, means, m2s = (values.tolist() for values in case.for_update[2:])
    running_means = []
    for slot, value in zip(case.slots.tolist(), case.values.tolist(), strict=True):
        if slot == -1:
            running_means.append(float("nan"))
            continue
        delta = value - means[slot]
        counts[slot] += 1
        means[slot] += delta / counts[slot]
        m2s[slot] += delta * (value - means[slot])
        running_means.append(means[slot])
    return torch.tensor(running_means), [torch.tensor(values) for values in (counts, means, m2s)]


def moments_in_float64(counts: Tensor, groups: Tensor, finished: Tensor, num_groups: int) -> list[Tensor]:
    moments = torch.zeros(2, num_groups, 3, dtype=torch.float64)
    for kind in (0, 1):
        for group in range(num_groups):
            lengths = counts[(groups == group) & (finished == bool(kind))].double()
            if len(lengths):
                mean = lengths.mean()
                moments[kind, group] = torch.stack([torch.tensor(len(lengths)), mean, ((lengths - mean) ** 2).sum()])
    return list(moments)


def assert_updated(running_means: Tensor, state: tuple[Tensor, ...], case: Case) -> None:
    """`state` is what became of the counts, means and m2s of `case`."""
    expected, expected_state = updated_in_float64(case)
    torch.testing.assert_close(running_means, expected.float(), **UPDATE_TOLERANCE)
    for name, actual, value in zip(("counts", "means", "m2s"), state, expected_state, strict=True):
        torch.testing.assert_close(actual, value, msg=lambda text, name=name: f"{name}: {text}", **UPDATE_TOLERANCE)


def assert_moments(moments: tuple[Tensor, ...], case: Case) -> None:
    for name, actual, expected in zip(
        ("live", "finished"), moments, moments_in_float64(*case.for_moments), strict=True
    ):
        assert actual.dtype == torch.float32, name
        assert actual.shape == expected.shape, name
        torch.testing.assert_close(
            actual.double(), expected, msg=lambda text, name=name: f"{name}: {text}", **MOMENTS_TOLERANCE
        )
