"""Names of prompts, and of what else clients name.

Invariant: the same content gives the same name, in every process and run; what is remembered of it is small.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from hashlib import blake2b

KEY_OF_ID = "id:"
"""Prefix of the client's id, in the name of a prompt over all rollouts."""
KEY_OF_TOKENS = "tokens:"
"""Prefix of the digest, in the name over all rollouts of a prompt whose client gave it none."""


KEY_OF_DIGEST = "digest:"
"""Prefix of the digest of a client's id that is too large to be remembered."""

MAX_KEPT_BYTES = 256
"""Largest name that is remembered as it is. Candidates and prompts are remembered by the hundred thousand, some of them
under four names; ids of trainers and UUIDs are a quarter of this."""


def num_bytes(name: str) -> int:
    """Bytes that a name takes: one character beyond ASCII may make all of them wide."""
    return len(name) if name.isascii() else 4 * len(name)


def kept_name(name: str) -> str:
    """A name as it is remembered: itself, or of a large one its digest, whose own is itself again."""
    if num_bytes(name) <= MAX_KEPT_BYTES:
        return name
    return f"{KEY_OF_DIGEST}{blake2b(name.encode(errors='surrogatepass'), digest_size=16).hexdigest()}"


def key_of_id(id: str) -> str:
    """The name over all rollouts of a prompt that its client calls so."""
    kept = kept_name(id)
    return f"{KEY_OF_ID}{id}" if kept == id else kept


def digest_of(token_ids: Sequence[int]) -> str:
    """24 hexadecimal digits."""
    return blake2b(array("Q", token_ids).tobytes(), digest_size=12).hexdigest()


def key_of_content(content: str) -> str:
    """The name over all groups of a prompt whose content is named so; empty for one without token ids, which nothing
    tells from others. With images and the like it is not the name of its tokens alone."""
    tokens, _, rest = content.partition("/")
    if tokens == digest_of(()) or len(tokens) != len(digest_of(())):
        return ""
    return f"{KEY_OF_TOKENS}{digest_of([*map(ord, content)]) if rest else tokens}"


def draft_key(namespace: str, token_ids: Sequence[int], adapter: str) -> str:
    """The name of a prompt whose answers are drafts for each other: how long an answer takes tells what others were
    answered, so that nobody shares them with another namespace."""
    return json.dumps([namespace, digest_of(token_ids), adapter])


def seed_for(seed: int, prompt: str) -> int:
    """A seed for the prompt of this name, below 2**62: above it are as many more as a prompt has candidates.

    What prompts of one seed draw has nothing to do with each other, nor has what a prompt draws by the next seed: a
    trainer may send the number of its step, or the same seed always.

    Pruning draws by the prompt's content. Sampling draws by its id, so that a prompt that stands twice in a request
    has other answers: candidate i samples with the prompt's seed + i, as vLLM seeds the n of a request.
    """
    digest = blake2b(f"{seed}:{prompt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def joined_id(namespace: str, name: str | int, content: str, adapter: str) -> str:
    """The id of a group that single requests join: the same for siblings, another one for everybody else.

    Siblings share the prompt by definition, so a name that is used again for another prompt, or under another LoRA
    adapter, means another group. A number is nobody's name: the prompt's group of that number is meant. The server's
    own group ids have a `-` in them, this one has none.
    """
    key = json.dumps([namespace, name, content, adapter])  # ASCII, whatever users call their runs
    return f"joined:{blake2b(key.encode(), digest_size=16).hexdigest()}"
