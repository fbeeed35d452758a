"""Weights whose tokens tell their version, for checks that update a server's weights while a trainer's requests run.

Version v of `num` samples only tokens whose id leaves the remainder v after division by `num`. So each token tells
which weights sampled it, whatever the server or the trainer says. Runs in the trainer's environment.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

FLAGS = ("--dtype", "float32")
"""Log probabilities then hardly depend on the other requests of a batch."""
EXPECTED_GAP = 1e-3
"""In nats. KV of other weights shifts log probabilities by much more, or changes the tokens."""


class Span(NamedTuple):
    """Tokens in a row that one version of the weights sampled."""

    version: Any
    start: int
    end: int


def make_versions(model: Path, folder: Path, num: int) -> list[Path]:
    """Write `num` versions of a model. All their weights differ, so KV of one version is wrong for another one."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    places = [folder / f"version_{version}" for version in range(num)]
    for version, place in enumerate(places):
        chance = torch.Generator().manual_seed(version)
        changed = {
            name: each + 0.3 * each.float().std() * torch.randn(each.shape, generator=chance)
            if each.dim() == 2
            else each
            for name, each in tensors.items()
        }
        # One direction is the same in all hidden states. The head reads from it which tokens there are.
        embedding, head = changed["model.embed_tokens.weight"], changed["lm_head.weight"]
        embedding *= 80
        embedding[:, 0] = 128
        is_its = torch.arange(len(head)) % num == version
        head[:, 0] = torch.where(is_its, 4.0, -4.0)
        place.mkdir(parents=True)
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy2(model / name, place)
        kept = {name: each.to(tensors[name].dtype).contiguous() for name, each in changed.items()}
        save_file(kept, place / "model.safetensors", {"format": "pt"})
    return places


def sampled_by(token_ids: Iterable[int], num: int) -> list[Span]:
    """The versions that sampled these tokens, which the tokens themselves tell."""
    spans: list[Span] = []
    for version, tokens in groupby(token % num for token in token_ids):
        start = spans[-1].end if spans else 0
        spans.append(Span(version, start, start + sum(1 for _ in tokens)))
    return spans


def assert_exact(answers: Sequence[tuple[Sequence[int], Sequence[Span]]], num: int) -> dict[Any, int]:
    """Assert that the spans of each answer are those that its tokens tell. Each name has to stand for one version.

    answers: tokens and spans of each. Returns the version of each name.
    """
    versions: dict[Any, int] = {}
    for token_ids, spans in answers:
        told = sampled_by(token_ids, num)
        assert [span[1:] for span in spans] == [span[1:] for span in told], (spans, told)
        for span, its in zip(spans, told, strict=True):
            assert versions.setdefault(span.version, its.version) == its.version, (span, its, versions)
    assert len(set(versions.values())) == len(versions), versions
    return versions


def num_straddling(answers: Iterable[Sequence[int]], num: int) -> int:
    """Number of answers that several versions sampled."""
    return sum(len(sampled_by(token_ids, num)) > 1 for token_ids in answers)
