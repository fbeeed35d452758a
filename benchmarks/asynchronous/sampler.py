"""Tokens of a small Llama for many answers at once. Its weights can change between any two tokens.

Answers that start together are a wave: they have the same number of tokens, and prompts are padded on the left. So a
wave writes one column of its KV in each step, and attention reads no further than that column.

Invariant: a sampled token and its log probability come from the current weights and the KV that is there, whichever
weights computed it. An answer that ends leaves at once. Its row is removed when many rows of its wave are empty.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.asynchronous.clock import MAX_TOKENS
from examples.grpo.model import EOS, PAD

FILLED = 0.8
"""Share of a wave's rows that run, below which the empty rows are removed."""
BLOCK = 64
"""Columns by which KV grows."""


class Name(NamedTuple):
    group: int
    index: int


class Answer(NamedTuple):
    name: Name
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    """Number of weights updates before each token."""
    truncated: bool = False
    """True if it was cut at MAX_TOKENS."""


class Asked(NamedTuple):
    group: int
    prompt_ids: list[int]
    num_candidates: int


class Layer(NamedTuple):
    """Weights of a layer, [inputs, outputs]. Those of norms are in the weights after them."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


class Weights:
    """A copy of a Llama's weights, and its computations for one token per row or for whole rows."""

    @torch.no_grad()
    def __init__(self, model: Any) -> None:
        config, its = model.config, model.state_dict()
        self.num_heads, self.head_size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        self.epsilon = config.rms_norm_eps
        self.embedding = its["model.embed_tokens.weight"].clone()
        self.head = (its["lm_head.weight"] * its["model.norm.weight"]).T.contiguous()
        self.layers = []
        for place in range(config.num_hidden_layers):
            norm_in, q, k, v, out, norm_mlp, gate, up, down = (
                its[f"model.layers.{place}.{name}.weight"] for name in NAMES
            )
            found = (torch.cat([q, k, v]) * norm_in, out, torch.cat([gate, up]) * norm_mlp, down)
            self.layers.append(Layer(*(each.T.contiguous() for each in found)))
        base = config.rope_parameters["rope_theta"]
        turns = 1 / base ** (torch.arange(0, self.head_size, 2).float() / self.head_size)
        angles = torch.outer(torch.arange(config.max_position_embeddings).float(), turns).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.sin[:, : self.head_size // 2] *= -1

    def after_attention(self, layer: Layer, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = torch.addmm(hidden, attended, layer.out)
        gate, up = (self.normalized(hidden) @ layer.gate_up).chunk(2, -1)
        return torch.addmm(hidden, F.silu(gate).mul_(up), layer.down)

    def normalized(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], eps=self.epsilon)

    def logprobs(self, hidden: Tensor) -> Tensor:
        return (self.normalized(hidden) @ self.head).log_softmax(-1)

    def kv(self, ids: Tensor, pads: Tensor) -> Tensor:
        """Keys and values, [2, layers, rows, heads, columns, head_size], of whole rows. `pads`: padding of each row."""
        rows, width = ids.shape
        columns = torch.arange(width)
        visible = (columns[:, None] >= columns) & (columns >= pads[:, None, None])
        visible |= torch.eye(width, dtype=torch.bool)  # padding attends to itself, or its values are nan
        hidden, found = self.embedding[ids].flatten(0, 1), []
        for layer in self.layers:
            qkv = (self.normalized(hidden) @ layer.qkv).view(rows, width, 3, self.num_heads, self.head_size)
            q, k, v = turned(qkv.permute(2, 0, 3, 1, 4), self.cos[:width], self.sin[:width])
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None])
            hidden = self.after_attention(layer, hidden, attended.transpose(1, 2).reshape(rows * width, -1))
            found.append(torch.stack([k, v]))
        return torch.stack(found, 1)


