"""The small policy or any other model: functions that pretraining and GRPO share."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.grpo.task import VOCABULARY, Problem

PAD, BOS, EOS = 0, 1, 2
# 0.9 M parameters. Heads of 32, the least that vLLM's attention on a CPU takes
SHAPE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 384}


def new_model(seed: int) -> Any:
    torch.manual_seed(seed)
    special = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "vocab_size": 64}
    config = LlamaConfig(**SHAPE, **special, max_position_embeddings=1024, dtype="float32", attn_implementation="sdpa")
    return LlamaForCausalLM(config)


def new_tokenizer() -> Any:
    """A tokenizer with one token per word of VOCABULARY."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def load(folder: Path | str, rank: int = 0) -> tuple[Any, Any]:
    """Model in float32 and tokenizer of any Hugging Face folder. If `rank` is not 0, only LoRA matrices are trained."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    if rank:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    return model.eval(), AutoTokenizer.from_pretrained(folder)  # eval: no dropout, or log probabilities differ


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write model and tokenizer. The folder appears whole or not at all."""
    new = folder.with_name(f"{folder.name}.new")
    model.save_pretrained(new)
    (new / "generation_config.json").unlink(missing_ok=True)  # or its defaults become the server's
    tokenizer.save_pretrained(new)
    new.rename(folder)


def prompt_ids(tokenizer: Any, problem: Problem) -> list[int]:
    if tokenizer.chat_template is None:
        return [tokenizer.bos_token_id, *tokenizer.encode(problem.text, add_special_tokens=False)]
    messages = [{"role": "user", "content": problem.text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def write_line(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
