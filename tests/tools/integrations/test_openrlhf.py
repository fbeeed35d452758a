"""OpenRLHF's rollout actor with our scheduler. OpenRLHF itself is in `conformance/openrlhf`; here its actor is a small
one that works as far as ours touches it."""

from __future__ import annotations

import asyncio
import runpy
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_rollout.integrations import openrlhf


class Params(SimpleNamespace):
    """Sampling parameters like vLLM's: equal ones have the same repr."""


class Actor:
    """As OpenRLHF's: an async constructor, and a request per call. The first of four ends as surplus."""

    async def __init__(self, *, model: str, **kwargs: Any) -> None:
        self.engine_kwargs = {"model": model, **kwargs}
        self.asked: list[Params] = []

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        self.asked.append(sampling_params)
        number = len(self.asked)
        await asyncio.sleep(0.001 * number)
        reason = "abort" if number == 1 and getattr(sampling_params, "extra_args", None) else "stop"
        return SimpleNamespace(outputs=[SimpleNamespace(finish_reason=reason)], number=number)


async def make(group_size: int, redundancy: int, **kwargs: Any) -> Any:
    # Ray awaits what an async constructor returns; here nobody does it.
    actor_class = openrlhf.actor_class(Actor, group_size, redundancy)
    actor = actor_class.__new__(actor_class)
    await actor_class.__init__(actor, model="m", **kwargs)
    return actor


def ask(redundancy: int, calls: int, *, media: Any = None, temperature: float = 1.0, **kwargs: Any) -> tuple[Any, list]:
    async def run() -> tuple[Any, list]:
        actor = await make(2, redundancy, **kwargs)
        params = [Params(temperature=temperature, extra_args=None) for _ in range(calls)]
        return actor, await asyncio.gather(*[actor.generate([1, 2], each, media) for each in params])

    return asyncio.run(run())


def test_the_engine_gets_our_scheduler_unless_another_is_asked_for() -> None:
    assert ask(0, 0)[0].engine_kwargs == {"model": "m", "scheduler_cls": openrlhf.SCHEDULER_CLS}
    assert ask(0, 0, scheduler_cls="mine")[0].engine_kwargs["scheduler_cls"] == "mine"


def test_so_many_calls_as_samples_get_spare_candidates_and_finished_responses() -> None:
    actor, outputs = ask(2, 2)
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop", "stop"]
    assert len(actor.asked) == 4
    assert len({params.extra_args["rollout_group_id"] for params in actor.asked}) == 1
    assert {params.extra_args["rollout_num_candidates"] for params in actor.asked} == {4}


@pytest.mark.parametrize("different", [{"redundancy": 0}, {"media": {"image": []}}, {"temperature": 0.0}])
def test_other_requests_run_as_they_would(different: dict[str, Any]) -> None:
    actor, outputs = ask(**{"redundancy": 2, "calls": 2, **different})
    assert len(actor.asked) == len(outputs) == 2
    assert [params.extra_args for params in actor.asked] == [None, None]


def test_a_candidate_that_was_cut_is_truncated_and_one_that_was_given_up_is_stopped() -> None:
    def output(reason: str) -> Any:
        return SimpleNamespace(outputs=[SimpleNamespace(finish_reason=reason)])

    ends = [openrlhf.end_of(output(reason)) for reason in ("stop", "length", "abort", "error")]
    assert ends == ["finished", "truncated", "stopped", "stopped"]


def test_the_program_that_runs_is_openrlhfs_with_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[int, int]] = []
    ran: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(openrlhf, "use_in_actors", lambda *sizes: used.append(sizes))
    monkeypatch.setattr(runpy, "run_module", lambda name, **_: ran.append((name, sys.argv[1:])))
    monkeypatch.setattr(sys, "argv", ["before"])
    theirs = ["--rollout.n_samples_per_prompt", "8", "--actor.model_name_or_path", "m", "--train.async_enable"]
    openrlhf.main(["--rollout_redundancy", "4", *theirs])
    assert used == [(8, 4)]
    assert ran == [("openrlhf.cli.train_ppo_ray", theirs)]
