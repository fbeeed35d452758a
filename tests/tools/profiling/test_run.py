"""The whole command against a fake engine: plan, file, resumption, refresh, Ctrl-C, results."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.tools.profiling.fake_engine import HARDWARE, MODEL, PREFILL_S_PER_TOKEN, STEP_PREFILL_S, Engines, FakeEngine
from vllm_rollout.parts.shaping.profile_file import Profile
from vllm_rollout.profiling import options as options_module
from vllm_rollout.profiling import run as run_module
from vllm_rollout.profiling.grid import Wanted, make_plan
from vllm_rollout.profiling.options import ProfileOptions, parse_sizes
from vllm_rollout.profiling.run import remarks, run

SIZES = (1, 2, 4, 8, 16, 32)
SMALL = Wanted(batch_sizes=SIZES, contexts=(128, 512), num_steps=4)
MANY_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
THOROUGH = replace(SMALL, batch_sizes=MANY_SIZES)


@pytest.fixture
def options(tmp_path, request, monkeypatch):
    """Asks for few points and, unless the test is about it, no picture: that takes longer than all the rest."""
    if "picture" not in request.node.name:
        monkeypatch.setattr(run_module, "draw", lambda profile, path: None)
    return ProfileOptions(
        model="some-model", output=tmp_path / "ptl.json", wanted=SMALL, serve_flags=("--enforce-eager",)
    )


def go(options, engines):
    """The profile, and the printed output."""
    said = io.StringIO()
    return run(options, Console(file=said, width=200), engines), said.getvalue()


@pytest.mark.thorough
def test_a_profile_has_every_point_and_fits_that_hold_and_a_picture(options):
    engines = Engines()
    profile, said = go(replace(options, wanted=THOROUGH), engines)
    (engine,) = engines.started
    assert sorted(engine.measured) == sorted((size, context) for size in MANY_SIZES for context in (128, 512))
    assert profile == Profile.read(options.output)
    assert options.output.with_suffix(".png").stat().st_size > 10_000
    for fit in profile.fits:
        assert fit.r_squared > 0.999
        assert fit.median_left_out_error < 0.05
        assert set(fit.left_out_errors) == set(MANY_SIZES[1:-1])
        assert set(fit.residuals) == set(MANY_SIZES)
    assert remarks(profile) == []
    assert "R²" in said


def test_the_cost_model_predicts_the_engine(options):
    profile, _ = go(replace(options, wanted=THOROUGH), Engines())
    engine = FakeEngine()
    for size in (1, 5, 10, 20, 32):
        for context in (128, 300, 500):
            assert profile.cost().ptl(size, context) == pytest.approx(engine.seconds(size, context), rel=0.05)
    assert profile.cost().prefill_s_per_token == pytest.approx(PREFILL_S_PER_TOKEN, rel=0.05)
    assert profile.cost().step_prefill_s == pytest.approx(STEP_PREFILL_S, rel=0.3)


def test_the_file_says_what_was_measured_on_what(options):
    profile, _ = go(replace(options, output=options.output.parent / "new" / "ptl.json"), Engines())
    assert (profile.model_name, profile.model, profile.hardware) == ("some-model", MODEL, HARDWARE)
    assert profile.serve_flags == ("--enforce-eager",)
    facts = profile.engine(1)
    assert (facts.kv_bytes_per_token, facts.kv_capacity_tokens) == (23040, 30_000)


def test_points_that_do_not_fit_are_left_out_and_named(options):
    engines = Engines(kv_capacity_tokens=10_000)
    profile, said = go(options, engines)
    assert (32, 512) not in engines.started[0].measured
    assert (16, 512) in engines.started[0].measured
    assert (32, 512) in profile.engine(1).left_out
    assert "the KV cache holds 10,000 tokens: context 512: batch sizes 32" in said


def test_ctrl_c_leaves_a_profile_that_can_be_used_and_gone_on_with(options):
    engines = Engines()
    engines.stop_after = 10
    with pytest.raises(KeyboardInterrupt):
        go(options, engines)
    partial = Profile.read(options.output)
    done = len(partial.points) + len(partial.prefill)
    assert done == 10
    assert partial.cost().ptl(32, 128) > 0

    engines.stop_after = None
    profile, _ = go(options, engines)
    first, second = engines.started
    assert not set(first.measured) & set(second.measured)
    assert not set(first.chunks) & set(second.chunks)
    assert len(profile.points) == 2 * len(SIZES)
    assert profile.created == partial.created


def test_what_is_in_the_file_is_measured_again_only_when_it_is_said(options):
    engines = Engines()
    with pytest.raises(ValueError, match=r"--refresh needs a profile: .* does not exist"):
        go(replace(options, refresh=True), engines)
    go(options, engines)
    profile, said = go(options, engines)
    assert len(engines.started) == 1
    assert "all 12 points are in the file" in said
    plan = make_plan(SMALL, profile.engine(1))
    assert {(p.batch_size, p.context_tokens) for p in profile.points} == set(map(tuple, plan.points))

    larger = replace(options, serve_flags=(), wanted=replace(SMALL, contexts=(128, 512, 700)))
    profile, _ = go(larger, engines)
    assert {context for _, context in engines.started[1].measured} == {700}
    assert engines.started[1].flags == ("--enforce-eager",)
    assert len(profile.fits) == 3

    go(replace(options, refresh=True, wanted=Wanted()), engines)
    assert len(engines.started[2].measured) == 18
    go(replace(options, restart=True), engines)
    assert len(engines.started[3].measured) == 12


def test_refresh_measures_the_named_points_again_and_fits_anew(options):
    engines = Engines()
    before, _ = go(options, engines)
    engines.speed = 2.0
    again = replace(options, refresh=True, serve_flags=(), wanted=Wanted(batch_sizes=(16, 32), num_steps=4))
    after, _ = go(again, engines)
    assert sorted(engines.started[1].measured) == [(16, 128), (16, 512), (32, 128), (32, 512)]
    assert engines.started[1].chunks == []
    assert engines.started[1].flags == ("--enforce-eager",)
    changed = {p.batch_size for p, q in zip(before.points, after.points, strict=True) if p.median_s != q.median_s}
    assert changed == {16, 32}
    assert after.cost().ptl(32, 128) > 1.5 * before.cost().ptl(32, 128)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model": "other-model"}, "model 'some-model', this would be one with 'other-model'"),
        ({"serve_flags": ("--dtype", "float32")}, "flags '--enforce-eager', this would be one with '--dtype float32'"),
        ({"logprobs": False}, "logprobs True, this would be one with False"),
    ],
)
def test_a_file_of_something_else_is_refused_before_an_engine_starts(options, change, complaint):
    engines = Engines()
    go(options, engines)
    with pytest.raises(ValueError, match=complaint) as error:
        go(replace(options, **change), engines)
    assert "--restart" in str(error.value)
    assert len(engines.started) == 1


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model": {**MODEL, "num_layers": 12}}, "num_layers 30 there, 12 here"),
        ({"hardware": {**HARDWARE, "num_cpus": 64}}, "1 x a CPU with 2 CPUs, this is 1 x a CPU with 64 CPUs"),
        ({"flags": {"enforce_eager": False}}, "enforce_eager True there, False here"),
    ],
)
def test_a_file_of_another_engine_is_refused_and_stays(options, change, complaint):
    go(options, Engines())
    before = options.output.read_text()
    with pytest.raises(ValueError, match=complaint):
        go(replace(options, wanted=replace(SMALL, contexts=(700,))), Engines(**change))
    assert options.output.read_text() == before


def test_speculative_decoding_has_no_curve(options):
    with pytest.raises(ValueError, match="steps with speculative decoding make a varying number of tokens"):
        go(options, Engines(flags={"speculative_decoding": True}))
    assert not options.output.exists()


def test_candidates_that_never_run_together_are_left_out_and_said(options):
    engines = Engines()
    engines.incapable = {16, 256}
    profile, said = go(options, engines)
    assert profile.batch_sizes() == [size for size in SIZES if size != 16]
    assert 256 not in {p.chunk_tokens for p in profile.prefill}
    assert "left out: only 0 of 4 steps had all 16 candidates at a context of 128 tokens" in said
    assert "left out: no step computed all of 256 prompt tokens" in said


def test_without_a_single_point_it_is_said_what_to_do(options):
    engines = Engines()
    engines.incapable = set(SIZES)
    with pytest.raises(RuntimeError, match=r"no point was measured: .* Ask for smaller --batch-sizes"):
        go(options, engines)


def test_every_tensor_parallel_size_has_its_engine_and_curves(options, monkeypatch):
    monkeypatch.setattr(options_module, "num_devices", lambda: 4)
    engines = Engines()
    profile, _ = go(replace(options, tensor_parallel_sizes=(1, 2)), engines)
    assert [engine.size for engine in engines.started] == [1, 2]
    assert profile.tensor_parallel_sizes == [1, 2]
    assert profile.cost(2).ptl(8, 128) == pytest.approx(profile.cost(1).ptl(8, 128) / 2, rel=1e-6)


def test_a_tensor_parallel_size_without_devices_is_an_error_up_front(monkeypatch):
    monkeypatch.setattr(options_module, "num_devices", lambda: 2)
    with pytest.raises(ValueError, match="--tensor-parallel 4 needs 4 devices, there are 2"):
        ProfileOptions(tensor_parallel_sizes=(1, 4))
    monkeypatch.setattr(options_module, "num_devices", lambda: None)
    ProfileOptions(tensor_parallel_sizes=(8,))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"refresh": True, "restart": True}, "give one of them"),
        ({"wanted": Wanted(num_steps=0)}, "--steps must be at least 1, got 0"),
        ({"serve_flags": ("--tensor-parallel-size=2",)}, "use --tensor-parallel in front of --"),
        ({"serve_flags": ("--tensor_parallel_size", "2")}, "use --tensor-parallel in front of --"),
        ({"output": Path("ptl.png")}, "--output must not end in .png, where the picture goes, got ptl.png"),
        ({"serve_flags": ("-dp", "2")}, "every data-parallel rank is an engine of its own"),
        ({"tensor_parallel_sizes": (0,)}, "sizes must be at least 1, got 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        ProfileOptions(**arguments)


def test_lists_of_sizes_are_parsed():
    assert parse_sizes("--batch-sizes", "8, 1,2,8") == (1, 2, 8)
    assert parse_sizes("--batch-sizes", None) is None
    for text in ("", "1,,2", "a", "0,1", "1.5", "-1"):
        with pytest.raises(ValueError, match="--contexts must be positive whole numbers with commas"):
            parse_sizes("--contexts", text)


def test_a_poor_fit_is_remarked_upon(options):
    profile, _ = go(options, Engines())
    good = profile.fits[1].model_copy(update={"r_squared": 0.98, "median_left_out_error": 0.05})
    poor = profile.fits[0].model_copy(update={"r_squared": 0.9, "median_left_out_error": 0.2})
    (remark,) = remarks(profile.model_copy(update={"fits": (poor, good)}))
    assert "R² 0.900 (wanted 0.98), error on points left out 20.0% (wanted 5%)" in remark
    assert "--refresh --contexts 128" in remark
