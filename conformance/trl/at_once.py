"""A step of GRPOTrainer without its backward pass: generation for 16 prompts at once, and rewards. `gain.AtOnce`.

    at_once.py colocate|server MODEL FOLDER [URL]

prints a line of JSON. The engine is an emulated device without weights, so no weights are synchronized. The reward
function takes `gain.GRADE_S` seconds per answer. TRL calls it once for all answers of a step, and grades them one after
another. The engine calls it for each answer when the answer ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance import gain
from conformance.checks import Kit, check
from conformance.trl.on_cpu import ON_CPU, result_of
from conformance.trl.training import FLAGS, by_variety

ARMS = ("plain", "spares", "rewarded")
REWARD = "conformance.trl.at_once:graded"


def graded(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    rewards = []
    for ids in completion_ids:
        time.sleep(gain.GRADE_S)
        rewards.append(len(set(ids)) / len(ids))
    return rewards


@check("on")
def gain_of_many_prompts(kit: Kit) -> dict[str, Any]:
    """As many prompts at once as a step has, at our server, on an emulated device."""
    flags = [
        *FLAGS, "--rollout-emulate", str(gain.DEVICE), "--max-num-seqs", str(gain.AT_ONCE_PLACES), "--max-model-len",
        str(gain.AT_ONCE_LENGTH), "--rollout-reward", f"graded={REWARD}",
    ]  # fmt: skip
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    server = kit.server(flags=flags, environment={"PYTHONPATH": path})
    return run(kit, "server", server.url)


@check("on")
def colocated_gain_of_many_prompts(kit: Kit) -> dict[str, Any]:
    """As many prompts at once as a step has, with the engine in the trainer's process."""
    return run(kit, "colocate")


def run(kit: Kit, way: str, *url: str) -> dict[str, Any]:
    arguments = (way, kit.model_path(), str(kit.folder / way), *url)
    return result_of("conformance.trl.at_once", *arguments, VLLM_ROLLOUT_EMULATE=str(gain.DEVICE))


def main() -> None:
    way, model, folder, *url = sys.argv[1:]
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    from vllm_rollout.integrations.trl import TRLRollouts, colocate
    from vllm_rollout.integrations.trl_colocated import ColocatedRollouts
    from vllm_rollout.parts.in_process.api.environment import become_ours

    vllm_generation.empty_cache = lambda: None  # it asks for an accelerator
    vllm_generation.VLLMClient.init_communicator = lambda *_, **__: None
    vllm_generation.VLLMGeneration.sync_weights = lambda self: None
    num_rows = len(gain.AT_ONCE_PROMPTS) * gain.GROUP_SIZE
    settings = {
        **ON_CPU, "output_dir": folder, "use_vllm": True, "vllm_mode": way, "num_generations": gain.GROUP_SIZE,
        "per_device_train_batch_size": num_rows, "max_completion_length": gain.AT_ONCE_TOKENS,
        "vllm_max_model_length": gain.AT_ONCE_LENGTH, "report_to": "none",
    }  # fmt: skip
    if url:
        settings["vllm_server_base_url"] = url[0]
    else:
        colocate(redundancy=gain.REDUNDANCY)
    rows = [{"prompt": f"What is {number} + 7?"} for number in range(len(gain.AT_ONCE_PROMPTS))]
    trainer = GRPOTrainer(
        model, [graded], GRPOConfig(**settings), processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=Dataset.from_list(rows),
    )  # fmt: skip
    trainer.model.train()
    inputs = [row for row in rows for _ in range(gain.GROUP_SIZE)]
    prompts = [row["prompt"] for row in inputs]
    generation = trainer.vllm_generation
    if url:
        rollouts = TRLRollouts(url[0], redundancy=gain.REDUNDANCY, reward="graded")
    else:
        llm = become_ours(generation.llm, rewards={"graded": graded})
        rollouts = ColocatedRollouts(llm, redundancy=gain.REDUNDANCY, reward="graded")
    times = gain.AtOnce()
    for arm in times.turns(ARMS):
        spares = 0 if arm == "plain" else gain.REDUNDANCY
        if url:
            generation.generation_kwargs = {"vllm_xargs": {"rollout_redundancy": spares}} if spares else {}
        else:
            llm.spares = spares
        is_rewarded = arm == "rewarded"
        trainer.rollout_func, trainer.reward_funcs = (rollouts, [rollouts.graded]) if is_rewarded else (None, [graded])
        with times.timed("step", arm):
            with times.timed("generation", arm):
                _, completion_ids, _, completions, _, more, *_ = trainer._generate(prompts)
            columns = [{**row, **{name: more[name][place] for name in more}} for place, row in enumerate(inputs)]
            rewards = trainer._calculate_rewards(columns, prompts, completions, completion_ids)
        assert len(completion_ids) == num_rows
        expected = torch.tensor(by_variety(completion_ids))
        assert torch.allclose(rewards.flatten(), expected), (arm, rewards, expected)
    print("RESULT " + json.dumps(times.result()))


if __name__ == "__main__":
    main()
