"""GRPOTrainer with vLLM in its own process: `colocate` makes its groups race. Runs in TRL's environment.

    colocated.py stock|ours|graded|refused|WAY MODEL FOLDER NUM_STEPS MAX_TOKENS QUESTION...

prints a line of JSON. A step is one question, answered `GROUP_SIZE` times. `ours` has spare candidates in every other
step, and none if NUM_STEPS is `STEPS_TO_COMPARE`. The others always have them. WAY: one of `CONFIGURED`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance import gain
from conformance.checks import REAL_MODEL, Kit, check
from conformance.trl.on_cpu import ON_CPU, SMALL, prepare, result_of

STEPS_TO_COMPARE = 3
TOLERANCE = 1e-4
OUR_MODULE = "vllm_rollout.parts.in_process.api.llm"
REGEX = r"[a-z]{3,9} [0-9]{1,5}"
CONFIGURED: dict[str, dict[str, Any]] = {
    "lora": {},
    "regex": {"vllm_structured_outputs_regex": REGEX},
    "kwargs": {"top_p": 0.9, "top_k": 10, "min_p": 0.01, "repetition_penalty": 1.1},
    "importance": {"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 5.0},
}
"""Settings of trainers, by way."""
RESTRICTED = ("regex", "kwargs")
"""Ways with fewer tokens in the engine's log probabilities than in the trainer's. TRL may drop all such samples."""


def run(kit: Kit, way: str, model: str, num_steps: int, max_tokens: int, *questions: str) -> dict[str, Any]:
    arguments = (way, kit.model_path(model), str(kit.folder / way), str(num_steps), str(max_tokens), *questions)
    return result_of("conformance.trl.colocated", *arguments)


@check("on")
def colocated_steps_are_those_of_stock(kit: Kit) -> dict[str, Any]:
    """colocate(redundancy=0): seeded steps have the rewards that they have with TRL alone.

    Log probabilities are those of the weights that TRL has synchronized.
    """
    asked = (kit.default_model, STEPS_TO_COMPARE, 100, *gain.QUESTIONS[:STEPS_TO_COMPARE])
    stock, ours = run(kit, "stock", *asked), run(kit, "ours", *asked)
    assert (stock["module"], ours["module"]) == ("vllm.entrypoints.llm", OUR_MODULE)
    assert ours["rewards"] == stock["rewards"]
    assert max(ours["off_by"]) < TOLERANCE, ours["off_by"]
    assert ours["num_weight_changes"] > 0
    return {"detail": f"{STEPS_TO_COMPARE} steps: rewards {ours['rewards']}; log probabilities within {TOLERANCE:g}"}


@check("on")
def colocated_with_spare_candidates(kit: Kit) -> dict[str, Any]:
    """colocate(redundancy=8): seconds of generation with and without, in pairs of one question."""
    turns = list(gain.turns())
    questions = [gain.QUESTIONS[pair] for pair, _ in turns]
    told = run(kit, "ours", REAL_MODEL, len(turns), gain.MAX_TOKENS, *questions)
    assert told["num_rows"] == [gain.GROUP_SIZE] * len(turns)
    on, off = (
        [s for s, (_, is_on) in zip(told["generation_s"], turns, strict=True) if is_on == state] for state in (1, 0)
    )
    numbers = gain.gain("generation", on, off)
    return {"detail": f"max_num_seqs {told['max_num_seqs']}; {gain.words(numbers)}", **numbers}


@check("on")
def colocated_as_trl_tests_its_own(kit: Kit) -> dict[str, Any]:
    """With spare candidates, the settings of TRL's own tests of training with vLLM train, and change their parameters.

    These are LoRA with whole modules, a regular expression, further sampling parameters, and importance sampling.
    """
    for way in CONFIGURED:
        told = run(kit, way, kit.default_model, STEPS_TO_COMPARE, 40, *gain.QUESTIONS[:STEPS_TO_COMPARE])
        assert told["num_rows"] == [gain.GROUP_SIZE] * STEPS_TO_COMPARE, (way, told)
        assert told["num_candidates"] == STEPS_TO_COMPARE * (gain.GROUP_SIZE + gain.REDUNDANCY), (way, told)
        assert way in RESTRICTED or told["changed"] == told["to_change"] > 0, (way, told)
        assert way != "regex" or all(map(re.compile(REGEX).fullmatch, told["texts"])), told["texts"]
        assert way in RESTRICTED or max(told["off_by"]) < TOLERANCE, (way, told["off_by"])
    return {"detail": f"{', '.join(CONFIGURED)}: {STEPS_TO_COMPARE} steps each, groups raced, parameters changed"}


@check("on")
def colocated_rewards_are_graded_while_others_run(kit: Kit) -> dict[str, Any]:
    """colocate(reward=…): another process calls the reward function, and TRL trains on its rewards."""
    told = run(kit, "graded", kit.default_model, STEPS_TO_COMPARE, 100, *gain.QUESTIONS[:STEPS_TO_COMPARE])
    assert told["num_rows"] == [gain.GROUP_SIZE] * STEPS_TO_COMPARE
    assert told["rewards"] == told["expected"], told
    assert len(set(told["rewards"])) > 1
    assert max(told["off_by"]) < TOLERANCE, told["off_by"]
    return {"detail": f"{STEPS_TO_COMPARE} steps: mean rewards {told['rewards']}, no call in the trainer's process"}


@check("on")
def colocated_what_cannot_race_is_refused(kit: Kit) -> dict[str, Any]:
    """A trainer with tools, or without the reward function, is refused with a ValueError before it is built."""
    refused = run(kit, "refused", kit.default_model, 1, 40, gain.QUESTIONS[0])["refused"]
    assert "tools and environment_factory must be None" in refused["tools"]
    assert "reward_funcs must have the reward" in refused["reward"]
    return {"detail": "; ".join(refused.values())}


def a_tool(number: int) -> int:
    """Doubles a number.

    Args:
        number: the number to double.
    """
    return 2 * number


def elsewhere(completion_ids: list[list[int]], trainer_pid: list[int], **_: Any) -> list[float]:
    """`by_variety`, which must not be called in the trainer's process."""
    assert os.getpid() != trainer_pid[0], "called in the trainer's process"
    return [len(set(ids)) / len(ids) for ids in completion_ids]


