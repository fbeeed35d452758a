"""Digests of prompts, in every form that reaches the engine client. Invariant: no prompt is kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vllm_rollout.kernel.rules.prompt_key import digest_of


def digest_of_prompt(prompt: Any) -> str:
    """Digest of a prompt's content: token ids, with the hashes of images and other media.

    Prompts without token ids (embeddings, a stream of inputs) are distinguished only by their type.
    """
    if isinstance(prompt, str):
        return f"text:{digest_of([*map(ord, prompt)])}"
    if not isinstance(prompt, Mapping):
        return type(prompt).__name__
    parts = [digest_of(prompt.get("prompt_token_ids") or ())]
    if "encoder_prompt" in prompt:
        parts += [digest_of_prompt(prompt["encoder_prompt"]), digest_of_prompt(prompt["decoder_prompt"])]
    elif prompt.get("mm_hashes"):
        hashes = {modality: list(items) for modality, items in prompt["mm_hashes"].items()}
        parts.append(json.dumps(hashes, sort_keys=True))
    elif "prompt_token_ids" not in prompt and isinstance(prompt.get("prompt"), str):
        parts.append(digest_of_prompt(prompt["prompt"]))
    return "/".join(parts)
