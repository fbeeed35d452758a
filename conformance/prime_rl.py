"""Requests of prime-rl's orchestrator beside generation, as its client sends them, and the files that they name.

Source: PrimeIntellect-ai/prime-rl at 559b447 (August 2026), which is not in the registry. Invariant: paths, query and
bodies are prime-rl's, and nothing here imports vllm_rollout.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Self

import httpx


class Admin:
    """prime-rl's administration of one server."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=300, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def post(self, path: str, **kwargs: Any) -> httpx.Response:
        return self._http.post(path, **kwargs)

    def wait_until_ready(self, model: str) -> None:
        self._http.get("/health").raise_for_status()
        self._http.get("/liveness").raise_for_status()
        assert model in {card["id"] for card in self._http.get("/v1/models").json()["data"]}

    def update_weights(self, folder: Path | None) -> None:
        """Load weights. Running requests are kept, and continue with the new weights."""
        self.post("/pause", params={"mode": "keep", "clear_cache": "false"}).raise_for_status()
        try:
            weight_dir = None if folder is None else folder.as_posix()
            self.post("/update_weights", json={"weight_dir": weight_dir}).raise_for_status()
        finally:
            self.post("/resume").raise_for_status()

    def load_lora_adapter(self, name: str, folder: Path) -> None:
        self.post("/load_lora_adapter", json={"lora_name": name, "lora_path": folder.as_posix()}).raise_for_status()


def make_weights(model: Path, folder: Path) -> Path:
    """Other weights of the same shapes, written as a trainer writes a checkpoint."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    chance = torch.Generator().manual_seed(1)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(model / name, folder)
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        noise = {name: torch.randn(t.shape, generator=chance) for name, t in tensors.items() if t.dim() == 2}
        changed = {name: (t + noise[name].to(t.dtype) * t.std() if name in noise else t) for name, t in tensors.items()}
        save_file(changed, folder / file.name, {"format": "pt"})
    return folder


def make_adapter(model: Path, folder: Path, seed: int) -> Path:
    """A LoRA adapter of rank 8 on the attention's output, as peft writes it."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, rank = config["hidden_size"], 8
    width = config["num_attention_heads"] * config.get("head_dim", hidden // config["num_attention_heads"])
    folder.mkdir()
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 64,
        "target_modules": ["o_proj"],
    }
    settings |= {"bias": "none", "lora_dropout": 0.0, "base_model_name_or_path": str(model)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    chance = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, width, generator=chance)
        tensors[f"{name}.lora_B.weight"] = torch.randn(hidden, rank, generator=chance)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder
