"""The benchmark of the parallelism planner: its device, and the table of what it measured."""

import pytest

from benchmarks.planner_emulated import (
    WAYS,
    PressedWorkload,
    RoundRow,
    described,
    simulated,
    summary_of,
    table,
    write_profile,
)
from benchmarks.rounds_emulated.workload import EmulatedDataSet
from vllm_rollout.emulation.settings import Settings
from vllm_rollout.group.forecast import EngineSize, choose_start, expected_round
from vllm_rollout.profiling.profile_file import Profile

ITS = PressedWorkload("7B/8k", 1, 16, 8, 3, kv_tokens=40_000, cap=2048, num_periods=1)


def test_the_profile_says_what_the_device_does(tiny_model, tmp_path):
    write_profile(ITS, tiny_model, tmp_path / "profile.json")
    profile = Profile.read(tmp_path / "profile.json")
    assert profile.tensor_parallel_sizes == [1, 2, 4]
    device = Settings.read(tmp_path / "profile.json")
    for size in (1, 2, 4):
        assert device.at(size).kv_tokens == size * ITS.kv_tokens
        assert profile.cost(size).ptl(100, 600) == pytest.approx(ITS.cost(size).ptl(100, 600))


def test_one_device_is_pressed_and_the_profile_does_not_begin_there():
    engines = {size: EngineSize(ITS.cost(size), size * ITS.kv_tokens) for size in (1, 2, 4)}
    choice = choose_start(engines, expected_round(200, 128, ITS.max_tokens, prompt_tokens=200, group_size=10))
    assert choice.size > 1
    assert choice.forecasts[1].seconds > choice.forecasts[2].seconds > choice.forecasts[4].seconds


def test_prompts_are_of_the_served_vocabulary():
    data = EmulatedDataSet(ITS, ITS.num_run_prompts)
    assert len(data.token_ids) == 4 * 20
    assert all(0 <= token < 512 for token_ids in data.token_ids for token in token_ids)


def test_every_way_stands_beside_the_first():
    rows = [
        RoundRow("short", 1, 4.0, 100, 9000, None),
        RoundRow("short", 2, 2.0, 0, 9000, 11.5),
        RoundRow("long", 2, 6.0, 20, 9000, None),
    ]
    ways = {way: summary_of(rows) | {"idle_share": 0.01} for way in WAYS}
    assert (ways["auto"]["seconds"], ways["auto"]["rebuild_s"]) == (12.0, [11.5])
    assert (ways["auto"]["short_s"], ways["auto"]["short_preemptions"], ways["auto"]["long_s"]) == (3.0, 50, 6.0)
    shown = table({"ways": ways, "simulated": ways, "workload": described(ITS, 0.5)}).splitlines()
    assert len(shown) == 4 + len(WAYS)
    assert (
        "| auto | 1 2 2 | 50 | 50 | 3.00 | 3.00 | 1.00 | 1.00 | 6.00 | 6.00 | 12.0 | 12.0 | 1.00 | 1.00 | 11.5 |"
        in shown[5 + 3]
    )
    partly = table({"ways": {}, "simulated": ways, "workload": described(ITS, 0.5)}).splitlines()
    assert "| fixed-1 | 1 2 2 | — | 50 | — | 3.00 | — | 1.00 |" in partly[4]


def test_in_the_simulator_preemptions_cost_time_and_more_devices_spare_them():
    few = PressedWorkload("7B/8k", 1, 4, 4, 3, kv_tokens=4_000, cap=1024, num_periods=1)
    one, two, roomy, auto = (simulated(few, way) for way in ("fixed-1", "fixed-2", "roomy-1", "auto"))
    assert one["num_preemptions"] > two["num_preemptions"]
    assert roomy["num_preemptions"] == 0
    assert one["seconds"] > roomy["seconds"] > two["seconds"]
    assert [each["size"] for each in auto["rounds"]][:2] == [1, 2]
    assert auto["rounds"][0] == one["rounds"][0]
    assert auto["seconds"] < one["seconds"]
