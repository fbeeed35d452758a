"""Comparison of two profiles."""

import io

import pytest
from rich.console import Console

from tests.tools.profiling.fake_engine import Engines
from vllm_rollout.profiling import run as run_module
from vllm_rollout.profiling.compare import common_points, compare
from vllm_rollout.profiling.grid import Wanted
from vllm_rollout.profiling.options import ProfileOptions
from vllm_rollout.profiling.run import run


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "draw", lambda profile, path: None)

    def make_profile(name, speed=1.0, batch_sizes=(1, 2, 4), contexts=(128, 256)):
        engines = Engines()
        engines.speed = speed
        path = tmp_path / name
        options = ProfileOptions(model=f"model-{name}", output=path, wanted=Wanted(batch_sizes, contexts, num_steps=2))
        return path, run(options, Console(file=io.StringIO()), engines)

    return make_profile


def test_common_points_are_compared_and_others_left_out(make):
    _, first = make("a.json", batch_sizes=(1, 2, 4, 8), contexts=(128, 256))
    _, second = make("b.json", speed=1.5, batch_sizes=(2, 4, 16), contexts=(256, 512))
    pairs = common_points(first, second)
    assert [(pair.batch_size, pair.context_tokens) for pair in pairs] == [(2, 256), (4, 256)]
    assert [pair.ratio for pair in pairs] == pytest.approx([1.5, 1.5])


def test_the_table_names_both_and_says_who_is_slower(make, tmp_path):
    (first, _), (second, _) = make("a.json"), make("b.json", speed=1.25)
    said = io.StringIO()
    compare(first, second, tmp_path / "both.png", Console(file=said, width=200))
    assert "a.json: model-a.json (LlamaForCausalLM" in said.getvalue()
    assert "b.json: model-b.json" in said.getvalue()
    assert "1.250" in said.getvalue()
    assert "median over 6 points: b.json takes 1.250 times as long as a.json (25.0% slower)" in said.getvalue()
    assert (tmp_path / "both.png").stat().st_size > 5_000


def test_profiles_without_a_common_point_are_refused(make):
    (first, _), (second, _) = make("a.json", contexts=(128,)), make("b.json", contexts=(256,))
    with pytest.raises(ValueError, match=r"no point in common. Measure the same"):
        compare(first, second, None, Console(file=io.StringIO()))


def test_a_profile_that_is_not_there_is_named(make, tmp_path):
    first, _ = make("a.json")
    with pytest.raises(ValueError, match=r"cannot read the profile .*missing\.json"):
        compare(first, tmp_path / "missing.json", None, Console(file=io.StringIO()))
