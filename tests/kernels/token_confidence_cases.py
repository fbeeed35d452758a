"""Inputs that every implementation of token_confidence must agree on with the torch reference."""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

TOLERANCE = {"rtol": 2e-5, "atol": 2e-5, "equal_nan": True}
"""Both sides accumulate in float32, over up to 151,936 entries."""

Case = tuple[Tensor, Tensor]


def whole(logits: Tensor) -> Case:
    """A case with every row, in order."""
    return logits, torch.arange(len(logits))


def random_case(num_rows: int, vocab_size: int, dtype: torch.dtype = torch.float32, scale: float = 4.0) -> Case:
    generator = torch.Generator().manual_seed(num_rows * 1_000_003 + vocab_size)
    return whole((torch.randn(num_rows, vocab_size, generator=generator) * scale).to(dtype))


def with_masked_entries(case: Case, keep_fraction: float) -> Case:
    """Mask all but a fraction of every row, as a grammar does."""
    logits, rows = case
    generator = torch.Generator().manual_seed(1)
    masked = torch.rand(logits.shape, generator=generator) > keep_fraction
    return logits.masked_fill(masked, -torch.inf), rows


def special_cases(dtype: torch.dtype, vocab_size: int = 2500) -> dict[str, Case]:
    """Small cases at the edges of the definition; a kernel should need several blocks for the vocabulary."""
    middle, last = vocab_size // 2, vocab_size - 1
    inf, nan = torch.inf, torch.nan
    case = logits, _ = random_case(5, vocab_size, dtype)

    extreme = torch.zeros(4, vocab_size)
    extreme[0, middle] = 1e4
    extreme[1, :] = 1e4
    extreme[2, :] = -1e4
    extreme[3, ::2] = -1e4
    extreme[3, last] = 1e4

    rising = torch.linspace(-300, 300, vocab_size).expand(2, -1)
    one_left = torch.full((3, vocab_size), -inf)
    one_left[0, 0] = 1.5
    one_left[1, middle] = -2.5
    one_left[2, last] = 0.0

    empty_block_first = torch.full((1, vocab_size), -inf)
    empty_block_first[0, -100:] = torch.arange(100.0) / 10
    nothing_left = torch.zeros(3, vocab_size)
    nothing_left[1] = -inf
    undefined = torch.zeros(4, vocab_size)
    undefined[0, 7] = nan
    undefined[1, last] = inf
    undefined[2, :] = -inf
    undefined[2, 3] = nan

    # Some masks write the lowest number instead of -inf: it counts as an entry.
    lowest = torch.full((2, vocab_size), torch.finfo(dtype).min, dtype=dtype)
    lowest[:, ::10] = logits[:2, ::10]
    lowest[1, : vocab_size - 100] = torch.finfo(dtype).min

    padded, _ = random_case(6, vocab_size + 60, dtype)
    return {
        "extreme": whole(extreme.to(dtype)),
        "rising": whole(rising.to(dtype).contiguous()),
        "equal": whole(torch.full((3, vocab_size), 0.75, dtype=dtype)),
        "one entry left": whole(one_left.to(dtype)),
        "first block masked": whole(empty_block_first.to(dtype)),
        "nothing left": whole(nothing_left.to(dtype)),
        "nan and inf": whole(undefined.to(dtype)),
        "half masked": with_masked_entries(case, keep_fraction=0.5),
        "nearly all masked": with_masked_entries(case, keep_fraction=0.01),
        "lowest number as a mask": whole(lowest),
        "padded rows": whole(padded[:, :vocab_size]),
        "every second row": whole(padded[::2]),
        "rows of a larger batch": (padded, torch.tensor([4, 0, 5])),
        "one row twice": (logits, torch.tensor([3, 3])),
        "no row of some": (logits, torch.arange(0)),
        "vocabulary of 1": random_case(3, 1, dtype),
        "no rows": random_case(0, 512, dtype),
    }