def turned(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries, keys and values, [3, ...], with the rotary embedding. `sin`: its first half is negative."""
    qk = qkv[:2]
    qkv[:2] = torch.addcmul(qk * cos, qk.roll(qk.shape[-1] // 2, -1), sin)
    return qkv


NAMES = (
    "input_layernorm",
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    "post_attention_layernorm",
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


class Wave:
    """Answers that started together."""

    def __init__(self, weights: Weights, asked: Sequence[Asked]) -> None:
        width = max(len(each.prompt_ids) for each in asked)
        ids = torch.tensor([[PAD] * (width - len(each.prompt_ids)) + each.prompt_ids for each in asked])
        pads = torch.tensor([width - len(each.prompt_ids) for each in asked])
        counts = torch.tensor([each.num_candidates for each in asked])
        self.names: list[Name | None] = [Name(each.group, i) for each in asked for i in range(each.num_candidates)]
        """Name of each row. None if its answer has ended."""
        self.num_running, self.versions = len(self.names), list[int]()
        self.prompts, self.pads = ids.repeat_interleave(counts, 0), pads.repeat_interleave(counts)
        self.tokens = torch.zeros(len(self.names), MAX_TOKENS, dtype=torch.long)
        self.logprobs = torch.zeros(len(self.names), MAX_TOKENS)
        self.last, self.hidden = self.prompts[:, -1], torch.zeros(len(self.names), weights.embedding.shape[1])
        """Token of each row that was sampled last, and the hidden state that it was sampled from."""
        self.kv = weights.kv(ids[:, :-1], pads).repeat_interleave(counts, 2)

    @property
    def column(self) -> int:
        """Column of the last token, whose KV is not there yet."""
        return self.prompts.shape[1] - 1 + len(self.versions)

    def recompute(self, weights: Weights) -> None:
        """Compute the KV of all tokens again by these weights."""
        self._shrink()
        ids = torch.cat([self.prompts, self.tokens[:, : len(self.versions)]], 1)
        self.kv = weights.kv(ids[:, :-1], self.pads)

    def grow(self) -> None:
        """Make place for the next column."""
        if self.column == self.kv.shape[4]:
            self.kv = F.pad(self.kv, (0, 0, 0, BLOCK))

    def attend(self, layer: int, qkv: Tensor, visible: Tensor) -> Tensor:
        """Write a column of KV, and attend to it and all columns before: [rows, hidden_size].

        qkv: [3, rows, heads, head_size]. visible: 0 or -inf, [rows * heads, 1, columns].
        """
        column, rows, size = self.column, qkv.shape[1], qkv.shape[3]
        self.kv[:, layer, :, :, column] = qkv[1:]
        keys, values = self.kv[:, layer, :, :, : column + 1].flatten(1, 2)
        scores = torch.baddbmm(visible, qkv[0].reshape(-1, 1, size), keys.transpose(1, 2), alpha=size**-0.5)
        return torch.bmm(scores.softmax(-1), values).view(rows, -1)  # faster than torch's attention for one query

    def visible(self, num_heads: int) -> Tensor:
        columns = torch.arange(self.column + 1)
        padded = (columns < self.pads[:, None]).repeat_interleave(num_heads, 0)[:, None]
        return torch.zeros(padded.shape).masked_fill_(padded, -torch.inf)

    def add(self, tokens: Tensor, logprobs: Tensor, hidden: Tensor, version: int) -> None:
        place, self.hidden = len(self.versions), hidden
        self.tokens[:, place], self.logprobs[:, place], self.last = tokens, logprobs, tokens
        self.versions.append(version)

    def leave(self, row: int, truncated: bool = False) -> Answer:
        name, num = self.names[row], len(self.versions)
        assert name is not None
        self.names[row] = None
        self.num_running -= 1
        tokens, logprobs = self.tokens[row, :num].tolist(), self.logprobs[row, :num].tolist()
        return Answer(name, tokens, logprobs, self.versions[:num], truncated)

    def shrink(self) -> None:
        """Remove the empty rows if there are many."""
        if self.num_running < FILLED * len(self.names):
            self._shrink()

    def _shrink(self) -> None:
        rows = [row for row, name in enumerate(self.names) if name is not None]
        self.names, kept = [self.names[row] for row in rows], torch.tensor(rows, dtype=torch.long)
        self.prompts, self.pads, self.tokens, self.logprobs, self.last, self.hidden = (
            each[kept] for each in (self.prompts, self.pads, self.tokens, self.logprobs, self.last, self.hidden)
        )
        self.kv = self.kv[:, :, kept]


class Sampler:
    def __init__(self, weights: Weights, seed: int) -> None:
        self.weights, self.waves, self.version = weights, list[Wave](), 0
        self.chance = torch.Generator().manual_seed(seed)

    @property
    def num_running(self) -> int:
        return sum(wave.num_running for wave in self.waves)

    @property
    def num_context(self) -> int:
        """Tokens of prompts and answers that run, with padding."""
        return sum(wave.num_running * (wave.column + 1) for wave in self.waves)

    @torch.no_grad()
    def launch(self, asked: Sequence[Asked]) -> None:
        self.waves.append(Wave(self.weights, asked))

    @torch.no_grad()
    def load(self, weights: Weights, *, recompute: bool) -> None:
        """Go on with these weights. `recompute`: compute all KV again, otherwise keep it."""
        self.weights = weights
        self.version += 1
        if recompute:
            for wave in self.waves:
                wave.recompute(weights)

    @torch.no_grad()
    def step(self) -> list[Answer]:
        """Sample a token for each running answer. Returns those that ended."""
        hidden = self._hidden()
        found = self.weights.logprobs(hidden)
        noise = torch.empty_like(found).exponential_(generator=self.chance).log_()
        tokens = (found - noise).argmax(-1)  # the Gumbel trick
        found = found.gather(1, tokens[:, None])[:, 0]
        sizes = [len(wave.names) for wave in self.waves]
        ended = list[Answer]()
        pieces = (each.split(sizes) for each in (tokens, found, hidden))
        for wave, ids, logprobs, states in zip(self.waves, *pieces, strict=True):
            wave.add(ids, logprobs, states, self.version)
            cut = len(wave.versions) == MAX_TOKENS
            for row in range(len(ids)) if cut else (ids == EOS).nonzero()[:, 0].tolist():
                if wave.names[row] is not None:
                    ended.append(wave.leave(row, truncated=cut and int(ids[row]) != EOS))
        self._tidy()
        return ended

    def stop(self, names: Collection[Name]) -> list[Answer]:
        """Stop these answers. Returns them as they are."""
        places = [(wave, row) for wave in self.waves for row, name in enumerate(wave.names) if name in names]
        stopped = [wave.leave(row) for wave, row in places]
        self._tidy()
        return stopped

    def states(self, names: Sequence[Name]) -> Tensor:
        """Hidden states from which the last tokens of these running answers were sampled: [names, hidden_size]."""
        found = {name: wave.hidden[row] for wave in self.waves for row, name in enumerate(wave.names) if name in names}
        return torch.stack([found[name] for name in names])

    def _tidy(self) -> None:
        self.waves = [wave for wave in self.waves if wave.num_running]
        for wave in self.waves:
            wave.shrink()

    def _hidden(self) -> Tensor:
        weights, sizes = self.weights, [len(wave.names) for wave in self.waves]
        for wave in self.waves:
            wave.grow()
        columns = torch.tensor([wave.column for wave in self.waves]).repeat_interleave(torch.tensor(sizes))
        cos, sin = (each[columns][:, None] for each in (weights.cos, weights.sin))
        visible = [wave.visible(weights.num_heads) for wave in self.waves]
        hidden = weights.embedding[torch.cat([wave.last for wave in self.waves])]
        for place, layer in enumerate(weights.layers):
            qkv = (weights.normalized(hidden) @ layer.qkv).view(-1, 3, weights.num_heads, weights.head_size)
            pieces = turned(qkv.transpose(0, 1), cos, sin).split(sizes, 1)
            attended = [
                wave.attend(place, piece, mask) for wave, piece, mask in zip(self.waves, pieces, visible, strict=True)
            ]
            hidden = weights.after_attention(layer, hidden, torch.cat(attended))
        return hidden
