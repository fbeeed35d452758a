"""Fields of sessions: their ranges, and their refusal by a server without the part."""

from __future__ import annotations

import pytest

from tests.support.left_out import parts_left_out
from tests.without import with_dependents
from vllm_rollout.kernel.rules.rows import PlanError, rows
from vllm_rollout.kernel.xargs import plan_from_xargs
from vllm_rollout.parts.sessions.http.fields import TurnFields


def test_a_time_after_which_every_session_would_be_void_is_not_in_its_range() -> None:
    assert not rows(TurnFields)["idle_timeout_s"].takes.holds(0)


@pytest.mark.parametrize("name", ["rollout_session", "rollout_last", "rollout_max_turns"])
def test_a_turn_is_refused_where_nobody_claims_it(name: str) -> None:
    with pytest.raises(PlanError, match=f"^{name}: is not a field of this version; allowed here: "):
        plan_from_xargs({name: 1}, 1, max_candidates=8)
    left_out = parts_left_out(with_dependents(["sessions"]))
    with left_out, pytest.raises(PlanError, match=f"^{name}: this server runs without the part 'sessions'"):
        plan_from_xargs({name: 1}, 1, max_candidates=8)
