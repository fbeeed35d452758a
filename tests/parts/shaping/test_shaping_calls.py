"""Messages about lengths and step times between API processes and engine cores."""

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from tests.parts.pruning.steps import judge_of
from tests.parts.shaping.steps import lengths_of
from tests.support.steps import group_steps
from vllm_rollout.kernel.api.engine_calls import EngineCalls
from vllm_rollout.kernel.call_table import Argument, Operation, Result
from vllm_rollout.kernel.core.calls import rollout_call
from vllm_rollout.parts.shaping.api.fingerprint import engine_flags, fingerprint_of, hardware_of
from vllm_rollout.parts.shaping.api.lengths import KEYS_PER_CALL, EngineShaping
from vllm_rollout.parts.shaping.calls import RECORD_STEPS, SET_COST_MODEL, STEP_DRIFT, TAKE_STEPS, CostToCompare
from vllm_rollout.parts.shaping.core import ShapingCore
from vllm_rollout.parts.shaping.profile_file import CurveFit, EngineFacts, Point, Profile
from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve, StepTime
from vllm_rollout.parts.shaping.rules.drift import StepDrift
from vllm_rollout.parts.shaping.rules.history import LengthHistory, ObservedLength

LENGTHS = [ObservedLength(10, False), ObservedLength(30, False), ObservedLength(30, True)]
COST = CostModel(((64.0, PTLCurve((1.0, 8.0), (0.010, 0.017))),))


