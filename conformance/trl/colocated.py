"""GRPOTrainer with vLLM in its own process: `colocate` races its groups. Runs in TRL's environment.

    colocated.py stock|ours MODEL FOLDER NUM_STEPS MAX_TOKENS QUESTION...

prints a line of JSON. A step is one question, answered `GROUP_SIZE` times; `ours` has spare candidates in every other
step, none where NUM_STEPS is `STEPS_TO_COMPARE`. Two seams: vLLM's CPU kernels pack weights away, after which TRL's own
synchronization finds none, so that they are kept here; and the engine is float32, as the trainer's model is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from conformance import gain
from conformance.checks import REAL_MODEL, Kit, check

STEPS_TO_COMPARE = 3
TOLERANCE = 1e-4
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
}  # fmt: skip


def run(kit: Kit, way: str, model: str, num_steps: int, max_tokens: int, *questions: str) -> dict[str, Any]:
    arguments = [way, kit.model_path(model), str(kit.folder / way), str(num_steps), str(max_tokens), *questions]
    done = subprocess.run(
        [sys.executable, "-m", "conformance.trl.colocated", *arguments],
        env=os.environ | ENVIRONMENT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


@check("on")
def colocated_steps_are_those_of_stock(kit: Kit) -> dict[str, Any]:
    """colocate(redundancy=0): seeded steps have the rewards that they have without us, and log probabilities are those
    of the weights that TRL has synchronized."""
    asked = (kit.default_model, STEPS_TO_COMPARE, 100, *gain.QUESTIONS[:STEPS_TO_COMPARE])
    stock, ours = run(kit, "stock", *asked), run(kit, "ours", *asked)
    assert (stock["module"], ours["module"]) == ("vllm.entrypoints.llm", "vllm_rollout.adapter.in_process.llm")
    assert ours["rewards"] == stock["rewards"]
    assert max(ours["off_by"]) < TOLERANCE, ours["off_by"]
    assert ours["num_weight_changes"] > 0
    return {"detail": f"{STEPS_TO_COMPARE} steps: rewards {ours['rewards']}; log probabilities within {TOLERANCE:g}"}


@check("on")
def colocated_with_spare_candidates(kit: Kit) -> dict[str, Any]:
    """colocate(redundancy=8): seconds of generation, with and without, in pairs of one question."""
    turns = list(gain.turns())
    questions = [gain.QUESTIONS[pair] for pair, _ in turns]
    told = run(kit, "ours", REAL_MODEL, len(turns), gain.MAX_TOKENS, *questions)
    assert told["num_rows"] == [gain.GROUP_SIZE] * len(turns)
    on, off = (
        [s for s, (_, is_on) in zip(told["generation_s"], turns, strict=True) if is_on == state] for state in (1, 0)
    )
    numbers = gain.gain("generation", on, off)
    return {"detail": f"max_num_seqs {told['max_num_seqs']}; {gain.words(numbers)}", **numbers}


def main() -> None:
    way, model, folder, num_steps, max_tokens, *questions = sys.argv[1:]
    import torch
    import vllm.model_executor.layers.utils as layers
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    from conformance.trl.training import by_variety
    from vllm_rollout.integrations.trl import colocate

    layers.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: setattr(
        layer, "cpu_linear", torch.nn.functional.linear
    )
    vllm_generation.LLM = partial(vllm_generation.LLM, dtype="float32")
    vllm_generation.empty_cache = lambda: None  # it asks for an accelerator
    compares = int(num_steps) == STEPS_TO_COMPARE
    if way == "ours":
        colocate(redundancy=0 if compares else gain.REDUNDANCY, num_generations=gain.GROUP_SIZE)
    settings = {
        "output_dir": folder, "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.2,
        "vllm_max_model_length": 512, "use_cpu": True, "bf16": False, "model_init_kwargs": {"dtype": "float32"},
        "num_generations": gain.GROUP_SIZE, "per_device_train_batch_size": gain.GROUP_SIZE,
        "gradient_accumulation_steps": 1, "max_completion_length": int(max_tokens), "max_steps": int(num_steps),
        "learning_rate": 1e-3 if compares else 1e-6, "logging_steps": 1, "report_to": "none", "save_strategy": "no",
        "seed": 1, "shuffle_dataset": False, "disable_tqdm": True,
    }  # fmt: skip
    trainer = GRPOTrainer(
        model, [by_variety], GRPOConfig(**settings), processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=Dataset.from_list([{"prompt": gain.chat(question)} for question in questions]),
    )  # fmt: skip
    llm, generate = trainer.vllm_generation.llm, trainer.vllm_generation.generate
    turns = [is_on for _, is_on in gain.turns()]
    told: dict[str, list[Any]] = {"generation_s": [], "num_rows": [], "off_by": []}

    def timed(*args: Any, **kwargs: Any) -> Any:
        if way == "ours" and not compares:
            llm.spares = gain.REDUNDANCY if turns[len(told["num_rows"])] else 0
        began = time.monotonic()
        answer = generate(*args, **kwargs)
        told["generation_s"].append(time.monotonic() - began)
        told["num_rows"].append(len(answer[1]))
        told["off_by"].append(off_by(trainer.model, *(each[0] for each in answer[:3])))
        return answer

    trainer.vllm_generation.generate = timed
    trainer.train()
    config, core = llm.llm_engine.vllm_config, llm.llm_engine.engine_core.engine_core
    result = told | {
        "rewards": [logs["reward"] for logs in trainer.state.log_history if "reward" in logs],
        "module": type(llm).__module__,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "num_weight_changes": core.scheduler.weights.num_changes if way == "ours" else None,
    }
    print("RESULT " + json.dumps(result))


def off_by(model: Any, prompt: list[int], completion: list[int], logprobs: list[list[float]]) -> float:
    """How far these log probabilities are from the trainer's own, at most."""
    import torch

    tokens = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(prompt) - 1 : -1].float()
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None]).flatten()
    return (expected - torch.tensor([each[0] for each in logprobs])).abs().max().item()


if __name__ == "__main__":
    Path(sys.argv[3]).mkdir(parents=True, exist_ok=True)
    main()
