"""Races, scores, rewards and grammars on a mixture of experts, and on two workers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine.conftest import run_script


@pytest.fixture(scope="module")
def mixture_of_experts(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

    folder = tmp_path_factory.mktemp("models") / "mixture"
    dense = AutoConfig.from_pretrained(tiny_model)
    config = Qwen3MoeConfig(
        vocab_size=dense.vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=2048, bos_token_id=dense.bos_token_id, eos_token_id=dense.eos_token_id,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return str(folder)


def check(settings: dict[str, Any], model: str) -> None:
    result = run_script("other_models.py", json.dumps(settings), model)
    for group in result["free"] + result["grammar"]:
        assert group["states"] == ["surplus"] * 2
        assert len(group["rewards"]) == 2
        assert None not in group["confidences"]
    assert all(3 <= reward <= 8 for group in result["grammar"] for reward in group["rewards"])


def test_a_mixture_of_experts(mixture_of_experts: str) -> None:
    check({}, mixture_of_experts)


def test_two_workers_of_a_tensor_parallel_engine(tiny_model: str) -> None:
    check({"tensor_parallel_size": 2}, tiny_model)
