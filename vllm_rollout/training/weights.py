"""A trainer's weights on their way to a server: checked, and written as the one file that the server reads."""

from __future__ import annotations

import copy
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def check_finite(model: torch.nn.Module, what: str = "the model") -> None:
    """Check weights before a server gets them. `what`: names them in the error. Raises: ValueError for NaN or
    infinity."""
    if bad := [name for name, parameter in model.named_parameters() if not torch.isfinite(parameter).all()]:
        raise ValueError(
            f"{what}: {len(bad)} weights are NaN or infinite, the first is {bad[0]}. Do not give them to the server. "
            "Go on from a checkpoint, with a lower learning rate."
        )


def save_weights(model: Any, folder: str | PathLike[str]) -> Path:
    """Write weights for `client.give_weights(folder, version)`, with LoRA of peft merged in. Returns the folder.

    model: of Hugging Face. It is not changed.
    folder: gets `model.safetensors`, which appears whole or not at all. A server reads no other file of it.

    Raises: OSError. RuntimeError for weights that share memory, other than tied embeddings.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model = copy.deepcopy(model).merge_and_unload() if hasattr(model, "peft_config") else model
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, new := folder / "model.new", {"format": "pt"})
    new.replace(folder / "model.safetensors")
    return folder
