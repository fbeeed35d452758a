"""AReaL's asynchronous training at our server, whose weights change while rollouts run.

Its staleness manager and RLVRWorkflow ask for batches (`prepare_batch`), and its weights go by disk, with the calls of
`PPOTrainer.train` and `FSDPEngine._update_weights_from_disk` in their order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from areal.api import ModelRequest, WeightUpdateMeta
from areal.api.cli_args import GenerationHyperparameters, NameResolveConfig
from areal.engine.vllm_remote import RemotevLLMEngine
from areal.utils import name_resolve, names
from areal.workflow.rlvr import RLVRWorkflow
from torchdata.stateful_dataloader import StatefulDataLoader

from conformance.asynchronous import EXPECTED_GAP
from conformance.checks import CAP

BATCH, GROUP_SIZE = 2, 4
STOPS = [*range(3, 512, 32)]
PROBE = [*range(20, 220)]


def reward(*args: Any, **kwargs: Any) -> float:
    return 1.0


def token_ids(row: dict[str, Any], *args: Any) -> list[int]:
    return row["input_ids"]


def workflow(tokenizer: Any) -> RLVRWorkflow:
    settings = GenerationHyperparameters(max_new_tokens=CAP, min_new_tokens=0, max_tokens=2000, stop_token_ids=STOPS)
    return RLVRWorkflow(reward, settings, tokenizer, get_input_ids_fn=token_ids, data_extract_prompt_fn=dict)


def rows(num: int) -> StatefulDataLoader:
    data = [{"input_ids": [3 + number, *range(20, 90)]} for number in range(num)]
    return StatefulDataLoader(data, batch_size=BATCH, collate_fn=list)


def update(areal: RemotevLLMEngine, experiment: tuple[str, str], folder: Path, version: int) -> None:
    areal.pause()
    areal.pause_generation()
    meta = WeightUpdateMeta(type="disk", path=str(folder), version=version, clear_checkpoint_after_load=False)
    loaded = areal.update_weights_from_disk(meta)
    name_resolve.add(names.update_weights_from_disk(*experiment, areal.get_version()), str(time.time()))
    loaded.result()
    areal.continue_generation()
    areal.set_version(version)
    areal.resume()


def train(
    areal: RemotevLLMEngine, experiment: tuple[str, str], tokenizer: Any, url: str, folders: Sequence[Path], root: Path
) -> list[dict[str, Any]]:
    """A batch for each version of the weights. Returns its trajectories."""
    name_resolve.reconfigure(NameResolveConfig(nfs_record_root=str(root)))
    found, loader, its = [], rows(2 * len(folders) * BATCH), workflow(tokenizer)
    for version, folder in enumerate(folders, start=1):
        update(areal, experiment, folder, version)
        probe(areal, url)
        found += areal.prepare_batch(loader, its, group_size=GROUP_SIZE)
    return found


def probe(areal: RemotevLLMEngine, url: str) -> None:
    """Assert that AReaL's requests read KV of the newest weights only: one with a new salt has nothing to read."""
    settings = GenerationHyperparameters(greedy=True, max_new_tokens=4, max_tokens=2000, ignore_eos=True)
    answers = [asyncio.run(areal.agenerate(ModelRequest(input_ids=PROBE, gconfig=settings))) for _ in range(2)]
    body = {"prompt": PROBE, "max_tokens": 4, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    body |= {"cache_salt": f"new {time.time()}", "return_tokens_as_token_ids": True}
    fresh = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()["choices"][0]
    for each in answers:
        assert [f"token_id:{token}" for token in each.output_tokens] == fresh["logprobs"]["tokens"]
        pairs = zip(each.output_logprobs, fresh["logprobs"]["token_logprobs"], strict=True)
        assert max(abs(a - b) for a, b in pairs) < EXPECTED_GAP
