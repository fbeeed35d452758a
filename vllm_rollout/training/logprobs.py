"""Log probabilities of answers by a trainer's model, in micro-batches of answers of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence


def micro_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Batches of indices of sequences of similar length, the shortest first.

    lengths: tokens of each sequence.
    max_tokens: most tokens of a batch, with padding. A longer sequence is a batch of its own.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and lengths[index] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def answer_logprobs(
    model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Compute log probabilities of answers at temperature 1, in nats, and a mask of their tokens.

    model: a causal language model of Hugging Face in which every layer attends to earlier tokens only.
    prompts, answers: token ids. Each prompt has a token, and at least one answer has some.
    Returns: both [num_samples, num_tokens], on the model's device, padded on the right. The log probabilities are
    float32 or float64 and have a graph. Padding is 0 in both.

    Raises: ValueError for another number of answers than of prompts, for none, and for an empty prompt.
    """
    pairs = list(zip(prompts, answers, strict=True))
    if not pairs or not all(prompts):
        raise ValueError(f"each of the prompts must have a token, got {[len(prompt) for prompt in prompts]} tokens.")
    device = next(model.parameters()).device
    rows = [torch.tensor([*prompt, *answer]) for prompt, answer in pairs]
    ids = pad_sequence(rows, batch_first=True).to(device)  # on the right: no token attends to padding
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = -cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(ids[:, 1:])
    starts = [len(prompt) - 1 for prompt, _ in pairs]
    its = [row[start : start + len(answer)] for row, start, (_, answer) in zip(logprobs, starts, pairs, strict=True)]
    mask = [torch.ones(len(answer)) for _, answer in pairs]
    return pad_sequence(its, batch_first=True), pad_sequence(mask, batch_first=True).to(device)
