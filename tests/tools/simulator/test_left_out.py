"""A simulation without some of the parts: what needs one is refused, and all else works."""

import pytest

from vllm_rollout.kernel import parts
from vllm_rollout.simulator.settings import setting_fields

PARTS = {part.name for part in parts.parts()}
NEEDED = {"memories", "shaping"}
"""A simulation needs lengths and costs, and shaping needs memories."""
GENERATED = ("--generate", "prompts=2,candidates=4,steps=1,max_tokens=50")


@pytest.fixture
def without(monkeypatch):
    """Leaves parts out."""

    def leave_out(names: str) -> None:
        monkeypatch.setenv(parts.WITHOUT, names)
        forget()

    def forget() -> None:
        parts.parts.cache_clear()
        setting_fields.cache_clear()

    yield leave_out
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize(
    ("names", "flags", "named"),
    [
        ("drafts", ("--drafts",), "--drafts is of the part 'drafts'"),
        ("drafts", ("--setting", "drafts=true"), "drafts=true is of the part 'drafts'"),
        pytest.param(
            "emulation",
            ("--drafts", "--draft-acceptance", "device.json"),
            "--draft-acceptance is of the part 'emulation'",
            marks=pytest.mark.skipif("drafts" not in PARTS, reason="about drafts, too"),
        ),
        ("rounds", ("--rounds", "2"), "--rounds is of the part 'rounds'"),
        ("sessions,trainers", ("--sessions", "turns=2"), "--sessions is of the part 'sessions'"),
        ("moving,fleet", ("--data-parallel-size", "2"), "--data-parallel-size is of the part 'moving'"),
        ("pruning", ("--detection-length", "9"), "--detection-length is of the part 'pruning'"),
        ("page", ("--output-trace", "whatif.jsonl"), "--output-trace is of the part 'page'"),
    ],
)
def test_a_flag_of_a_part_that_is_left_out_is_refused(run, without, names, flags, named):
    if missing := set(names.split(",")) - PARTS:
        pytest.skip(f"about {missing}, which `python -m tests.without` has removed")
    without(names)
    result = run(*GENERATED, *flags)
    assert result.exit_code == 2
    assert f"{named}, which is left out" in result.stderr


def test_a_field_of_a_part_that_is_left_out_is_none(run, without):
    without("pruning")
    result = run(*GENERATED, "--setting", "redundancy=1,detection_length=9")
    assert result.exit_code == 2
    assert "'detection_length' is not a field" in result.stderr


def test_without_every_part_but_lengths_and_costs_a_replay_has_the_same_numbers(run, without, numbers):
    assert run(*GENERATED).exit_code == 0
    with_all = numbers()
    without(",".join(PARTS - NEEDED))
    assert run(*GENERATED).exit_code == 0
    assert numbers() == with_all
