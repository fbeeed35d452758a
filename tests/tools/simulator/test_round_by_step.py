"""The simulator's rounds against runs in which every step is made; short lengths, so that ties are many."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.simulator.round_by_step import run_by_step
from tests.tools.simulator.traces import DETAILED, FLAT, LINEAR, future
from vllm_rollout.parts.rounds.rules.rounds import RunTerms
from vllm_rollout.parts.rounds.with_shaping.simulated.data import DataPrompt, RunConditions
from vllm_rollout.parts.rounds.with_shaping.simulated.run_replay import replay_run
from vllm_rollout.parts.rounds.with_shaping.simulated.settings import RoundSetting
from vllm_rollout.parts.shaping.rules.cost import CostModel
from vllm_rollout.simulator.machine import Machine

PREFILLING = CostModel(FLAT.curves, prefill_s_per_token=0.25, step_prefill_s=0.125)
NUM_CANDIDATES = 4
NUM_ATTEMPTS = 3


class Drawn:
    """Lengths by prompt, epoch and attempt, of which the later ones are the first again."""

    def __init__(self, lengths, prompt_tokens):
        self.prompts = [DataPrompt(n, f"q{n}", prompt_tokens[n], None) for n in range(len(lengths))]
        self._lengths = lengths

    def candidates(self, prompt, epoch, attempt, count):
        its = self._lengths[prompt.number][(epoch + attempt) % NUM_ATTEMPTS]
        return [future(length, end) for length, end in its[:count]]


candidate = st.tuples(st.integers(1, 9), st.sampled_from(["stop", "stop", "stop", "length"]))
attempts = st.lists(
    st.lists(candidate, min_size=NUM_CANDIDATES, max_size=NUM_CANDIDATES), min_size=NUM_ATTEMPTS, max_size=NUM_ATTEMPTS
)


@st.composite
def cases(draw, costs, most_ranks):
    num_prompts = draw(st.integers(4, 9))
    data = Drawn(
        draw(st.lists(attempts, min_size=num_prompts, max_size=num_prompts)),
        draw(st.lists(st.integers(0, 3), min_size=num_prompts, max_size=num_prompts)),
    )
    group_size = draw(st.integers(1, 2))
    terms = RunTerms(
        group_size, draw(st.integers(1, 3)), draw(st.sampled_from([1.0, 1.3])), draw(st.sampled_from([1.0, 1.5, 2.0]))
    )
    return (
        data,
        RoundSetting.of(terms),
        {
            "cost": draw(st.sampled_from(costs)),
            "epochs": draw(st.integers(1, 2)),
            "seed": draw(st.integers(0, 9)),
            "num_ranks": draw(st.integers(1, most_ranks)),
            "slots": draw(st.sampled_from([None, 4, 5])),
            "message_s": draw(st.sampled_from([0.0, 0.5, 1.0, 2.75])),
        },
    )


def simulated(data, setting, cost, *, epochs, seed, num_ranks, slots, message_s):
    # prompts shorter than a block share nothing: the step-by-step engine knows no prefix cache
    machine = Machine(cost, num_ranks, slots, block_size=64)
    outcome = replay_run(RunConditions(data, machine, epochs, seed, message_s), setting)
    return [
        (
            its.kind,
            its.seconds,
            {(prompt.prompt_id, prompt.epoch): prompt.lengths for prompt in its.returned},
            its.generated_tokens,
            its.num_deferred,
        )
        for its in outcome.rounds
    ]


@pytest.mark.thorough
@settings(max_examples=150)
@given(cases([FLAT, LINEAR, PREFILLING], most_ranks=3))
def test_rounds_are_every_single_step_of_every_rank(case):
    data, setting, its = case
    assert simulated(data, setting, **its) == run_by_step(data, setting, **its)


@pytest.mark.thorough
@settings(max_examples=60)
@given(cases([DETAILED], most_ranks=1))
def test_one_rank_agrees_where_times_are_not_exact(case):
    data, setting, its = case
    fast, slow = simulated(data, setting, **its), run_by_step(data, setting, **its)
    assert [one[1] for one in fast] == pytest.approx([one[1] for one in slow])
    assert [one[0::2] for one in fast] == [one[0::2] for one in slow]
