"""Parts that tests need. `python -m tests.needs PART...` prints options of pytest that leave out the tests of parts.

A test needs the part in whose folder it stands (`tests/parts/NAME`), and the parts that it imports. It also needs what
the test modules that it imports, and the `conftest.py` above it, need. `NEEDS` has what else a file needs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from tests.support.imports import imported_modules
from vllm_rollout.kernel import parts

TESTS = Path(__file__).parent

NEEDS: dict[str, tuple[str, ...]] = {
    "engine/test_audits.py": ("emulation", "pruning"),
    "engine/test_data_parallel.py": ("feeds", "moving", "pruning", "rounds"),
    "engine/test_drafts.py": ("drafts",),
    "engine/test_emulation.py": ("drafts", "emulation", "moving", "pruning", "rounds", "weights"),
    "engine/test_feeds.py": ("drafts", "feeds", "pruning", "rewards", "rounds", "sessions"),
    "engine/test_front_ends.py": ("emulation", "front_ends", "pruning", "rounds"),
    "engine/test_gpu_check.py": ("drafts", "emulation", "moving", "pruning", "rounds", "shaping"),
    "engine/test_grpo.py": ("feeds", "pruning", "rewards"),
    "engine/test_in_process.py": ("in_process", "pruning"),
    "engine/test_judge.py": ("rewards",),
    "engine/test_learning.py": ("pruning",),
    "engine/test_moving.py": ("moving", "pruning"),
    "engine/test_moving_kills.py": ("emulation", "feeds", "moving"),
    "engine/test_neighbours.py": ("drafts", "pruning", "rounds", "weights"),
    "engine/test_other_models.py": ("in_process", "pruning", "rewards"),
    "engine/test_page.py": ("emulation", "moving", "page", "pruning", "rounds", "sessions"),
    "engine/test_parallelism.py": ("emulation", "moving", "pruning", "rounds"),
    "engine/test_plain_async_llm.py": ("in_process", "pruning"),
    "engine/test_profile.py": ("shaping",),
    "engine/test_race.py": ("pruning", "rounds"),
    "engine/test_ray.py": ("moving", "pruning"),
    "engine/test_recipes.py": ("pruning",),
    "engine/test_resume.py": ("pruning", "rounds"),
    "engine/test_rounds.py": ("pruning", "rounds"),
    "engine/test_serve.py": (
        "moving",
        "page",
        "pruning",
        "rewards",
        "rounds",
        "sessions",
        "shaping",
        "trainers",
        "weights",
    ),
    "engine/test_server.py": ("pruning", "rewards"),
    "engine/test_session_rounds.py": ("emulation", "rounds", "sessions"),
    "engine/test_sessions.py": ("emulation", "feeds", "moving", "page", "rewards", "sessions", "shaping"),
    "engine/test_shaping.py": ("page", "pruning", "rounds", "shaping"),
    "engine/test_soak.py": ("emulation", "moving", "page", "pruning", "rewards", "rounds", "sessions"),
    "engine/test_somebody_elses.py": ("in_process",),
    "engine/test_tracing.py": ("emulation", "page"),
    "engine/test_trainer_actors.py": ("in_process",),
    "engine/test_weights.py": ("sessions", "weights"),
    "parts/drafts/test_simulator.py": ("emulation", "sessions"),
    "parts/emulation/test_fate.py": ("page", "shaping"),
    "parts/emulation/test_settings.py": ("page",),
    "parts/fleet/test_fleet.py": ("pruning", "rounds"),
    "parts/page/test_receipt_command.py": ("moving", "sessions"),
    "parts/page/test_recorder.py": ("pruning",),
    "parts/page/test_scored_rollouts.py": ("pruning",),
    "parts/page/test_top.py": ("moving",),
    "parts/pruning/test_adapters.py": ("rounds",),
    "parts/pruning/test_fuzz.py": ("rounds",),
    "parts/pruning/test_left_out.py": ("sessions",),
    "parts/pruning/test_prompts.py": ("shaping",),
    "parts/pruning/test_quality_head_routes.py": ("moving", "rounds", "shaping", "weights"),
    "parts/pruning/test_whole_groups.py": ("feeds", "rounds", "sessions"),
    "parts/rounds/test_earlier.py": ("sessions",),
    "parts/rounds/test_learning_runs.py": ("pruning", "shaping"),
    "parts/rounds/test_owners.py": ("feeds", "pruning", "sessions"),
    "parts/rounds/test_parallelism.py": ("moving", "shaping"),
    "parts/rounds/test_run_damage.py": ("pruning",),
    "parts/rounds/test_run_state.py": ("pruning",),
    "parts/rounds/test_session_states.py": ("pruning",),
    "parts/sessions/test_scored_groups.py": ("pruning",),
    "tools/integrations/test_trl_colocated.py": ("in_process",),
    "tools/integrations/test_verl.py": ("in_process",),
    "tools/simulator/test_command.py": ("moving", "page", "rounds"),
    "tools/simulator/test_left_out.py": ("pruning", "shaping"),
    "tools/simulator/test_recording.py": ("moving",),
    "tools/simulator/test_rounds.py": ("moving", "page"),
    "tools/simulator/test_sessions.py": ("moving", "rounds"),
}
"""File below `tests/` -> parts that the file needs and does not import. An engine test asks a server, so that its
imports do not show its needs."""


def left_out(*names: str) -> list[Path]:
    """Test files, files of types and folders that need one of these parts. A folder stands for all that is in it."""
    found: list[Path] = []
    for path in sorted(TESTS.rglob("*.py"), key=lambda path: (path.name != "conftest.py", path)):
        if found_in(path, found) or needs(path).isdisjoint(names):
            continue
        if path.name == "conftest.py":
            found.append(path.parent)
        elif path.name.startswith("test_") or path.name == "typed.py":
            found.append(path)
    return sorted(found)


def found_in(path: Path, folders: list[Path]) -> bool:
    return not set(path.parents).isdisjoint(folders)


def needs(path: Path) -> set[str]:
    """Names of all parts without which a test file does not run."""
    files = read_with(path) if path.parent.name != "engine" else ()
    direct = {*row(path)}.union(*({*own(file), *imported_parts(file), *row(file)} for file in files))
    return set().union(*(with_needs(name) for name in direct))


def with_needs(name: str) -> set[str]:
    """A part and those that it needs, by the list of parts."""
    listed = {part.name: part.needs for part in parts.parts()}
    return {name}.union(*(with_needs(need) for need in listed.get(name, ())))


def own(path: Path) -> tuple[str, ...]:
    """The part in whose folder a file stands."""
    ring, *where = path.relative_to(TESTS).parts
    return (where[0],) if ring == "parts" and len(where) > 1 else ()


def row(path: Path) -> tuple[str, ...]:
    return NEEDS.get(path.relative_to(TESTS).as_posix(), ())


@cache
def imported(path: Path) -> frozenset[str]:
    """Modules, and names of modules, that a file imports."""
    return frozenset(imported_modules(path.read_text()))


@cache
def imported_parts(path: Path) -> frozenset[str]:
    """Parts of which a file imports something, also a name that a part gives to the package."""
    exports = {f"vllm_rollout.{name}": place for name, place in parts.exports().items()}
    modules = (exports.get(name, name).split(".") for name in imported(path))
    folders = [module[2:4] for module in modules if module[:2] == ["vllm_rollout", "parts"]]
    return frozenset(
        name.removeprefix("with_") for its in folders for name in its if name == its[0] or name.startswith("with_")
    )


def read_with(path: Path) -> set[Path]:
    """A test file, the test modules that it imports, and the `conftest.py` above each of them."""
    return closure(path, lambda file: [*imported_tests(file), *conftests(file)])


def closure(path: Path, following: Callable[[Path], Iterable[Path]]) -> set[Path]:
    """A file, those that follow it, those that follow these, and so on."""
    found, left = set(), [path]
    while left:
        if (file := left.pop()) not in found:
            found.add(file)
            left += following(file)
    return found


def imported_tests(path: Path) -> list[Path]:
    return [file for name in imported(path) if name.startswith("tests.") and (file := file_of(name)) is not None]


def conftests(path: Path) -> list[Path]:
    return list(filter(Path.exists, (TESTS / folder / "conftest.py" for folder in path.relative_to(TESTS).parents)))


def file_of(name: str) -> Path | None:
    """The file of a module of this repository, or of the module that has this name."""
    words = name.split(".")
    files = (TESTS.parent.joinpath(*words[:end]).with_suffix(".py") for end in (None, -1))
    return next(filter(Path.exists, files), None)


if __name__ == "__main__":
    print(*(f"--ignore={path.relative_to(TESTS.parent)}" for path in left_out(*sys.argv[1:])), sep="\n")
