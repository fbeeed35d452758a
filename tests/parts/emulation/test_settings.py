"""Files of an emulated device: what is wrong with one is said, by field."""

import json

import pytest

from vllm_rollout.parts.emulation.device import StepWork, step_seconds
from vllm_rollout.parts.emulation.settings import DEFAULT_KV_TOKENS, Settings, settings_type
from vllm_rollout.parts.shaping.profile_file import CurveFit, EngineFacts, Profile


def read(tmp_path, content: object) -> Settings:
    path = tmp_path / "device.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return Settings.read(path)


def write_profile(path, *sizes: int) -> None:
    facts = [
        EngineFacts(
            tensor_parallel_size=size, max_num_seqs=64, max_model_len=2048, max_num_batched_tokens=256, block_size=32,
            kv_capacity_tokens=32_768 * size, kv_bytes_per_token=64.0, prefill_s_per_token=1e-4, step_prefill_s=2e-3,
        )
        for size in sizes
    ]  # fmt: skip
    fits = [
        CurveFit(
            tensor_parallel_size=size, context_tokens=context, mean_context_tokens=context, batch_sizes=(1.0, 11.0),
            seconds=(0.01 * factor, 0.02 * factor), r_squared=1.0, residuals={},
        )
        for size in sizes
        for context, factor in ((100, 1), (200, 2))
    ]  # fmt: skip
    Profile(
        created="", updated="", command="", model_name="m", model={}, hardware={}, versions={}, serve_flags=(),
        flags={}, logprobs=True, engines=tuple(facts), fits=tuple(fits),
    ).write(path)  # fmt: skip


def test_an_empty_object_has_every_default(tmp_path):
    settings = read(tmp_path, {})
    assert settings == settings_type()()
    assert step_seconds(settings)(StepWork(100, 0, 0)) == pytest.approx(0.010)


def test_a_step_costs_the_sum_of_its_parts(tmp_path):
    step = {"ms": 1, "ms_per_request": 0.1, "ms_per_context_token": 0.01, "ms_per_prefilled_token": 0.5}
    seconds = step_seconds(read(tmp_path, {"step": step}))
    assert seconds(StepWork(3, 70, 20)) == pytest.approx((1 + 0.3 + 0.7 + 10) / 1e3)
    assert seconds(StepWork(3, 70, 20, num_drafts=4)) == pytest.approx((1 + 0.7 + 0.7 + 10) / 1e3)


def test_the_example_can_be_read():
    assert Settings.read("examples/emulate_7b.json").kv_tokens == 800_000


@pytest.mark.parametrize("named", [False, True])
def test_a_profile_gives_step_times_and_capacity(tmp_path, named):
    profile = tmp_path / "ptl.json"
    write_profile(profile, 2)
    if not named:
        with pytest.raises(ValueError, match=r"has no tensor-parallel size 1; measured: 2"):
            Settings.read(profile).at(1)
        return
    settings = read(tmp_path, {"profile": "ptl.json", "tensor_parallel_size": 2}).at(1)
    assert settings.kv_tokens == 65_536
    seconds = step_seconds(settings)
    assert seconds(StepWork(6, 6 * 150, 0)) == pytest.approx(0.015 * 1.5)
    assert seconds(StepWork(6, 6 * 150, 10)) == pytest.approx(0.015 * 1.5 + 10e-4 + 2e-3)
    # Three requests with three drafts compute like six requests and read the context of three.
    assert seconds(StepWork(3, 3 * 300, 0, num_drafts=3)) == pytest.approx(0.015 * 1.5)


def test_an_engine_gets_what_the_file_says_of_its_size(tmp_path):
    sizes = {"1": {"step": {"ms": 6}, "kv_tokens": 5000}, "4": {"step": {"ms": 2}}}
    settings = read(tmp_path, {"sizes": sizes, "seed": 3})
    assert settings.engine_sizes == (1, 4)
    one, four = settings.at(1), settings.at(4)
    assert (one.kv_tokens, four.kv_tokens, four.seed) == (5000, DEFAULT_KV_TOKENS, 3)
    assert step_seconds(one)(StepWork(1, 0, 0)) == pytest.approx(3 * step_seconds(four)(StepWork(1, 0, 0)), rel=0.02)
    assert four.at(1) == four
    with pytest.raises(ValueError, match="no tensor-parallel size 2, but 1, 4"):
        settings.at(2)


def test_an_engine_gets_its_size_of_a_profile(tmp_path):
    write_profile(tmp_path / "ptl.json", 1, 2)
    settings = Settings.read(tmp_path / "ptl.json")
    assert settings.engine_sizes == (1, 2)
    assert [settings.at(size).kv_tokens for size in (1, 2)] == [32_768, 65_536]
    assert read(tmp_path, {"profile": "ptl.json", "kv_tokens": 100}).at(2).kv_tokens == 100
    named = read(tmp_path, {"profile": "ptl.json", "tensor_parallel_size": 2})
    assert (named.engine_sizes, named.at(1).kv_tokens) == ((1,), 65_536)


@pytest.mark.parametrize("content", [{}, {"step": {}}, {"profile": "ptl.json", "tensor_parallel_size": 2}])
def test_a_file_of_one_size_is_for_engines_of_size_one(tmp_path, content):
    write_profile(tmp_path / "ptl.json", 2)
    settings = read(tmp_path, content)
    assert settings.engine_sizes == (1,)
    with pytest.raises(ValueError, match="no tensor-parallel size 2, but 1"):
        settings.at(2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"device\.json:1: not JSON"),
        ("[]", r"must hold a JSON object, got \[\]"),
        ({"stp": {}}, "stp: is not a field"),
        ({"step": {"ms": -1}}, r"step\.ms: input should be greater than 0, got -1"),
        ({"step": {"ms": "fast"}}, r"step\.ms: input should be a valid number.*got 'fast'"),
        ({"step": {}, "profile": "p"}, "give one of step, profile and sizes"),
        ({"sizes": {}}, "sizes: .*at least 1"),
        ({"sizes": {"0": {}}}, r"sizes\.0.*: .*greater than or equal to 1"),
        ({"sizes": {"1": {}}, "step": {}}, "give one of step, profile and sizes"),
        ({"sizes": {"1": {}}, "kv_tokens": 100}, "kv_tokens: say it in each of sizes"),
        ({"lengths": {}}, "lengths: give one of log_normal and trace"),
        ({"lengths": {"log_normal": {"sigma": 9}}}, r"lengths\.log_normal\.sigma: .*less than or equal to 5, got 9"),
        ({"lengths": {"trace": "gone.jsonl"}}, r"gone\.jsonl: No such file"),
        ({"profile": "gone.json"}, "cannot read the profile"),
        ({"score": {"auc": 1}}, r"score\.auc: input should be less than 1, got 1"),
        ({"success": {"rate": 2}}, r"success\.rate: .*less than or equal to 1, got 2"),
        ({"seed": 1.5}, r"seed: .*got 1\.5"),
    ],
)
def test_a_broken_file_is_an_error_that_names_file_field_and_value(tmp_path, content, message):
    with pytest.raises(ValueError, match=message) as raised:
        read(tmp_path, content)
    assert "device.json" in str(raised.value)


def test_a_missing_file_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*gone\.json.*docs/guides/emulation\.md"):
        Settings.read(tmp_path / "gone.json")
