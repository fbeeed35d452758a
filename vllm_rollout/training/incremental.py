"""Log probabilities of trajectories that still grow: forward passes over their new tokens only (DARTS appendix E).

`IncrementalLogprobs` keeps a KV cache for each trajectory. A pass takes the new tokens of many trajectories, padded
and masked. So old log probabilities, a reference model's, or entropies are nearly ready when a rollout ends.

Invariant: the numbers are those of one forward pass over the whole trajectory, within float error. Chunks and shared
passes change nothing. The newest token of each trajectory waits: nothing that is wanted follows from it yet.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

Key = tuple[Hashable, int]
"""The prompt's id and the candidate's index, as `tokens` events have them."""


class Logprobs(NamedTuple):
    """Values of one trajectory's answer, in nats."""

    logprobs: Tensor  # [num_tokens]
    entropies: Tensor | None  # [num_tokens]


@dataclass(slots=True)
class Growing:
    """A trajectory that is still being generated."""

    token_ids: list[int]
    """The prompt, then the answer so far."""
    num_prompt_tokens: int
    num_forwarded: int = 0
    cache: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Per layer keys and values, each [num_heads, num_forwarded, head_size]."""
    logprobs: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)

    @property
    def num_new(self) -> int:
        return len(self.token_ids) - 1 - self.num_forwarded


class IncrementalLogprobs:
    """Forward passes over new tokens, while the rollout runs.

        passes = IncrementalLogprobs(reference_model, entropy=True)
        passes.begin(key, prompt_token_ids)
        passes.add(key, event.offset, event.token_ids)  # each `tokens` event
        if passes.num_new >= 512:
            passes.forward()
        passes.drop(key)                                # a candidate that was stopped
        logprobs, entropies = passes.finish(key)        # a trajectory

    model: a causal language model of Hugging Face in which every layer attends to all earlier tokens. It runs as it
    stands: call `eval()` if it has dropout.
    max_pass_tokens: bounds the logits in memory. A pass is cut where its candidates times its longest chunk exceed it.
    A longer chunk goes alone.
    temperature: that of the log probabilities, as sampled.
    keep_activations: keeps the graph for one backward pass per prompt, instead of nothing. It costs more memory than
    running the whole trajectories again, as every pass keeps a copy of the keys and values before it. Only candidates
    of one prompt share a pass then. Memory of a dropped candidate is free when that of its whole prompt is.

    Raises: ValueError for a model that keeps no cache, or one whose layers forget.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        entropy: bool = False,
        temperature: float = 1.0,
        max_pass_tokens: int = 4096,
        keep_activations: bool = False,
    ) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, got {temperature}: greedy answers have none to divide by")
        if max_pass_tokens < 1:
            raise ValueError(f"max_pass_tokens must be at least 1, got {max_pass_tokens}")
        self.model = model
        self.entropy = entropy
        self.temperature = temperature
        self.max_pass_tokens = max_pass_tokens
        self.keep_activations = keep_activations
        self._device = next(model.parameters()).device
        self._cache_class = cache_class_of(model, self._device)
        self._growing: dict[Key, Growing] = {}
        self._weights = self._weights_now()

    @property
    def num_new(self) -> int:
        """Tokens that the next `forward` would take."""
        return sum(each.num_new for each in self._growing.values())

    @property
    def cache_bytes(self) -> int:
        return sum(
            tensor.nbytes for each in self._growing.values() for layer in each.cache.values() for tensor in layer
        )

    def begin(self, key: Key, prompt_token_ids: Sequence[int]) -> None:
        """A trajectory whose prompt is known. Raises: ValueError for an empty prompt, or a key that is there."""
        if not prompt_token_ids:
            raise ValueError(f"the prompt of {key} has no tokens: nothing says how likely its first token is")
        if key in self._growing:
            raise ValueError(f"{key} has begun before. Call finish or drop first, also for a candidate that restarted.")
        if not self._growing:
            self._weights = self._weights_now()
        self._growing[key] = Growing(list(prompt_token_ids), len(prompt_token_ids))

    def add(self, key: Key, offset: int, token_ids: Sequence[int]) -> None:
        """Append an answer's next tokens, without a pass. Raises: ValueError for an unknown key or a gap."""
        growing = self._known(key)
        num_tokens = len(growing.token_ids) - growing.num_prompt_tokens
        if offset != num_tokens:
            raise ValueError(
                f"a chunk of {key} begins at offset {offset}, but {num_tokens} tokens have come: chunks must join. Add"
                " them in the order of their events; of a candidate that restarted, drop what there is and begin again."
            )
        growing.token_ids += token_ids

    def forward(self, keys: Iterable[Key] | None = None) -> int:
        """Pass over new tokens, of all trajectories or of these. Returns: how many. Raises: RuntimeError when the
        weights have changed under a trajectory."""
        found = self._growing if keys is None else {key: self._known(key) for key in keys}
        waiting = sorted(((key, each) for key, each in found.items() if each.num_new), key=lambda row: row[1].num_new)
        if waiting and self._weights != self._weights_now():
            raise RuntimeError(
                f"the weights have changed while {len(self._growing)} trajectories have caches of the old ones. finish"
                " or drop them before the update."
            )
        num_tokens = sum(each.num_new for _, each in waiting)
        batches: dict[Hashable, list[Growing]] = {}
        for key, growing in waiting:
            batch = batches.setdefault(key[0] if self.keep_activations else None, [])
            # Shortest first: the newest is the longest, to which all are padded.
            if batch and (len(batch) + 1) * growing.num_new > self.max_pass_tokens:
                self._pass(batch)
                batch.clear()
            batch.append(growing)
        for batch in batches.values():
            self._pass(batch)
        return num_tokens

    def finish(self, key: Key) -> Logprobs:
        """Values of the whole answer. Its last tokens get a pass of their own, and its cache is freed. To pass over a
        group together, call `forward` with its keys before."""
        self.forward([key])
        growing = self._growing[key]
        empty = torch.empty(0, device=self._device)
        entropies = torch.cat([empty, *growing.entropies]) if self.entropy else None
        found = Logprobs(torch.cat([empty, *growing.logprobs]), entropies)
        del self._growing[key]  # last: what runs out of memory can run again
        return found

    def drop(self, key: Key) -> int:
        """Forget a candidate that was stopped, and free its cache. Returns: number of its tokens that were passed over,
        for nothing. Raises: ValueError for an unknown key."""
        self._known(key)
        return self._growing.pop(key).num_forwarded

    def _known(self, key: Key) -> Growing:
        if key not in self._growing:
            raise ValueError(
                f"{key} is not on its way; {len(self._growing)} others are. Call begin with its prompt first, and"
                " nothing after finish or drop."
            )
        return self._growing[key]

    def _weights_now(self) -> int:
        return sum(parameter._version for parameter in self.model.parameters())

    def _pass(self, batch: list[Growing]) -> None:
        """Keys are [caches, padded on their right | new tokens, padded on their right]. Padding is masked."""
        past, width = max(each.num_forwarded for each in batch), max(each.num_new for each in batch)
        token_ids = torch.zeros(len(batch), width, dtype=torch.long)
        targets = torch.zeros_like(token_ids)
        positions = torch.zeros_like(token_ids)
        mask = torch.zeros(len(batch), past + width, dtype=torch.long)
        for row, growing in enumerate(batch):
            begin, num_new = growing.num_forwarded, growing.num_new
            token_ids[row, :num_new] = torch.tensor(growing.token_ids[begin:-1])
            targets[row, :num_new] = torch.tensor(growing.token_ids[begin + 1 :])
            positions[row] = begin + torch.arange(width).clamp(max=num_new - 1)
            mask[row, :begin] = 1
            mask[row, past : past + num_new] = 1
        with torch.set_grad_enabled(self.keep_activations):
            cache, fresh = self._joined_cache(batch, past)
            try:
                logits = self.model(
                    input_ids=token_ids.to(self._device),
                    attention_mask=mask.to(self._device),
                    position_ids=positions.to(self._device),
                    past_key_values=cache,
                    use_cache=True,
                ).logits  # [num_trajectories, width, vocabulary]
            finally:
                del cache.update  # it refers to the cache, which else lives until the next garbage collection
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
            total = logits.logsumexp(-1)
            logprobs = logits.gather(-1, targets.to(self._device)[..., None])[..., 0] - total
            entropies = total - (logits.softmax(-1) * logits).sum(-1) if self.entropy else None
            for row, growing in enumerate(batch):
                num_new = growing.num_new
                answer = slice(max(growing.num_prompt_tokens - 1 - growing.num_forwarded, 0), num_new)
                its_logprobs = logprobs[row, answer].clone()
                its_entropies = None if entropies is None else entropies[row, answer].clone()
                cached: dict[int, tuple[Tensor, Tensor]] = {}
                for layer, pair in fresh.items():
                    new = [tensor[row, :, :num_new] for tensor in pair]
                    old = growing.cache.get(layer, [tensor[:, :0] for tensor in new])
                    keys, values = (torch.cat(parts, dim=1) for parts in zip(old, new, strict=True))
                    cached[layer] = keys, values
                # Nothing below fails, so an error above leaves this trajectory as it was before the pass.
                growing.logprobs.append(its_logprobs)
                if its_entropies is not None:
                    growing.entropies.append(its_entropies)
                growing.cache = cached
                growing.num_forwarded += num_new

    def _joined_cache(self, batch: list[Growing], past: int) -> tuple[Any, dict[int, tuple[Tensor, Tensor]]]:
        """The caches of a batch as the model takes them, and a place where a pass leaves its new keys and values."""
        cache = self._cache_class()
        fresh: dict[int, tuple[Tensor, Tensor]] = {}
        like = next((each.cache for each in batch if each.cache), {})
        for layer, pair in like.items():
            nothing = [tensor[:, :0] for tensor in pair]
            columns = zip(*(each.cache.get(layer, nothing) for each in batch), strict=True)
            cache.update(
                *(torch.stack([pad(row, (0, 0, 0, past - row.shape[1])) for row in column]) for column in columns),
                layer,
            )
        update = cache.update

        def update_and_keep(keys: Tensor, values: Tensor, layer: int, *rest: Any, **named: Any) -> Any:
            fresh[layer] = keys, values
            return update(keys, values, layer, *rest, **named)

        cache.update = update_and_keep
        return cache, fresh


def cache_class_of(model: torch.nn.Module, device: torch.device) -> type[Any]:
    """The class in which the model keeps keys and values, found by a pass over one token. Raises: ValueError."""
    config = getattr(model, "config", None)
    window = ["sliding_attention"] if getattr(config, "sliding_window", None) else []
    kinds = set(getattr(config, "layer_types", None) or window) - {"full_attention"}
    if kinds:
        raise ValueError(
            f"layers of the model are {', '.join(sorted(kinds))}: they forget or fold earlier tokens, and a cache with"
            " padding would shift them. Every layer must be full_attention; run whole trajectories for this model."
        )
    with torch.no_grad():
        token = torch.zeros(1, 1, dtype=torch.long, device=device)
        cache = getattr(model(input_ids=token, use_cache=True), "past_key_values", None)
    if cache is None:
        raise ValueError(
            f"{type(model).__name__} returns no past_key_values: it is no causal language model of Hugging Face, or its"
            " gradient checkpointing turns the cache off. Call eval() or gradient_checkpointing_disable()."
        )
    return type(cache)
