"""Reading, writing and using a profile's file."""

import json
import os

import pytest
from fake_engine import HARDWARE, MODEL

from vllm_rollout.profiling.measure import finished, with_engine, with_point, with_prefill
from vllm_rollout.profiling.profile_file import EngineFacts, Point, PrefillPoint, Profile


def point(batch_size, context, seconds, size=1):
    return Point(
        tensor_parallel_size=size,
        batch_size=batch_size,
        context_tokens=context,
        mean_context_tokens=context - 3,
        median_s=seconds,
        p10_s=seconds,
        p90_s=seconds,
        num_steps=8,
    )


def facts(size=1):
    return EngineFacts(
        tensor_parallel_size=size,
        max_num_seqs=64,
        max_model_len=1024,
        max_num_batched_tokens=2048,
        block_size=32,
        kv_capacity_tokens=30_000,
        kv_bytes_per_token=23040,
    )


@pytest.fixture
def empty():
    return Profile(
        created="2025-01-01T00:00:00+00:00",
        updated="2025-01-01T00:00:00+00:00",
        command="vllm-rollout profile some-model",
        model_name="some-model",
        model=MODEL,
        hardware=HARDWARE,
        versions={"vllm": "0.32.0"},
        serve_flags=("--enforce-eager",),
        flags={"enforce_eager": True},
        logprobs=True,
    )


@pytest.fixture
def profile(empty):
    made = with_engine(empty, facts())
    for context in (100, 500):
        for size in (1, 2, 4):
            made = with_point(made, point(size, context, 0.01 * size * (1 + context / 1000)))
    for chunk in (64, 256):
        prefill = PrefillPoint(tensor_parallel_size=1, chunk_tokens=chunk, median_s=0.05 + 0.001 * chunk, num_steps=3)
        made = with_prefill(made, prefill)
    return finished(made)


def test_a_profile_survives_its_file(profile, tmp_path):
    profile.write(tmp_path / "ptl.json")
    assert Profile.read(tmp_path / "ptl.json") == profile
    assert os.listdir(tmp_path) == ["ptl.json"]


def test_writing_makes_the_folder_and_replaces_the_file_whole(profile, empty, tmp_path):
    path = tmp_path / "new" / "ptl.json"
    profile.write(path)
    empty.write(path)
    assert Profile.read(path) == empty


def test_a_failed_write_leaves_the_old_file(profile, empty, tmp_path, monkeypatch):
    path = tmp_path / "ptl.json"
    empty.write(path)
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        profile.write(path)
    assert Profile.read(path) == empty
    assert os.listdir(tmp_path) == ["ptl.json"]


def test_the_cost_model_has_the_fits_at_the_measured_contexts(profile):
    cost = profile.cost()
    assert [context for context, _ in cost.curves] == [97, 497]
    assert cost.ptl(2, 97) == pytest.approx(0.022)
    assert cost.ptl(4, 497) == pytest.approx(0.06)
    assert cost.max_num_seqs == 64
    assert cost.prefill_s_per_token == pytest.approx(0.001, rel=0.05)
    assert profile.batch_sizes() == [1, 2, 4]


def test_a_size_that_was_not_measured_is_said(profile, empty):
    with pytest.raises(
        ValueError, match=r"has no tensor-parallel size 2; measured: 1\. Add it with .*--tensor-parallel 2"
    ):
        profile.cost(2)
    with pytest.raises(ValueError, match="measured: nothing yet"):
        empty.cost()


def test_a_point_measured_again_replaces_the_old_one(profile):
    again = with_point(profile, point(2, 100, 0.5))
    assert len(again.points) == len(profile.points)
    assert {p.median_s for p in again.points if (p.batch_size, p.context_tokens) == (2, 100)} == {0.5}


def test_a_profile_in_the_making_can_be_used(empty):
    made = with_point(with_engine(empty, facts()), point(4, 100, 0.2))
    assert made.cost().ptl(1, 0) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda data: data.update(format=7), r"format: Input should be 1"),
        (lambda data: data["points"][0].update(median_s=-1), r"points\.0\.median_s: Input should be greater than 0"),
        (lambda data: data["points"][0].pop("batch_size"), r"points\.0\.batch_size: Field required"),
        (lambda data: data.update(surprise=1), "surprise: Extra inputs"),
    ],
)
def test_a_broken_file_is_refused_with_the_field_and_the_way_out(profile, tmp_path, change, complaint):
    path = tmp_path / "ptl.json"
    data = profile.model_dump(mode="json")
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=complaint) as error:
        Profile.read(path)
    assert f"{path} is no profile of format 1" in str(error.value)
    assert "--restart" in str(error.value)


def test_a_file_that_is_no_json_or_not_there_is_named(tmp_path):
    path = tmp_path / "ptl.json"
    with pytest.raises(ValueError, match=f"cannot read the profile {path}.*makes one"):
        Profile.read(path)
    path.write_text("not json")
    with pytest.raises(ValueError, match=f"{path} is no profile"):
        Profile.read(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="cannot read the profile"):
        Profile.read(path)


def test_the_same_model_and_hardware_match(profile):
    assert profile.mismatch(MODEL, HARDWARE, {"enforce_eager": True}) == (None, None)
    assert profile.mismatch(MODEL, HARDWARE) == (None, None)


def test_another_model_is_an_error_with_both_names(profile):
    other = {**MODEL, "architecture": "Qwen3ForCausalLM", "num_layers": 28}
    error, warning = profile.mismatch(other, HARDWARE)
    assert "some-model (LlamaForCausalLM, 30 layers" in error
    assert "not of Qwen3ForCausalLM, 28 layers" in error
    assert "num_layers 30 there, 28 here" in error
    assert warning is None


def test_other_hardware_or_flags_are_a_warning_with_both(profile):
    error, warning = profile.mismatch(MODEL, {**HARDWARE, "device": "another CPU"}, {"enforce_eager": False})
    assert error is None
    assert "made on 1 x a CPU with 2 CPUs, this is 1 x another CPU with 2 CPUs" in warning
    assert "enforce_eager True there, False here" in warning