def main() -> None:
    way, model, folder, num_steps, max_tokens, *questions = sys.argv[1:]
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from conformance.trl.training import by_variety
    from vllm_rollout.integrations.trl import colocate

    prepare()
    compares = int(num_steps) == STEPS_TO_COMPARE
    is_timed = way == "ours" and not compares
    reward = elsewhere if way == "graded" else by_variety
    if way != "stock":
        redundancy = 0 if way == "ours" and compares else gain.REDUNDANCY
        colocate(redundancy=redundancy, reward=elsewhere if way in ("graded", "refused") else None)
    settings = {
        **SMALL, **ON_CPU, "output_dir": folder, "use_vllm": True, "vllm_mode": "colocate",
        "num_generations": gain.GROUP_SIZE, "per_device_train_batch_size": gain.GROUP_SIZE,
        "gradient_accumulation_steps": 1, "max_completion_length": int(max_tokens), "max_steps": int(num_steps),
        "learning_rate": 1e-3 if compares else 1e-6, "logging_steps": 1, "report_to": "none",
        "seed": 1, "shuffle_dataset": False, "disable_tqdm": True, **CONFIGURED.get(way, {}),
    }  # fmt: skip
    rows = [{"prompt": gain.chat(question), "trainer_pid": os.getpid()} for question in questions]
    tokenizer = AutoTokenizer.from_pretrained(model)

    def trainer_of(reward: Any, **given: Any) -> GRPOTrainer:
        data = Dataset.from_list(rows)
        return GRPOTrainer(
            model, [reward], GRPOConfig(**settings), processing_class=tokenizer, train_dataset=data, **given
        )

    if way == "refused":
        asked = {
            "tools": lambda: trainer_of(elsewhere, tools=[a_tool]),
            "reward": lambda: trainer_of(by_variety),
        }
        print("RESULT " + json.dumps({"refused": {name: refusal(build) for name, build in asked.items()}}))
        return
    peft = {}
    if way == "lora":
        from peft import LoraConfig

        peft["peft_config"] = LoraConfig(target_modules="all-linear", modules_to_save=["embed_tokens", "lm_head"])
    trainer = trainer_of(reward, **peft)
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    llm = trainer.vllm_generation.llm
    core = llm.llm_engine.engine_core.engine_core
    add, num_added = core.scheduler.add_request, 0

    def counted(*args: Any) -> None:
        nonlocal num_added
        num_added += 1
        add(*args)

    core.scheduler.add_request = counted
    turns = [is_on for _, is_on in gain.turns()]
    told: dict[str, list[Any]] = {
        "generation_s": [], "num_rows": [], "off_by": [], "texts": [], "expected": []
    }  # fmt: skip
    generate = trainer._generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        if is_timed:
            llm.spares = gain.REDUNDANCY if turns[len(told["num_rows"])] else 0
        began = time.monotonic()
        answer = generate(*args, **kwargs)
        told["generation_s"].append(time.monotonic() - began)
        prompt_ids, completion_ids, logprobs = answer[0], answer[1], answer[4]
        told["num_rows"].append(len(completion_ids))
        told["texts"] += tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        told["expected"].append(torch.tensor(by_variety(completion_ids)).mean().item())
        told["off_by"].append(off_by(trainer.model, prompt_ids[0], completion_ids[0], logprobs[0]))
        return answer

    trainer._generate = timed
    trainer.train()
    config = llm.llm_engine.vllm_config
    to_change = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    result = told | {
        "rewards": [logs["reward"] for logs in trainer.state.log_history if "reward" in logs],
        "module": type(llm).__module__,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "num_weight_changes": core.scheduler.weights.num_changes if way != "stock" else None,
        "num_candidates": num_added,
        "to_change": len(to_change),
        "changed": sum(not torch.equal(before[name], trainer.model.get_parameter(name)) for name in to_change),
    }
    print("RESULT " + json.dumps(result))


def refusal(build: Callable[[], object]) -> str:
    """The message of a refused trainer. Raises: AssertionError if the trainer is built."""
    try:
        build()
    except ValueError as error:
        return str(error)
    raise AssertionError("it was built")


def off_by(model: Any, prompt: list[int], completion: list[int], logprobs: list[float]) -> float:
    """Largest difference of these log probabilities from the trainer's own, in nats."""
    import torch

    tokens = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(prompt) - 1 : -1].float()
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None]).flatten()
    return (expected - torch.tensor(logprobs)).abs().max().item()


if __name__ == "__main__":
    Path(sys.argv[3]).mkdir(parents=True, exist_ok=True)
    main()
