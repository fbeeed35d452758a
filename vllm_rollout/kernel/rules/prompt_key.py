"""Names of prompts, and short forms of other names that clients choose.

Invariant: the same content gives the same name, in every process and run. Names that are stored stay small.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from hashlib import blake2b

KEY_OF_ID = "id:"
"""Prefix of the names of prompts that have a client's id, over all rollouts."""
KEY_OF_TOKENS = "tokens:"
"""Prefix of the names of prompts without a client's id, over all rollouts: a digest of the tokens follows."""


KEY_OF_DIGEST = "digest:"
"""Prefix of the digest of a client's id that is too long to store."""

MAX_KEPT_BYTES = 256
"""Largest name that is stored unchanged, in bytes. Hundreds of thousands of candidates and prompts are stored, some
under four names. Ids of trainers and UUIDs take a quarter of this."""


def num_bytes(name: str) -> int:
    """Bytes that a name takes at most: one character beyond ASCII may widen all of them to four bytes."""
    return len(name) if name.isascii() else 4 * len(name)


def kept_name(name: str) -> str:
    """The stored form of a name: the name itself, or its digest if it is large. A digest is its own stored form."""
    if num_bytes(name) <= MAX_KEPT_BYTES:
        return name
    return f"{KEY_OF_DIGEST}{blake2b(name.encode(errors='surrogatepass'), digest_size=16).hexdigest()}"


def digest_of(token_ids: Sequence[int]) -> str:
    """Digest of a prompt's tokens, 24 hexadecimal digits."""
    return blake2b(array("Q", token_ids).tobytes(), digest_size=12).hexdigest()


def history_key(prompt_id: str | None, token_ids: Sequence[int]) -> str:
    """A prompt's name across rollouts: made from the client's id, else from its tokens."""
    if prompt_id is None:
        return f"{KEY_OF_TOKENS}{digest_of(token_ids)}"
    kept = kept_name(prompt_id)
    return f"{KEY_OF_ID}{prompt_id}" if kept == prompt_id else kept


def seed_for(seed: int, prompt: str) -> int:
    """A seed below 2**62 for the prompt of this name: 2**62 and more stay free for the prompt's candidates.

    Seeds of different prompts are independent of each other, and so are a prompt's seeds for different values of
    `seed`. A trainer may send the number of its step, or always the same seed.

    Pruning uses the seed of the prompt's content. Sampling uses the seed of the prompt's id, so that a prompt that
    stands twice in a request has different answers. Candidate i samples with the prompt's seed + i, as vLLM seeds the n
    of a request.
    """
    digest = blake2b(f"{seed}:{prompt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def joined_id(namespace: str, name: str | int, content: str, adapter: str) -> str:
    """The id of a group that single requests join, equal for siblings only.

    Siblings share the prompt by definition. If a name is used for another prompt, or with another LoRA adapter, it
    means another group. A number is not a name: it means the prompt's group of that number. The server's own group ids
    contain a `-`, this id does not.
    """
    key = json.dumps([namespace, name, content, adapter])  # ASCII, whatever users call their runs
    return f"joined:{blake2b(key.encode(), digest_size=16).hexdigest()}"
