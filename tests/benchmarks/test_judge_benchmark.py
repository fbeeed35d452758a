"""The replay of a rollout beside a judge: who has the device, and what that does to both."""

from types import SimpleNamespace

import pytest

from benchmarks.rewards.judge_emulated import Answer, Step, replay

STEPS = [Step(1.0, [Answer(0, 10)]), Step(1.0, []), Step(1.0, [Answer(0, 5)])]


class OneSecondJudge:
    """Grades all that it was asked in a step of one second; the step after it takes no time, as vLLM's."""

    def __init__(self):
        self.seconds, self.steps, self.asked, self.clears = 0.0, [], [], False

    def add(self, name, length, *, prompt_token_ids, max_tokens):
        self.asked.append(name)

    def step(self):
        if not self.asked and not self.clears:
            return False
        self.clears = bool(self.asked)
        if self.asked:
            self.seconds += 1
            output = SimpleNamespace(req_ids=self.asked, sampled_token_ids=[[1]] * len(self.asked))
            self.steps.append(SimpleNamespace(output=output))
            self.asked = []
        return True


@pytest.mark.parametrize(("way", "rollout_s", "last_grade_s", "waits_s"), [
    ("own", 3, 4, [1, 1]),
    ("reserved 0.5", 6, 8, [2, 2]),
    ("reserved 0.25", 4, 28 / 3, [4, 16 / 3]),  # the second answer waits for the first one's grade
    ("slices", 4, 5, [2, 1]),
    ("turns", 4, 5, [1, 1]),
    ("judge", 4, 5, [1, 1]),
    ("after", 3, 4, [3, 1]),
])  # fmt: skip
def test_a_device_is_shared_as_its_arrangement_says(way, rollout_s, last_grade_s, waits_s):
    found = replay(STEPS, OneSecondJudge(), way)
    assert (found.rollout_s, found.last_grade_s) == (pytest.approx(rollout_s), pytest.approx(last_grade_s))
    assert found.waits_s == pytest.approx(waits_s)
