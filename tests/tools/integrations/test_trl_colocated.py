"""`colocate`: what it asks of engines that are built later, and of GRPOTrainers. TRL is not here, but its class is."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_rollout.integrations.trl import colocate

NAMES = ("VLLM_ROLLOUT", "VLLM_ROLLOUT_REDUNDANCY", "VLLM_ROLLOUT_GROUP_SIZE")


class GRPOTrainer:
    """TRL's, as far as its arguments go."""

    def __init__(
        self, model: str, reward_funcs: Any = None, args: Any = None, tools: Any = None, rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:  # fmt: skip
        self.environment = environment()
        self.rollout_func = rollout_func


class OnesOwn(GRPOTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("m", *args, **kwargs)


@pytest.fixture(autouse=True)
def _trl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    trl = ModuleType("trl")
    trl.GRPOTrainer = GRPOTrainer
    monkeypatch.setitem(sys.modules, "trl", trl)
    for name in ("VLLM_PLUGINS", *NAMES):
        monkeypatch.delenv(name, raising=False)
    before = GRPOTrainer.__init__
    yield
    GRPOTrainer.__init__ = before


def environment() -> list[str | None]:
    return [os.environ.get(name) for name in NAMES]


def config(**more: Any) -> SimpleNamespace:
    settings = {
        "use_vllm": True, "vllm_mode": "colocate", "num_generations": 6, "per_device_train_batch_size": 3,
        "steps_per_generation": 4, "vllm_tensor_parallel_size": 1, "vllm_enable_sleep_mode": False,
    }  # fmt: skip
    return SimpleNamespace(**{**settings, **more})


def is_right(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def test_engines_of_trainers_have_spares_and_groups_of_the_trainers_size():
    with colocate(redundancy=5):
        assert environment() == ["scheduler,worker", "5", None]
        assert OnesOwn(args=config()).environment == ["scheduler,worker", "5", "6"]
        assert GRPOTrainer("m", None, config(num_generations=4)).environment[2] == "4"
        with colocate(redundancy=2, num_generations=3):
            assert environment() == ["scheduler,worker", "2", "3"]
            assert OnesOwn(args=config()).environment == ["scheduler,worker", "2", "6"]
        assert environment()[1] == "5"
    assert environment() == [None] * 3
    assert OnesOwn(args=config()).environment == [None] * 3


@pytest.mark.parametrize("more", [None, {"use_vllm": False}, {"vllm_mode": "server"}])
def test_other_trainers_are_left_alone(more):
    args = None if more is None else config(**more)
    with colocate(redundancy=5):
        with pytest.warns(UserWarning, match="colocate has no effect on this trainer"):
            trainer = OnesOwn(args=args, tools=["a tool"])
        assert trainer.environment == ["scheduler,worker", "5", None]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tools": ["a tool"]}, "tools and environment_factory must be None under colocate.*use TRLAgents"),
        ({"environment_factory": object}, "tools and environment_factory must be None"),
        (
            {"args": config(num_generations=16)},
            "each process must have a whole group, got 12 completions a generation for num_generations=16. Raise",
        ),
        ({"reward_funcs": [len]}, "reward_funcs must have the reward of colocate .*is_right.*Add it"),
        ({"rollout_func": len}, "rollout_func must be None where colocate has a reward"),
        ({"args": config(vllm_enable_sleep_mode=True)}, "vllm_enable_sleep_mode must be False"),
        ({"args": config(vllm_tensor_parallel_size=2)}, "vllm_tensor_parallel_size must be 1"),
    ],
)
def test_a_trainer_that_cannot_race_is_refused_before_it_is_built(given, said):
    with colocate(reward=is_right), pytest.raises(ValueError, match=said):
        OnesOwn(**{"args": config(), "reward_funcs": [is_right], **given})


def test_processes_of_one_engine_have_a_group_together():
    with colocate():
        OnesOwn(args=config(num_generations=16, vllm_tensor_parallel_size=2))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"redundancy": -1}, "redundancy must be a whole number of at least 0, got -1"),
        ({"redundancy": "auto"}, "got 'auto'"),
        ({"num_generations": 1}, "num_generations must be a whole number of at least 2, got 1"),
        ({"pruning": {"detection_length": 8}}, "pruning must come with reward"),
    ],
)
def test_what_no_group_can_have_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        colocate(**settings)
    assert environment() == [None] * 3


def test_a_plugin_list_without_us_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    with pytest.raises(ValueError, match="VLLM_PLUGINS must name vllm_rollout, got 'another'"):
        colocate()
