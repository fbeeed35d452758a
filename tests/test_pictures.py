"""The pictures that pages show are made by code that still runs: each is drawn again, of what was measured or a little
of the same kind, and the one that is kept has its size."""

from __future__ import annotations

import importlib
import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.figure
import pytest

from tests.parts.page.browser import needs_browser
from tests.parts.page.pictures import VIEWS
from tests.parts.page.test_page import over, rollout
from tests.test_docs import PAGES, ROOT
from vllm_rollout.demo import picture as race_picture
from vllm_rollout.demo.options import Options
from vllm_rollout.demo.phases import Phase, RacedCandidate
from vllm_rollout.demo.training import picture as training_picture
from vllm_rollout.demo.training.curve import Answer, Curve
from vllm_rollout.parts.rounds.demo import picture as rounds_picture
from vllm_rollout.parts.rounds.demo.options import RoundsOptions
from vllm_rollout.parts.rounds.demo.rounds import Period, ReturnedGroup, Round
from vllm_rollout.parts.shaping.profile_file import Profile
from vllm_rollout.profiling.picture import draw as draw_profile_alone

RESULTS = ROOT / "benchmarks/results"


class Kept(NamedTuple):
    """A picture in docs/images/."""

    command: str
    """That makes it. The file of its result names it, or else a page."""
    draw: Callable[[Path], None]
    """Function by which the command draws the picture."""
    labels: tuple[str, ...]
    """Labels of the horizontal axes."""


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def of_result(module: str) -> Callable[[Path], None]:
    """Drawn of the result of its name."""
    return lambda path: importlib.import_module(module).draw(result(path.stem), path)


def draw_profile(path: Path) -> None:
    from benchmarks.ptl import draw

    draw(Profile.read(RESULTS / "ptl_profile.json"), result("ptl"), path)


def draw_profile_of_gpu(path: Path) -> None:
    draw_profile_alone(Profile.read(RESULTS / "gpu_h200" / "ptl.json"), path)


def draw_race(path: Path) -> None:
    options = Options()
    group = [RacedCandidate(0, 30, "kept", (1,) * 30), RacedCandidate(1, 70, "unused")]
    stock = Phase("stock", 8.0, [group] * options.prompts)
    race = Phase("race", 3.0, [[group[0], RacedCandidate(1, 30, "surplus")]] * options.prompts)
    race_picture.draw(stock, race, options, path)


def draw_rounds(path: Path) -> None:
    groups = ReturnedGroup(0, 1.0, (5, 6)), ReturnedGroup(1, 4.0, (30, 40))
    plain = Period((Round("plain", 4.0, groups, 81),))
    short = Round("short", 1.0, (groups[0], ReturnedGroup(1, 1.0)), 25)
    long = Round("long", 1.0, (ReturnedGroup(1, 1.0, (30, 40)),), 70)
    rounds_picture.draw(plain, Period((short, long)), RoundsOptions(prompts=1), path)


def draw_training(path: Path) -> None:
    curves = [Curve(f"way {i}", (0.0, 10.0 + i), (0.2, 0.5), 1.0, 1, ()) for i in range(3)]
    training_picture.draw(curves, (Answer("? a 3 :", "so 4", 400, 0.0), Answer("? a 3 :", "3", 2, 1.0)), path)


