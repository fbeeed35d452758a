"""Model directories made here: a GGUF as Hugging Face safetensors, a tiny random model.

Torch and transformers are imported where they are used: `models` runs these functions in a child process.
"""

import os


def convert_gguf(gguf: str, target: str, *eos_tokens: str) -> None:
    """Write the model in `gguf` to the directory `target`, dequantized to bf16. Imports torch and transformers."""
    import torch
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    folder, file = os.path.split(gguf)
    fields = GGUFReader(gguf).fields
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    if fields["tokenizer.ggml.pre"].contents() == "smollm":
        # transformers converts every Llama GGUF alike and drops SmolLM's digit split: "\n\n1" would become other
        # tokens than the model was trained on.
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(True), ByteLevel(add_prefix_space=False)])
    if not tokenizer.chat_template:
        raise RuntimeError(f"{file} has no tokenizer.chat_template, which a chat model needs. Use another upload.")
    if tokenizer.eos_token != eos_tokens[0]:
        raise RuntimeError(f"the tokenizer's eos_token must be {eos_tokens[0]!r}, got {tokenizer.eos_token!r}")

    policy = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    ).to(torch.bfloat16)
    eos_token_ids = tokenizer.convert_tokens_to_ids(list(eos_tokens))
    # Sampling parameters are left out: vLLM takes a generation_config's temperature or top_p as the default of every
    # request, and a rollout must sample from the policy itself.
    policy.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=eos_token_ids[0] if len(eos_token_ids) == 1 else eos_token_ids,
        pad_token_id=tokenizer.pad_token_id,
    )
    policy.save_pretrained(target)
    tokenizer.save_pretrained(target)


def tiny(path: str | os.PathLike[str], *, seed: int = 0, hidden_size: int = 256, num_layers: int = 4) -> None:
    """Write a small random Qwen3 with a byte-level tokenizer of 512 tokens to `path`. Equal seeds give equal bytes.

    Imports torch and transformers.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocab_size = 512
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "etaoinshrdlcumwfg"
    # Every id below vocab_size is a token, so that every sample of a random model can be decoded.
    merges = [(first, second) for first in letters for second in letters][: vocab_size - len(special) - len(alphabet)]
    tokens = special + alphabet + ["".join(pair) for pair in merges]
    assert len(tokens) == vocab_size
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=special[0], eos_token=special[2], pad_token=special[0]
    )
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )

    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        # Tied or small weights repeat one token under greedy decoding. These vary, so that a mistake changes tokens.
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Qwen3ForCausalLM(config).to(torch.bfloat16)
    policy.save_pretrained(path)
    tokenizer.save_pretrained(path)
