"""Fields of runs from earlier versions: an old name is refused with the new one, and kept runs are read."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernel.http.test_renamed import OLD_NAMES, REMOVED_NAMES, bodies
from vllm_rollout.kernel.http.body import RENAMED
from vllm_rollout.parts.rounds.client.run_calls import create_run, round


@OLD_NAMES
def test_a_run_and_its_rounds_have_the_new_name(old: str) -> None:
    """So that the kernel's test of all bodies looks at them."""
    have = {path for _, path, _, fields in bodies() if RENAMED[old] in fields}
    assert have >= {"/v1/runs", "/v1/runs/{run_id}/rounds"}


@OLD_NAMES
def test_the_client_of_runs_refuses_an_old_name_with_the_new_one(old: str) -> None:
    option: dict[str, Any] = {old: True}
    for call in (lambda: create_run(2, 2, **option), lambda: round("a", ["p"], key="k", **option)):
        with pytest.raises(TypeError, match=f"^{old}: renamed, write {RENAMED[old]}$"):
            call()


@REMOVED_NAMES
def test_the_client_of_runs_refuses_a_removed_option_with_what_to_do_instead(removed: str) -> None:
    with pytest.raises(TypeError, match=f"^{removed}: removed, leave it out: let rounds filter"):
        create_run(2, 2, **{removed: "variance"})