class Core:
    """An engine core with our scheduler's parts and nothing else."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(group_steps=group_steps())
        self.shaping = ShapingCore(self.scheduler)
        self.scheduler.part = {ShapingCore: self.shaping}.get
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="model"))

    def collective_rpc(self, method: str, args: tuple) -> list:
        return [[]]


class Client:
    """An engine client with several ranks."""

    def __init__(self, *cores: Core) -> None:
        self.core_engines = cores
        self.num_ranks = len(cores)
        self.living_ranks = range(len(cores))
        self.max_candidates = 4
        self.engine_core = self

    async def _call_utility_async(self, method: str, operation: str, payload: bytes, *, engine: Core) -> bytes:
        return rollout_call(engine, operation, payload)


def call(core: Core, operation: Operation[Argument, Result], argument: Argument) -> Result:
    """Call an operation through its codecs, as over the wire."""
    return operation.decode_result(rollout_call(core, operation.name, operation.encode_argument(argument)))


@pytest.fixture
def cores() -> list[Core]:
    return [Core(), Core()]


@pytest.fixture
def engine(cores) -> EngineShaping:
    client = Client(*cores)
    return EngineShaping(client, EngineCalls(client))


def test_an_observed_group_is_known_on_every_rank(engine, cores):
    asyncio.run(engine.observe_lengths("id:a", LENGTHS))
    expected = LengthHistory()
    expected.observe("id:a", LENGTHS)
    for core in cores:
        assert lengths_of(judge_of(core.scheduler)).of("id:a") == expected.of("id:a")
    history = asyncio.run(engine.length_history(["id:a", "id:b"]))
    assert history.prompts == [expected.of("id:a"), None]
    assert history.dataset == expected.dataset()


def test_before_anything_was_seen_nothing_is_known(engine):
    history = asyncio.run(engine.length_history(["id:a"]))
    assert (history.dataset, history.prompts) == (None, [None])


def test_drift_is_that_of_the_rank_furthest_off_in_each_range(engine, cores, monkeypatch):
    found = [
        [StepDrift(1, 1, 9, 0.010, 0.010), StepDrift(2, 3, 9, 0.005, 0.010)],
        [StepDrift(1, 1, 9, 0.011, 0.010), StepDrift(2, 3, 9, 0.015, 0.010)],
    ]
    for core, ranges in zip(cores, found, strict=True):
        monkeypatch.setattr(core.shaping.step_times, "drift", lambda ranges=ranges: ranges)
    assert asyncio.run(engine.step_drift()) == []  # nothing to compare with
    engine.cost_model = COST
    assert asyncio.run(engine.step_drift()) == [
        StepDrift(1, 1, 9, 0.011, 0.010), StepDrift(2, 3, 9, 0.005, 0.010),
    ]  # fmt: skip


def test_many_prompts_are_asked_for_in_messages_of_bounded_size(engine, cores, monkeypatch):
    sizes = []
    monkeypatch.setattr(LengthHistory, "of", lambda self, key: sizes[-1].append(key))
    monkeypatch.setattr(LengthHistory, "dataset", lambda self: sizes.append([]))
    keys = [str(number) for number in range(2 * KEYS_PER_CALL + 1)]
    assert len(asyncio.run(engine.length_history(keys)).prompts) == len(keys)
    assert list(map(len, sizes)) == [KEYS_PER_CALL, KEYS_PER_CALL, 1]


def test_a_profile_reaches_the_step_times_of_a_core(cores):
    call(cores[0], SET_COST_MODEL, CostToCompare(COST, "model", "ptl.json", (1, 8)))
    assert call(cores[0], STEP_DRIFT, None) == []
    times = cores[0].shaping.step_times
    assert times._active
    assert (times._drift._cost, times._drift._profile) == (COST, "ptl.json")
    call(cores[0], SET_COST_MODEL, None)
    assert not times._active


def test_recorded_steps_come_as_they_were(cores):
    times = cores[0].shaping.step_times
    call(cores[0], RECORD_STEPS, True)
    steps = [StepTime(1, 1, 21.0, 0.5), StepTime(2, 9, 22.5, 0.25)]
    times._steps.extend(steps)
    assert call(cores[0], TAKE_STEPS, None) == steps
    assert call(cores[0], TAKE_STEPS, None) == []


@pytest.fixture(scope="module")
def config(tiny_model) -> VllmConfig:
    return EngineArgs(model=tiny_model, max_model_len=256, max_num_seqs=8, enforce_eager=True).create_engine_config()


def profile_of(config: VllmConfig, **changes: Any) -> Profile:
    """One curve: 10 ms for one candidate, 17 ms for eight."""
    point = {"tensor_parallel_size": 1, "context_tokens": 64, "mean_context_tokens": 64.0}
    points = [
        Point(batch_size=size, median_s=seconds, p10_s=seconds, p90_s=seconds, num_steps=8, **point)
        for size, seconds in ((1, 0.010), (8, 0.017))
    ]
    facts = EngineFacts(
        tensor_parallel_size=1, max_num_seqs=8, max_model_len=256, max_num_batched_tokens=256, block_size=16,
        kv_capacity_tokens=4096, kv_bytes_per_token=64.0,
    )  # fmt: skip
    fields = {
        "created": "", "updated": "", "command": "", "model_name": "profiled", "model": fingerprint_of(config),
        "hardware": hardware_of(config), "versions": {}, "serve_flags": (), "flags": engine_flags(config),
        "logprobs": True, "engines": (facts,), "points": tuple(points),
        "fits": (CurveFit(batch_sizes=(1.0, 8.0), seconds=(0.010, 0.017), r_squared=1.0, residuals={}, **point),),
    }  # fmt: skip
    return Profile(**{**fields, **changes})


def use(engine: EngineShaping, config: VllmConfig, path: Path, **changes: Any) -> None:
    profile_of(config, **changes).write(path)
    engine._client.vllm_config = config
    asyncio.run(engine.use_profile(str(path)))


def test_a_profile_gives_the_cost_model_and_every_rank_compares_with_it(engine, cores, config, tmp_path, caplog):
    heard = []
    engine.when_weighed.append(heard.append)
    with caplog.at_level(logging.WARNING, logger="vllm.vllm_rollout"):
        use(engine, config, tmp_path / "ptl.json")
    assert engine.cost_model.ptl(8, 64) == pytest.approx(0.017)
    assert engine.cost_model.max_num_seqs == 4, "the queue is this server's, not the profiled one's"
    assert all(core.shaping.step_times._active for core in cores)
    assert heard == [engine.cost_model], "other parts use the same costs"
    assert caplog.records == []


def test_a_profile_of_another_model_ends_the_start_with_both_names(engine, config, tmp_path):
    other = {**fingerprint_of(config), "architecture": "OtherForCausalLM", "num_layers": 99}
    with pytest.raises(RuntimeError) as error:
        use(engine, config, tmp_path / "ptl.json", model=other)
    for said in ("--rollout-profile", "profiled (OtherForCausalLM, 99 layers", config.model_config.architecture):
        assert said in str(error.value)
    assert engine.cost_model is None


def test_a_profile_of_another_machine_is_used_with_a_warning(engine, config, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(
        "vllm_rollout.parts.shaping.api.lengths.logger.warning", lambda text, *values: said.append(text % values)
    )
    use(engine, config, tmp_path / "ptl.json", hardware={**hardware_of(config), "device": "Abacus"})
    (warning,) = said
    assert "Abacus" in warning
    assert hardware_of(config)["device"] in warning
    assert engine.cost_model is not None


def test_a_profile_without_this_tensor_parallel_size_names_those_it_has(engine, config, tmp_path):
    fit = profile_of(config).fits[0].model_copy(update={"tensor_parallel_size": 4})
    with pytest.raises(RuntimeError, match=r"no tensor-parallel size 1; measured: 4"):
        use(engine, config, tmp_path / "ptl.json", fits=(fit,))


def test_a_file_that_is_no_profile_ends_the_start(engine, config, tmp_path):
    engine._client.vllm_config = config
    (tmp_path / "ptl.json").write_text("{}")
    with pytest.raises(RuntimeError, match=r"--rollout-profile .*is no profile"):
        asyncio.run(engine.use_profile(str(tmp_path / "ptl.json")))
