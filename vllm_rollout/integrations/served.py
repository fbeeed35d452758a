"""Checks before the first step that the server serves the model that the trainer trains."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import httpx

from vllm_rollout import RolloutClient

SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
"""Fields of a model's configuration that are compared."""
TIMEOUT_S = 60.0


def check_served(client: RolloutClient, config: Any, tokenizer: Any, text: str) -> None:
    """Compare the server's model and tokenizer with the trainer's.

    `config`, `tokenizer`: the trainer's, from transformers. `text`: sample words of prompts and answers. Both
    tokenizers encode this text, and the token ids are compared.

    If the server's model name is no folder or repository on this host, only the tokenizers are compared.

    Raises: RuntimeError for another model or tokenizer. httpx.HTTPError for a server that does not answer.
    """
    ours = config.name_or_path
    settings = {"base_url": client.base_url, "headers": client.key_headers, "timeout": TIMEOUT_S, "trust_env": False}
    with httpx.Client(**settings) as http:
        served = http.get("/v1/models").raise_for_status().json()["data"][0]
        if (shape := _shape_at(served["root"])) not in (None, _shape(config)):
            raise RuntimeError(
                f"the server at {client.base_url} serves {served['root']}, {shape}, and {ours} is {_shape(config)}. "
                f"Start the server with {ours}."
            )
        body = {"model": served["id"], "prompt": text, "add_special_tokens": False}
        tokens = http.post("/tokenize", json=body).raise_for_status().json()["tokens"]
    if tokens != (own := tokenizer.encode(text, add_special_tokens=False)):
        at = next((i for i, (a, b) in enumerate(zip(tokens, own, strict=False)) if a != b), min(len(tokens), len(own)))
        raise RuntimeError(
            f"the server's tokenizer makes {tokens[at : at + 1]} of the token {at} of {text!r}, that of {ours} makes "
            f"{own[at : at + 1]}. Start the server with {ours}, without --tokenizer."
        )


def _shape(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name, None) for name in SHAPE}


def _shape_at(model: str) -> dict[str, Any] | None:
    from transformers import AutoConfig

    with suppress(OSError, ValueError):  # a name that this host does not know is not compared
        return _shape(AutoConfig.from_pretrained(model))
    return None
