"""Bodies of requests, good and bad. Invariant: all randomness comes from the caller's generator."""

from __future__ import annotations

from random import Random
from typing import Any

STOP_TOKENS = list(range(32, 48))
"""One in 32 of the tiny model's tokens ends a candidate, so lengths are spread around a mean of 30 tokens."""
DETECTION_LENGTHS = (4, 8, 16)

BAD_ROLLOUTS: tuple[Any, ...] = (
    {},
    [],
    "text",
    None,
    {"prompts": []},
    {"prompts": [{"prompt": "a"}], "group_size": 0},
    {"prompts": [{"prompt": "a"}], "group_size": 10**30},
    {"prompts": [{"prompt": "a"}], "group_size": 2, "redundancy": -1},
    {"prompts": [{"prompt": "a"}], "group_size": 4000},
    {"prompts": [{"prompt": ""}], "group_size": 2},
    {"prompts": [{"prompt": "a", "prompt_token_ids": [1]}], "group_size": 2},
    {"prompts": [{"prompt_token_ids": [2**63]}], "group_size": 2},
    {"prompts": [{"prompt_token_ids": [10**6]}], "group_size": 2},
    {"prompts": [{"prompt_token_ids": [20] * 5000}], "group_size": 2},
    {"prompts": [{"prompt": "a"}], "group_size": 2, "sampling_params": {"temperature": -1}},
    {"prompts": [{"prompt": "a"}], "group_size": 2, "sampling_params": {"max_tokens": 0}},
    {"prompts": [{"prompt": "a"}], "group_size": 2, "sampling_params": {"n": 2}},
    {"prompts": [{"prompt": "a"}], "group_size": 2, "sampling_params": {"seed": 2**63}},
    {"prompts": [{"prompt": "a"}], "group_size": 2, "sampling_params": {"structured_outputs": {"regex": "("}}},
    {"prompts": [{"prompt": "a"}], "group_size": 2, "model": "another"},
    {"prompts": [{"prompt": "a"}], "group_size": 2, "pruning": {"detection_length": 0}},
    {"prompts": [{"prompt": "a"}], "group_size": 2, "pruning": {"detection_length": 8, "keep_ratio": 2}},
    {"prompts": [{"prompt": "a"}], "group_size": 2, "selection": {"dual_end": {"num_longest": 9}}},
    {"prompts": [{"messages": [{"role": 1}]}], "group_size": 2},
    {"prompts": [{"id": "x", "prompt": "a"}, {"id": "x", "prompt": "b"}], "group_size": 2},
    {"prompts": [{"prompt": "a"}], "group_size": 2, "stream_tokens": 4},
    {"prompts": [{"prompt": "a"}], "group_size": 2, "unknown": 1},
)
"""Bodies that are refused with 4xx."""

BAD_TEXTS = (b"", b"{", b"\xff\xfe", b'{"prompts": [NaN]}', b"[" * 100_000, b'{"a":' * 50_000)
"""Texts that are not JSON, or are nested too deeply."""

EVIL_PATTERNS = (r"(a+)+$", r"(a|a)*b", r"(.*)*=", r"(", r"(?:a{9999}){9999}", r"(a?){50}a{50}")


def prompts(rng: Random, name: str, num_prompts: int) -> list[dict[str, Any]]:
    """Prompts with ids of their own."""
    return [
        {"id": f"{name}-{i}", "prompt_token_ids": [rng.randrange(64, 512) for _ in range(rng.randint(2, 24))]}
        for i in range(num_prompts)
    ]


def sampling(rng: Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"max_tokens": rng.choice((8, 64, 200)), "stop_token_ids": STOP_TOKENS}
    if rng.random() < 0.5:
        fields["seed"] = rng.randrange(2**31)
    if rng.random() < 0.2:
        fields["stop"] = ["ab"]
    return fields


def rollout(rng: Random, name: str, **fields: Any) -> dict[str, Any]:
    """A rollout that any server with 64 places can run."""
    body = {
        "prompts": prompts(rng, name, rng.randint(1, 4)),
        "group_size": rng.randint(1, 4),
        "redundancy": rng.randint(0, 4),
        "sampling_params": sampling(rng),
        "include": [
            word for word, share in (("text", 0.3), ("logprobs", 0.7), ("stopped", 0.2)) if rng.random() < share
        ],
    }
    return {**body, **fields}


def pruning(rng: Random) -> dict[str, Any]:
    return {
        "detection_length": rng.choice(DETECTION_LENGTHS),
        "min_labels": 8,
        "mode": rng.choice(("active", "active", "shadow")),
        "allow_fewer": rng.random() < 0.2,
        "signal": rng.choice(("head", "confidence")),
    }


def mutated(rng: Random, data: bytes) -> bytes:
    """`data` with some bytes changed, removed or inserted."""
    if not data or rng.random() < 0.2:
        return rng.randbytes(rng.randint(0, 200))
    changed = bytearray(data)
    for _ in range(rng.choice((1, 4, 64))):
        position = rng.randrange(len(changed))
        match rng.randrange(3):
            case 0:
                changed[position] = rng.randrange(256)
            case 1:
                del changed[position : position + rng.randint(1, 64)]
            case 2:
                changed[position:position] = rng.randbytes(rng.randint(1, 8))
        if not changed:
            break
    return bytes(changed)


def mutated_text(rng: Random, data: bytes) -> bytes:
    """`data` with one digit replaced by an extreme value that JSON readers accept. Unchanged without a digit."""
    digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
    if not digits:
        return data
    position = rng.choice(digits)
    value = rng.choice((b"1e308", b"-1", b"99999999999999999999999999", b"NaN", b"1e999", b"null", b'"x"', b"0.5"))
    return data[:position] + value + data[position + 1 :]