GPU_SECONDS = "seconds at a GPU's ratios"
KEPT: Mapping[str, Kept] = {
    "ablation": Kept(
        "python -m benchmarks.ablation",
        of_result("benchmarks.ablation"),
        ("milliseconds that each stage adds to a step, per group that is trained on",),
    ),
    "asynchronous_2": Kept(
        "python -m benchmarks.asynchronous",
        of_result("benchmarks.asynchronous.report"),
        (GPU_SECONDS, "seconds at a GPU's ratios, median (ticks: seeds)"),
    ),
    "demo": Kept("make demo", draw_race, ("", *[""] * 4, *["output tokens"] * 4)),
    "demo_rounds": Kept(
        "vllm-rollout demo --rounds", draw_rounds, ("", "seconds of rollout, rounds one after the other")
    ),
    "front_end": Kept(
        "python -m benchmarks.front_end", of_result("benchmarks.front_end.results"), ("candidates at once",) * 3
    ),
    "group_race": Kept(
        "python -m benchmarks.group_race",
        of_result("benchmarks.group_race"),
        (
            "seconds until every group has its trajectories (ticks: single runs)",
            "groups at once, 16 candidates each",
        ),
    ),
    "pruning": Kept(
        "python -m benchmarks.pruning",
        of_result("benchmarks.pruning.picture"),
        (
            "labels (at the right: held-out prompts, 90 % intervals)",
            "positive ratio of survivors (dotted: wanted), E[ρ̂(1−ρ̂)]",
            "keep_ratio",
        ),
    ),
    "ptl": Kept(
        "python -m benchmarks.ptl", draw_profile, (*["candidates in the step (batch size)"] * 2, "measured, s")
    ),
    "ptl_h200": Kept(
        "python -m benchmarks.gpu_check", draw_profile_of_gpu, ("candidates in the step (batch size)",) * 2
    ),
    "rewards": Kept(
        "python -m benchmarks.rewards.rounds",
        of_result("benchmarks.rewards.rounds"),
        ("seconds of a round (ticks: single epochs; line: its rollout alone)",) * 2,
    ),
    "rounds": Kept(
        "python -m benchmarks.rounds",
        of_result("benchmarks.rounds.picture"),
        (
            "seconds of rollout (ticks: single repeats)",
            "round of the first repeat (hatched: the long one)",
            "tokens of a period (hatched: wasted)",
        ),
    ),
    "shaping": Kept(
        "python -m benchmarks.shaping",
        of_result("benchmarks.shaping.picture"),
        (
            "seconds (ticks: single runs), × against the first",
            "tokens (quartiles, 1 to 99 %, diamond: mean)",
            "measured speed-up (band: within 10 %)",
        ),
    ),
    "time_to_reward": Kept(
        "python -m benchmarks.time_to_reward", of_result("benchmarks.time_to_reward.report"), (GPU_SECONDS,) * 3
    ),
    "time_to_reward_300": Kept(
        "python -m benchmarks.time_to_reward", of_result("benchmarks.time_to_reward.report"), (GPU_SECONDS,) * 2
    ),
    "training_demo": Kept(
        "vllm-rollout demo --train",
        draw_training,
        ("seconds of training (rollouts, rewards, gradients, weights)", ""),
    ),
}
"""By its name. Those of the page are drawn by a browser."""


def shown() -> dict[str, list[Path]]:
    """Pages by the name of each picture that they show."""
    found: dict[str, list[Path]] = {}
    for page in PAGES:
        for link in re.findall(r"!\[[^\]]*\]\(([^()\s]+)\)", page.read_text()):
            found.setdefault((page.parent / link).resolve().relative_to(ROOT).as_posix(), []).append(page)
    return found


def size_of(picture: Path) -> tuple[int, int]:
    """Size of a PNG, in pixels."""
    head = picture.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:])
    return width, height


def test_every_picture_is_shown_and_drawn_by_something() -> None:
    names = {*KEPT, *(f"watch_{view}" for view in VIEWS)}
    assert shown().keys() == {f"docs/images/{name}.png" for name in names}
    assert {picture.stem for picture in (ROOT / "docs").rglob("*.png")} == names


@pytest.mark.parametrize("name", KEPT)
def test_the_command_of_a_picture_is_in_its_result_or_on_a_page(name: str) -> None:
    of_result = RESULTS / f"{name}.json"
    told = [of_result] if of_result.exists() else PAGES
    assert any(KEPT[name].command in path.read_text() for path in told)


@pytest.mark.parametrize("name", KEPT)
def test_a_picture_is_drawn_with_its_axes_and_has_the_size_of_the_one_that_is_kept(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    write = matplotlib.figure.Figure.savefig

    def keep(figure: Any, *given: Any, **more: Any) -> None:
        figures.append(figure)
        write(figure, *given, **more)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    path = tmp_path / f"{name}.png"
    KEPT[name].draw(path)
    (figure,) = figures
    assert tuple(axes.get_xlabel() for axes in figure.axes) == KEPT[name].labels
    assert all(axes.has_data() or axes.texts for axes in figure.axes)
    assert size_of(path) == size_of(ROOT / f"docs/images/{name}.png")


@pytest.mark.thorough
@needs_browser
def test_pictures_of_the_page_are_made_of_a_recording(tmp_path: Path) -> None:
    row = rollout("it", *(over(i) for i in range(8)), state="over", seconds=10.0)
    (tmp_path / "trace.jsonl").write_text(json.dumps({**row, "model": "m", "group_size": 8}) + "\n")
    command = [sys.executable, "-m", "tests.parts.page.pictures", str(tmp_path / "trace.jsonl"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=200)  # the browser's loop must not be this process's
    for view in VIEWS:
        drawn, kept = tmp_path / f"watch_{view}.png", ROOT / f"docs/images/watch_{view}.png"
        assert drawn.stat().st_size > 10_000
        assert size_of(drawn)[0] == size_of(kept)[0]
