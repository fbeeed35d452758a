"""examples/recipes: what a trainer's page says to change, as a diff of a script that runs without us."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.parent for path in (ROOT / "examples" / "recipes").glob("*/rollout.diff"))
PAGES = {"trl_colocated": "trl", "trl_server": "trl"}


def patched(recipe: Path, folder: Path) -> Path:
    """The script of that recipe with its diff, in this folder."""
    (script,) = recipe.glob("train.*")
    place = folder / script.name
    place.write_bytes(script.read_bytes())
    subprocess.run(["git", "apply", str(recipe / "rollout.diff")], cwd=folder, check=True, timeout=WAIT_S)
    return place


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_diff_applies_and_its_page_shows_it(recipe: Path, tmp_path: Path) -> None:
    script = patched(recipe, tmp_path)
    if script.suffix == ".sh":
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=WAIT_S)
    else:
        compile(script.read_text(), str(script), "exec")
    changed = [line for line in (recipe / "rollout.diff").read_text().splitlines()[2:] if line[0] in "+-"]
    page = (ROOT / "docs" / "recipes" / f"{PAGES.get(recipe.name, recipe.name)}.md").read_text()
    assert [line for line in changed if f"\n{line}\n" not in page] == []
    assert f"examples/recipes/{recipe.name}" in page


def test_there_is_a_recipe_for_each_trainer_that_is_turned_on_by_a_line() -> None:
    assert [recipe.name for recipe in RECIPES] == ["openrlhf", "skyrl", "trl_colocated", "trl_server", "verl"]
