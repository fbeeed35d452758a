"""Environment variables for engines that others build, and the requests that race by them."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import CompletionOutput, RequestOutput

from vllm_rollout.adapter.names import SCHEDULER_CLS, WORKER_CLS
from vllm_rollout.adapter.options import ServeOptions
from vllm_rollout.parts.emulation import options as emulation
from vllm_rollout.parts.in_process.api import environment
from vllm_rollout.parts.in_process.api.environment import Wanted, created, taken_over, too_little_memory
from vllm_rollout.parts.in_process.api.runs import rows_of, runs_of, with_spares
from vllm_rollout.parts.in_process.plugin import take_engines

ASKED = {"VLLM_ROLLOUT": "scheduler,worker"}
SAMPLED = SamplingParams(temperature=1.0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(environment, "_let_become_ours", lambda: None)  # classes of this process stay as they are
    for name, value in (ASKED | {"VLLM_ROLLOUT_REDUNDANCY": "8"}).items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"VLLM_ROLLOUT": "1"}, "VLLM_ROLLOUT must be 'scheduler,worker', got '1'. Unset it"),
        ({"VLLM_ROLLOUT": "scheduler"}, "got 'scheduler'"),
        ({"VLLM_ROLLOUT_REDUNDANCY": "-1"}, "VLLM_ROLLOUT_REDUNDANCY must be a number of at least 0, got '-1'"),
        ({"VLLM_ROLLOUT_REDUNDANCY": "auto"}, "got 'auto'"),
        ({"VLLM_ROLLOUT_GROUP_SIZE": "1"}, "VLLM_ROLLOUT_GROUP_SIZE must be a number of at least 2, got '1'"),
    ],
)
def test_what_the_environment_cannot_mean_is_named(more, said):
    with pytest.raises(ValueError, match=said):
        Wanted.of(ASKED | more)


def test_without_the_variable_an_engine_stays_as_it_was_asked_for(monkeypatch, tiny_model):
    monkeypatch.delenv("VLLM_ROLLOUT", raising=False)
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda engine_args: engine_args)
    take_engines(False)
    theirs = EngineArgs(model=tiny_model, max_num_seqs=20)
    assert theirs.create_engine_config() is theirs
    assert (theirs.scheduler_cls, theirs.max_num_seqs) == (EngineArgs.scheduler_cls, 20)


def test_an_engine_has_our_classes_and_places_for_spare_candidates(asked, tiny_model):
    ours = taken_over(EngineArgs(model=tiny_model, max_num_seqs=20))
    assert (ours.scheduler_cls, ours.worker_cls) == (SCHEDULER_CLS, WORKER_CLS)
    assert ours.max_num_seqs == 20 + 3 * 8
    asked.setenv("VLLM_ROLLOUT_GROUP_SIZE", "20")
    assert taken_over(EngineArgs(model=tiny_model, max_num_seqs=20)).max_num_seqs == 28
    assert taken_over(EngineArgs(model=tiny_model, max_num_seqs=20, max_num_batched_tokens=24)).max_num_seqs == 24


def test_an_engine_may_be_an_emulated_device(asked, tiny_model, tmp_path):
    device = tmp_path / "device.json"
    device.write_text('{"step": {"ms": 3}}')
    asked.setenv("VLLM_ROLLOUT_EMULATE", str(device))
    ours = taken_over(EngineArgs(model=tiny_model, max_num_seqs=16, distributed_executor_backend="external_launcher"))
    assert (ours.worker_cls, ours.distributed_executor_backend) == (emulation.WORKER_CLS, emulation.EXECUTOR_CLS)
    assert ours.max_num_seqs == 32
    assert emulation.EmulationOptions.of(ours) == emulation.EmulationOptions(str(device))
    assert not ServeOptions.of(ours).has_model
    asked.setenv("VLLM_ROLLOUT_STRICT", "1")
    device.write_text('{"steps": 3}')
    with pytest.raises(ValueError, match="steps"):
        taken_over(EngineArgs(model=tiny_model))


@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_model_that_does_not_generate_is_left_to_vllm(asked, tiny_model, caplog, strict):
    asked.setenv("VLLM_ROLLOUT_STRICT", strict)
    logging.getLogger("vllm").propagate = True
    args = EngineArgs(model=tiny_model)

    def create(args: EngineArgs, runner: str) -> SimpleNamespace:
        places = SimpleNamespace(max_num_seqs=args.max_num_seqs)
        return SimpleNamespace(args=args, model_config=SimpleNamespace(runner_type=runner), scheduler_config=places)

    assert created(create, args, "generate").args.scheduler_cls == SCHEDULER_CLS
    with caplog.at_level("WARNING", logger="vllm"):
        if strict == "1":
            with pytest.raises(ValueError, match=r"its runner is 'pooling'.*Unset VLLM_ROLLOUT"):
                created(create, args, "pooling")
        else:
            assert created(create, args, "pooling").args is args
            assert "this engine stays vLLM's own, because its runner is 'pooling'" in caplog.text


def test_settings_that_vllm_refuses_with_ours_are_tried_without(asked, tiny_model, caplog):
    logging.getLogger("vllm").propagate = True
    args = EngineArgs(model=tiny_model)

    def create(args: EngineArgs) -> SimpleNamespace:
        if args.scheduler_cls == SCHEDULER_CLS:
            raise ValueError("no room")
        return SimpleNamespace(args=args)

    with caplog.at_level("WARNING", logger="vllm"):
        assert created(create, args).args is args
    assert "this engine stays vLLM's own, because no room" in caplog.text
    asked.setenv("VLLM_ROLLOUT_STRICT", "1")
    with pytest.raises(ValueError, match="no room"):
        created(create, args)


@pytest.mark.parametrize(
    ("num_blocks", "spares", "is_said"), [(63, 4, True), (64, 4, False), (1, 0, False), (None, 4, False)]
)
def test_spare_candidates_without_memory_are_said(num_blocks, spares, is_said):
    cache = SimpleNamespace(num_gpu_blocks=num_blocks, block_size=16)
    config = SimpleNamespace(cache_config=cache, model_config=SimpleNamespace(max_model_len=128))
    said = too_little_memory(config, spares, 4)
    assert (said is not None) is is_said
    if said:
        assert "holds 1008 tokens, and 4 candidates with 4 spare ones of max_model_len (128) need 1024" in said


def test_what_cannot_be_taken_over_is_left_to_vllm_with_a_warning_or_strictly_refused(asked, tiny_model, caplog):
    args = EngineArgs(model=tiny_model, scheduler_cls="somebody.Scheduler")
    logging.getLogger("vllm").propagate = True
    with caplog.at_level("WARNING", logger="vllm"):
        assert taken_over(args) is args
    assert "this engine stays vLLM's own, because scheduler_cls must be" in caplog.text
    asked.setenv("VLLM_ROLLOUT_STRICT", "1")
    with pytest.raises(ValueError, match="scheduler_cls must be"):
        taken_over(args)


IMAGE = object()


def image(seed: int, dtype: Any = np.uint8, of: Callable[[np.ndarray], Any] = lambda pixels: pixels) -> dict[str, Any]:
    """A prompt with an image, decoded anew."""
    pixels = np.random.default_rng(seed).integers(0, 255, (4, 4, 3)).astype(dtype)
    return {"prompt_token_ids": [1], "multi_modal_data": {"image": [of(pixels)]}}


@pytest.mark.parametrize(
    ("prompts", "sizes"),
    [
        (["a", "a", "b", "b"], [2, 2]),
        (["a", "b", "a"], None),
        (["a", "a", "a", "a", "a"], [4, 1]),
        ([{"prompt_token_ids": [1]}, {"prompt_token_ids": [1]}], [2]),
        ([{"prompt_token_ids": [1]}, {"prompt_token_ids": [2]}], None),
        ([{"prompt_token_ids": [1], "multi_modal_data": IMAGE}] * 2, [2]),
        ([{"prompt_token_ids": [1], "multi_modal_data": object()} for _ in range(2)], None),
        ([image(0), image(0), image(1), image(1)], [2, 2]),
        ([image(0), image(1)], None),
        ([image(0), image(0, dtype=np.int32)], None),
        ([image(0, of=torch.from_numpy), image(0, of=torch.from_numpy)], [2]),
        ([image(0, of=torch.from_numpy), image(0)], None),
        ([image(0, of=torch.from_numpy), image(0, dtype=np.int32, of=torch.from_numpy)], None),
        ([{"prompt_token_ids": [1]}, {"prompt_token_ids": [1], "multi_modal_data": IMAGE}], None),
        ([[1, 2], [1, 2], "a"], [2, 1]),
        ("aa", None),
    ],
)
def test_equal_prompts_in_a_row_are_a_group(prompts, sizes):
    runs = runs_of(prompts, SAMPLED, 4)
    assert (runs and [run.num for run in runs]) == sizes
    if runs is not None:
        assert str([run.prompt for run in runs for _ in range(run.num)]) == str(prompts)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(n=2),
        SamplingParams(extra_args={"rollout_redundancy": 0}),
        [SAMPLED, SamplingParams(temperature=1.0, max_tokens=7)],
        [SamplingParams(temperature=0.0)] * 2,
        [SAMPLED],
        [SAMPLED, None],
        None,
    ],
)
def test_what_is_alike_or_has_been_said_is_left_as_it_is(params):
    assert runs_of(["a", "a"], params, None) is None


def test_each_prompt_may_have_parameters_of_its_own():
    short = SamplingParams(temperature=1.0, max_tokens=7)
    params = [SAMPLED, SamplingParams(temperature=1.0), short, SamplingParams(seed=1), SamplingParams(seed=1)]
    runs = runs_of(["a"] * 5, params, None)
    assert [(run.num, run.params) for run in runs] == [(2, SAMPLED), (1, short), (1, params[3]), (1, params[4])]
    assert (runs[0].of_all.n, params[1].n, runs[1].of_all) == (2, 1, short)


def test_whole_groups_have_spares_and_nobody_elses_parameters_change():
    params = SamplingParams(n=4, temperature=1.0, extra_args={"theirs": 1})
    assert with_spares(params, 8, None, 64).extra_args == {"theirs": 1, "rollout_redundancy": 8}
    assert with_spares(params, 8, 4, 64).extra_args == {"theirs": 1, "rollout_redundancy": 8}
    assert params.extra_args == {"theirs": 1}
    said = SamplingParams(n=4, extra_args={"rollout_redundancy": 0})
    for same in (SAMPLED, said):
        assert with_spares(same, 8, None, 64) is same
    assert with_spares(params, 8, 16, 64) is params, "a part of a group"


def test_a_list_of_token_ids_is_one_prompt_as_in_vllm():
    assert runs_of([7, 7, 7], SAMPLED, None) is None


def test_groups_without_places_for_spares_and_seeded_ones_are_answered_as_stock_does():
    assert with_spares(SamplingParams(n=8), 8, None, 16).extra_args == {"rollout_redundancy": 8}
    for params in (SamplingParams(n=9), SamplingParams(n=8, seed=1)):
        assert with_spares(params, 8, None, 16) is params


def test_an_engine_that_names_our_scheduler_has_only_its_device_from_the_environment(asked, tiny_model, tmp_path):
    args = EngineArgs(model=tiny_model, scheduler_cls=SCHEDULER_CLS, max_num_seqs=16)
    assert created(lambda given: given, args) is args
    device = tmp_path / "device.json"
    device.write_text('{"step": {"ms": 3}}')
    asked.setenv("VLLM_ROLLOUT_EMULATE", str(device))
    ours = created(lambda given: given, args)
    assert (ours.worker_cls, ours.max_num_seqs) == (emulation.WORKER_CLS, 16)


def test_a_subclass_begins_its_own_method_once(monkeypatch: pytest.MonkeyPatch):
    heard: list[str] = []

    class Ours:
        def generate(self, prompt: str) -> str:
            heard.append(f"ours {prompt}")
            return prompt

    class Stock:
        def generate(self, prompt: str) -> str:
            heard.append(prompt)
            return prompt

    class Theirs(Stock):
        def generate(self, prompt: str) -> str:
            return super().generate(f"<sys>{prompt}")

    monkeypatch.setattr(environment, "become_ours", lambda llm: Ours())
    monkeypatch.setattr(environment.vllm, "LLM", Stock)
    Stock.generate = environment._of_ours("generate", Stock.generate)  # type: ignore[method-assign]
    Theirs().generate("a")
    Stock().generate("b")
    assert heard == ["<sys>a", "ours b"]


def test_completions_become_rows():
    completions = [CompletionOutput(number, str(number), [number], None, None) for number in range(3)]
    rows = rows_of([RequestOutput("r", "p", [1], None, completions, True)])
    assert [(row.request_id, row.prompt, [(each.index, each.text) for each in row.outputs]) for row in rows] == [
        ("r", "p", [(0, str(number))]) for number in range(3)
    ]
    assert [each.index for each in completions] == [0, 1, 2]


def test_a_server_that_a_trainer_starts_has_nothing_of_the_trainers_environment(asked):
    code = """
import os
from unittest import mock
from vllm_rollout import cli
from vllm_rollout.kernel.api import serve
with mock.patch.object(serve, "main", lambda args: print("VLLM_ROLLOUT" in os.environ)):
    cli.app(["serve", "m"], standalone_mode=False)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert ended.stdout.splitlines()[-1] == "False"
