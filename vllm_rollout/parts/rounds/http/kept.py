"""Output of a deferred group's candidates, packed into bytes. Invariant: unpacking gives what was packed.

A token takes 12 bytes before zlib: its id and its log probability. vLLM's log probabilities are float32 written as
float64, so that 6 to 8 bytes are left.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from vllm_rollout.config import MAX_GROUP_SIZE
from vllm_rollout.kernel.http.engine import CandidateEnd
from vllm_rollout.parts.rounds.rules.resumption import VersionSpan, choose_resumed, is_whole, spans_of

MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Most bytes of one prompt before zlib: 5 million tokens. A prompt with more starts anew."""

Probability = Annotated[float, msgspec.Meta(gt=0, le=1)]


class KeptCandidate(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A candidate of a deferred group, finished or not."""

    whole: bool
    """True if it has nothing left to generate."""
    truncated: bool
    """True if it was cut at `max_tokens`."""
    packed_token_ids: bytes
    """Token ids as int32, [num_tokens]."""
    packed_logprobs: bytes | None
    """Log probabilities as float64, [num_tokens]."""
    spans: list[VersionSpan]
    confidence: tuple[float, float] | None
    finish_reason: str | None
    stop_reason: int | str | None
    survival_probability: Probability
    """Probability with which it was kept when it was scored."""

    @property
    def token_ids(self) -> Sequence[int]:
        return array("i", self.packed_token_ids)

    @property
    def logprobs(self) -> Sequence[float] | None:
        return None if self.packed_logprobs is None else array("d", self.packed_logprobs)

    @property
    def num_tokens(self) -> int:
        return len(self.packed_token_ids) // array("i").itemsize


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Annotated[list[KeptCandidate], msgspec.Meta(max_length=MAX_GROUP_SIZE)])


def keep(
    ends: Collection[CandidateEnd], group_size: int, fields_of: Callable[[CandidateEnd], Mapping[str, Any]]
) -> bytes | None:
    """The packed candidates of a deferred group that go on later. None if they are too large. `fields_of`: fields of
    answers about them (`GroupRecord.fields_of`)."""
    by_index = {end.ending.index: end for end in ends}
    chosen = choose_resumed([end.ending for end in ends], group_size)
    body = _ENCODER.encode([_kept(end := by_index[index], fields_of(end)) for index in chosen])
    return zlib.compress(body, 1) if len(body) <= MAX_KEPT_BYTES else None


def read_kept(blob: bytes) -> list[KeptCandidate]:
    """Unpack what `keep` has packed. Raises: ValueError for any other bytes."""
    unpacking = zlib.decompressobj()
    try:
        body = unpacking.decompress(blob, MAX_KEPT_BYTES)
        if not unpacking.eof:
            raise ValueError(f"it was cut off, or has more than {MAX_KEPT_BYTES} bytes")
        kept: list[KeptCandidate] = _DECODER.decode(body)
    except (zlib.error, msgspec.DecodeError) as error:
        raise ValueError(str(error)) from error
    for candidate in kept:
        _check(candidate)
    return kept


def _kept(end: CandidateEnd, fields: Mapping[str, Any]) -> KeptCandidate:
    is_over, is_tie = is_whole(end.ending), end.ending.state != "finished"
    return KeptCandidate(
        is_over,
        end.ending.truncated,
        array("i", end.token_ids).tobytes(),
        None if end.logprobs is None else array("d", end.logprobs).tobytes(),
        spans_of(end.weight_versions),
        end.confidence,
        None if not is_over else "stop" if is_tie else end.finish_reason,
        None if not is_over or is_tie else end.stop_reason,
        fields.get("survival_probability", end.survival_before),
    )


def _check(kept: KeptCandidate) -> None:
    num = kept.num_tokens
    sizes: list[tuple[str, bytes | None, Any]] = [
        ("token ids", kept.packed_token_ids, array("i")),
        ("log probabilities", kept.packed_logprobs, array("d")),
    ]
    for name, packed, numbers in sizes:
        if packed is not None and len(packed) != num * numbers.itemsize:
            raise ValueError(f"{name} of a kept candidate must be {num}, got {len(packed)} bytes")
    if min(kept.token_ids, default=0) < 0:
        raise ValueError(f"token ids of a kept candidate must be at least 0, got {min(kept.token_ids)}")
    ends = [0, *(span.end for span in kept.spans)]
    starts = [*(span.start for span in kept.spans), num]
    if kept.spans and starts != ends:
        raise ValueError(f"weight versions of a kept candidate must cover its {num} tokens, got {kept.spans}")
    if kept.whole and not num:
        raise ValueError("a kept candidate that is over must have a token, got 0")
