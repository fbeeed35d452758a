"""The small policy or any other model: functions that pretraining and GRPO share."""

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
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


def save_weights(model: Any, folder: Path) -> Path:
    """Write `model.safetensors`, the only file that a server reads, with LoRA merged in. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model = copy.deepcopy(model).merge_and_unload() if hasattr(model, "peft_config") else model
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, new := folder / "model.new", {"format": "pt"})
    new.replace(folder / "model.safetensors")
    return folder


def prompt_ids(tokenizer: Any, problem: Problem) -> list[int]:
    if tokenizer.chat_template is None:
        return [tokenizer.bos_token_id, *tokenizer.encode(problem.text, add_special_tokens=False)]
    messages = [{"role": "user", "content": problem.text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def micro_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Batches of indices of sequences of similar length. A batch has at most `max_tokens` tokens with padding."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and lengths[index] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def answer_logprobs(
    model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probabilities of the answers' tokens at temperature 1, and a mask of them: both [sequences, width - 1].

    Padding is on the right and attention is causal, so the model needs no mask.
    """
    pairs = list(zip(prompts, answers, strict=True))
    rows = [torch.tensor([*prompt, *answer]) for prompt, answer in pairs]
    ids = pad_sequence(rows, batch_first=True, padding_value=PAD).to(model.device)
    mask = pad_sequence([torch.tensor([0.0] * len(p) + [1.0] * len(a)) for p, a in pairs], batch_first=True)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    logprobs = -F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return logprobs.view_as(ids[:, 1:]), mask[:, 1:].to(ids.device)


def write_line(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def check_finite(model: Any, what: str) -> None:
    """Raises: ValueError if a weight is not finite."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            remedy = "The server keeps those it has. Start again: it goes on from the checkpoint, with a lower --lr."
            raise ValueError(f"{what}: the weights {name} are not finite everywhere. {remedy}")
