"""The list of parts: their order, what is left out, and what a part needs."""

from pathlib import Path

import pytest

from vllm_rollout.kernel import parts
from vllm_rollout.kernel.parts import Part, chosen, left_out, load

PACKAGE = Path(__file__).parents[1] / "vllm_rollout"
TOOLS = {"simulated": "simulator", "demo": "demo", "doctor": "doctor"}
"""Tools by the faces that only they ask for."""


def listed(*those: Part) -> dict[str, Part]:
    return {part.name: part for part in those}


A, B, C = Part("a", "", needs=("c",)), Part("b", ""), Part("c", "")


def names(those: tuple[Part, ...]) -> list[str]:
    return [part.name for part in those]


def test_a_part_comes_after_what_it_needs():
    assert names(chosen(listed(A, B, C), frozenset())) == ["b", "c", "a"]


def test_a_part_that_only_serves_others_comes_first_and_moves_none_of_them():
    base = Part("d", "", is_base=True)
    assert names(chosen(listed(Part("a", "", needs=("d",)), B, base), frozenset())) == ["d", "a", "b"]


def test_a_part_can_be_left_out():
    assert names(chosen(listed(A, B, C), left_out(" a, b "))) == ["c"]
    assert names(chosen(listed(A, B, C), left_out(""))) == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("those", "without", "refusal"),
    [
        ((A, B, C), "d", "there is no part 'd'. Leave out some of: a, b, c"),
        ((A, B, C), "c", "the part 'a' needs 'c', which is left out"),
        ((Part("a", "", needs=("b",)), Part("b", "", needs=("a",))), "", "in a circle: "),
    ],
)
def test_a_list_that_cannot_be_is_refused(those, without, refusal):
    with pytest.raises(ValueError, match=refusal):
        chosen(listed(*those), left_out(without))


@pytest.mark.parametrize("part", parts.parts(), ids=lambda part: part.name)
def test_every_place_of_a_part_is_there(part):
    there = [part.faces, *(its for other, its in part.also.items() if parts.has(other))]
    places = [place for its in there for face, place in its.items() if (PACKAGE / TOOLS.get(face, "")).exists()]
    for place in [*places, *part.exports.values()]:
        assert load(place) is not None, place


@pytest.mark.parametrize("part", parts.parts(), ids=lambda part: part.name)
def test_what_needs_another_part_stands_in_its_folder(part):
    for other, its in part.also.items():
        folder = f"vllm_rollout.parts.{part.name}.with_{other}."
        assert [place for place in its.values() if not place.startswith(folder)] == []


def test_needs_form_no_circle_and_name_parts():
    assert {need for part in parts.parts() for need in part.needs} <= {part.name for part in parts.parts()}


@pytest.fixture
def listing(monkeypatch):
    """Lists these parts in place of the installed ones."""

    def instead(*those: Part, without: str = "") -> None:
        monkeypatch.setattr(parts, "installed_parts", lambda: listed(*those))
        monkeypatch.setenv(parts.WITHOUT, without)
        parts.parts.cache_clear()

    yield instead
    monkeypatch.undo()
    parts.parts.cache_clear()


def test_faces_are_those_of_the_parts_that_are_there(listing):
    sep, join = "os.path:sep", "os.path:join"
    both = Part("both", "", also={"b": {"flags": join}})
    listing(Part("a", "", faces={"flags": sep}), Part("b", ""), both)
    assert [name for name, _ in parts.faces("flags")] == ["a", "both"]
    assert parts.face("a", "flags") == "/"
    assert parts.face("b", "flags") is None
    listing(Part("a", "", faces={"flags": sep}), Part("b", ""), both, without="b")
    assert [name for name, _ in parts.faces("flags")] == ["a"]
    assert not parts.has("b")
