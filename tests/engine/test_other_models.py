"""Races, scores, rewards and grammars on a mixture of experts, and on sliding windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.conftest import run_script

EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}


def make(config_class: str, tiny_model: str, folder: Path, **settings: Any) -> str:
    """A model of random weights with the tiny model's tokenizer."""
    import transformers

    dense = transformers.AutoConfig.from_pretrained(tiny_model)
    config = getattr(transformers, config_class)(
        vocab_size=dense.vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, bos_token_id=dense.bos_token_id,
        eos_token_id=dense.eos_token_id, **settings,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return str(folder)


def check(model: str) -> None:
    result = run_script("other_models.py", model)
    for group in result["free"] + result["grammar"]:
        assert group["states"] == ["surplus"] * 2
        assert len(group["rewards"]) == 2
        assert None not in group["confidences"]
    assert all(3 <= reward <= 8 for group in result["grammar"] for reward in group["rewards"])


def test_a_mixture_of_experts(tiny_model: str, tmp_path: Path) -> None:
    check(make("Qwen3MoeConfig", tiny_model, tmp_path / "model", **EXPERTS))


def test_layers_of_which_some_have_a_sliding_window(tiny_model: str, tmp_path: Path) -> None:
    check(make("Gemma3TextConfig", tiny_model, tmp_path / "model", **WINDOWS))
