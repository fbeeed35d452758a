"""The loop over rounds that the documentation shows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from examples import rounds
from tests.kernel.http.conftest import make_app, serving
from tests.kernel.http.fake_engine import FakeEngine
from vllm_rollout.kernel.http.answers import GroupAnswer


@pytest.mark.parametrize("num_groups", [3, 8, 11, 20])
def test_started_again_after_a_crash_it_trains_on_each_prompt_once(
    num_groups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "DONE", tmp_path / "done")
    trained: Counter[str] = Counter()
    used: list[str] = []
    advantages = rounds.advantages

    def counted(group: GroupAnswer) -> list[float]:
        if len(used) == num_groups:
            trained.update(
                rounds.DONE.read_text().split() if rounds.DONE.exists() else ()
            )  # the rest of a step is lost
            used.append("crashed")
            raise KeyboardInterrupt
        used.append(group.prompt_id)
        return advantages(group)

    monkeypatch.setattr(rounds, "advantages", counted)
    with serving(make_app(FakeEngine(), database=tmp_path / "runs.sqlite")) as url:
        with pytest.raises(KeyboardInterrupt):
            rounds.main(url, 26)
        used[num_groups:] = ["again"]
        rounds.main(url, 26)
    trained.update(used[num_groups + 1 :])
    assert trained == Counter(prompt["id"] for prompt in rounds.data(26))
    assert not rounds.DONE.exists()
