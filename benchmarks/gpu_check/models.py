"""Models of a lease: a tiny random one that transformers can run too, and the shape of Qwen3-8B without weights.

Invariant: a process of its own makes each model. OpenMP's threads do not survive a fork, so a process that has computed
with them must not be copied any more.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
from pathlib import Path

SHAPE_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
"""Sizes of Qwen3-8B."""
SMALL_SHAPE = {
    **SHAPE_8B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes of the model of a rehearsal."""
STOP_TOKEN = 6
"""Ends a candidate whose length is chosen."""


class Models:
    """Folders of models, made on first use."""

    def __init__(self, folder: Path, small: bool) -> None:
        self.folder = folder
        self.shape = SMALL_SHAPE if small else SHAPE_8B

    def path(self, name: str) -> Path:
        """Folder of the model `tiny` or `8b`."""
        path = self.folder / name
        if (path / "config.json").exists():
            return path
        maker = multiprocessing.get_context("fork").Process(target=self._make, args=(name, path))
        maker.start()
        maker.join()
        if maker.exitcode:
            raise RuntimeError(f"the model {name!r} could not be made in {self.folder}: exit status {maker.exitcode}")
        return path

    def _make(self, name: str, path: Path) -> None:
        new = self.folder / f".{name}"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        if name == "tiny":
            from vllm_rollout.model_files import tiny

            tiny(new)
        else:
            (new / "config.json").write_text(json.dumps(self.shape))
            write_tokenizer(new, self.shape["vocab_size"])
        new.rename(path)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer with one word per token, so that a server can decode any token of a model without weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({f"t{token}": token for token in range(vocab_size)}, unk_token="t0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="t1", eos_token="t2", pad_token="t0").save_pretrained(
        folder
    )
