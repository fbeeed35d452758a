"""Reading, writing and using a profile's file."""

import json
import os

import pytest

from tests.parts.shaping.profiles import facts, point, profile_of
from tests.tools.profiling.fake_engine import HARDWARE, MODEL
from vllm_rollout.parts.shaping.profile_file import PrefillPoint, Profile
from vllm_rollout.profiling.measure import finished, with_engine, with_point, with_prefill


@pytest.fixture
def empty():
    flags = {"serve_flags": ("--enforce-eager",), "flags": {"enforce_eager": True}}
    return profile_of(model=MODEL, hardware=HARDWARE, **flags)


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


def test_writing_replaces_the_file_whole(profile, empty, tmp_path):
    path = tmp_path / "ptl.json"
    for each in (empty, profile):
        each.write(path)
        assert Profile.read(path) == each
    assert os.listdir(path.parent) == ["ptl.json"]


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


def test_contexts_that_the_engines_blocks_make_one_are_one_curve(profile):
    for size in (1, 2, 4):
        profile = with_point(profile, point(size, 102, 0.03).model_copy(update={"mean_context_tokens": 97}))
    cost = finished(profile).cost()
    assert [context for context, _ in cost.curves] == [97, 497]
    assert cost.ptl(2, 97) == pytest.approx(0.03)


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


@pytest.mark.parametrize(
    ("model", "hardware", "flags", "error", "warning"),
    [
        (MODEL, HARDWARE, {"enforce_eager": True}, (), ()),
        (MODEL, HARDWARE, None, (), ()),
        (
            {**MODEL, "architecture": "Qwen3ForCausalLM", "num_layers": 28},
            HARDWARE,
            None,
            (
                "some-model (LlamaForCausalLM, 30 layers",
                "not of Qwen3ForCausalLM, 28 layers",
                "num_layers 30 there, 28",
            ),
            (),
        ),
        (
            MODEL,
            {**HARDWARE, "device": "another CPU"},
            {"enforce_eager": False},
            (),
            ("made on 1 x a CPU with 2 CPUs, this is 1 x another CPU with 2", "enforce_eager True there, False here"),
        ),
    ],
)
def test_another_model_is_an_error_other_hardware_or_flags_a_warning(profile, model, hardware, flags, error, warning):
    for said, expected in zip(profile.mismatch(model, hardware, flags), (error, warning), strict=True):
        assert (said is None) == (not expected)
        assert all(words in said for words in expected)
