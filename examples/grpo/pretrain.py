"""Trains a Llama of 0.9 M parameters from scratch on thoughts with mistakes: a policy that GRPO can improve.

    python -m examples.grpo.pretrain models --style careful      # models/careful, some five minutes of one core

Training begins with clear thoughts, the same for all styles, and goes on with thoughts of the style (`task.py`).
A model that exists is not trained again.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from examples.grpo.model import load, new_model, new_tokenizer, prompt_ids, save
from examples.grpo.task import CLEAR, LEAST_STEPS, MOST_STEPS, STYLES, Style, chain, thought
from vllm_rollout.training.logprobs import answer_logprobs, micro_batches

BATCH_TOKENS, MICRO_TOKENS = 1024, 4096
CLEAR_STEPS, STYLE_STEPS = 350, 600
LR, MUON_LR = 3e-3, 5e-3


def train(model: Any, tokenizer: Any, style: Style, name: str, seed: int, steps: int) -> None:
    """Next-token prediction on thoughts, BATCH_TOKENS per step. The learning rate rises, then falls to 0."""
    chance = random.Random(f"{seed}-{name}")
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "layers" not in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for step in (bar := tqdm(range(steps), name, mininterval=5)):
        share = step / steps
        rising = LEAST_STEPS + (MOST_STEPS - LEAST_STEPS) * min(1, 1.5 * share)
        prompts, answers = [], []
        while sum(map(len, answers)) < BATCH_TOKENS:
            problem = chain(chance, "", (LEAST_STEPS, round(rising) if style is CLEAR else MOST_STEPS))
            prompts.append(prompt_ids(tokenizer, problem))
            answers.append(tokenizer.convert_tokens_to_ids(thought(problem, chance, style)))
        count, total = sum(map(len, answers)), 0.0
        for rows in micro_batches([len(p) + len(a) for p, a in zip(prompts, answers, strict=True)], MICRO_TOKENS):
            logprobs, mask = answer_logprobs(model, [prompts[i] for i in rows], [answers[i] for i in rows])
            loss = -(logprobs * mask).sum() / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rate in zip(optimizers, (MUON_LR, LR), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1, (step + 1) / 30) * min(1.0, 1.5 * (1 - share))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        bar.set_postfix_str(f"loss {total:.2f}", refresh=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="the folder of the models, with a subfolder for each")
    parser.add_argument("--style", choices=[*STYLES, "all"], default="careful", help="default: careful")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and thoughts; default: 0")
    args = parser.parse_args()
    torch.set_num_threads(1)  # more are slower on a machine that is busy
    clear = args.cache / f"clear-{args.seed}"
    for name in list(STYLES) if args.style == "all" else [args.style]:
        if (args.cache / name).exists():
            print(f"{args.cache / name} is there")
            continue
        if not clear.exists():
            model, tokenizer = new_model(args.seed), new_tokenizer()
            train(model, tokenizer, CLEAR, "clear", args.seed, CLEAR_STEPS)
            save(model, tokenizer, clear)
        model, tokenizer = load(clear)
        train(model, tokenizer, STYLES[name], name, args.seed, STYLE_STEPS)
        save(model, tokenizer, args.cache / name)
        print(f"{args.cache / name} is made: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")


if __name__ == "__main__":
    main()
