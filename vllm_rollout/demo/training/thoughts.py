"""What a policy says to one problem, before it was trained and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

PROBLEM = "? a 4 b 7 c 3 d 9 e 2 f 8 g 6 :"
RIGHT = "9"
SEED = 0
MAX_TOKENS = 400


class Thought(NamedTuple):
    text: str
    num_tokens: int
    is_right: bool


def thoughts(model: Path, weights: Path) -> tuple[Thought, Thought]:
    """Before, with the model as it is, and after, with other weights."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = AutoModelForCausalLM.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    before = _thought(policy, tokenizer)
    policy.load_state_dict(load_file(weights / "model.safetensors"))
    return before, _thought(policy, tokenizer)


def _thought(policy: Any, tokenizer: Any) -> Thought:
    import torch

    torch.manual_seed(SEED)
    asked = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode(PROBLEM, add_special_tokens=False)]])
    said = policy.generate(asked, do_sample=True, max_new_tokens=MAX_TOKENS, top_k=0, pad_token_id=0)[0][
        asked.shape[1] :
    ]
    text = tokenizer.decode(said, skip_special_tokens=True)
    return Thought(text, len(said), text.split()[-2:] == ["answer", RIGHT])
