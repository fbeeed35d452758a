"""Traces and machines for the simulator's tests."""

from collections.abc import Mapping, Sequence

from tests.parts.pruning.steps import steps_of
from vllm_rollout.parts.pruning.rules.judge import Judge
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey
from vllm_rollout.parts.pruning.simulated import score
from vllm_rollout.parts.shaping.rules.cost import CostModel, PTLCurve
from vllm_rollout.parts.shaping.rules.trace import Trace, TracedCandidate, TracedPrompt, TracedRollout
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.race import PoolCandidate, Race
from vllm_rollout.simulator.rank import run_races

FLAT = CostModel(((0.0, PTLCurve((1.0, 2.0), (1.0, 1.0))),))
LINEAR = CostModel(((0.0, PTLCurve((1.0, 2.0), (1.0, 2.0))),))
"""A step takes as many seconds as candidates run."""
DETAILED = CostModel(
    ((16.0, PTLCurve((1.0, 4.0, 8.0), (0.5, 1.0, 3.0))), (64.0, PTLCurve((1.0, 4.0, 8.0), (0.5, 1.5, 6.0)))),
    prefill_s_per_token=0.25,
    step_prefill_s=0.125,
)


def traced(*rollouts: Mapping[str, Sequence[int]], max_tokens: int | None = None, **fields) -> Trace:
    """Rollouts of {prompt id: lengths}; a length of `max_tokens` is cut there."""
    return Trace(
        tuple(
            TracedRollout(
                tuple(
                    TracedPrompt(
                        id,
                        tuple(TracedCandidate(n, "length" if n == max_tokens else "stop") for n in lengths),
                        max_tokens=max_tokens,
                    )
                    for id, lengths in rollout.items()
                )
            )
            for rollout in rollouts
        ),
        **fields,
    )


def future(num_tokens: int, end="stop", score: float | None = None) -> PoolCandidate:
    return PoolCandidate(num_tokens, end, num_tokens, False, score, None)


def pool(*lengths: int) -> list[PoolCandidate]:
    return [future(length) for length in lengths]


def warm_judge(detection_length: int) -> Judge:
    """One that has seen enough rewards to prune: high scores succeed."""
    judge = Judge()
    learning = judge.learning_of(HeadKey(detection_length))
    for i in range(40):
        calibrator = learning.calibrators["confidence"]
        calibrator.observe(i / 40)
        calibrator.add(i / 40, i % 3 != 0 and i > 10, 1.0)
    return judge


def run_rank(machine: Machine, races: Sequence[Race], judge: Judge | None = None):
    return run_races(machine, races, steps_of(judge or Judge()))


def scored(race: Race, seed: int = 0) -> Race:
    """A group whose candidates are scored."""
    score(race, "rollout", seed)
    return race
