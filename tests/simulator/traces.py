"""Traces and machines for the simulator's tests, and a replay that makes every single step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_rollout.group.judging.judge import Judge
from vllm_rollout.group.judging.ledger import Scoring
from vllm_rollout.group.lengths.cost import CostModel, PTLCurve
from vllm_rollout.group.plans.plan import GroupPlan
from vllm_rollout.group.racing.lifecycle import Group
from vllm_rollout.group.step.step import GroupSteps
from vllm_rollout.group.types import CandidateId, Confidence, Ending, HeadKey, Observation
from vllm_rollout.simulator.machine import Machine
from vllm_rollout.simulator.race import PoolCandidate, Race
from vllm_rollout.simulator.rank import run_races
from vllm_rollout.trace.rows import Trace, TracedCandidate, TracedPrompt, TracedRollout

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
    return run_races(machine, races, judge or Judge())


@dataclass
class Step:
    """A candidate of the step-by-step replay."""

    id: CandidateId
    future: PoolCandidate
    num_tokens: int = 0
    runs: bool = False

    @property
    def index(self) -> int:
        return self.id.index


@dataclass
class StepRace:
    id: str
    plan: GroupPlan
    group: Group
    steps: list[Step]
    prompt_tokens: int = 0
    scoring: Scoring | None = None
    over_s: float | None = None

    def endings(self) -> tuple[Ending, ...]:
        return tuple(
            Ending(
                step.index,
                self.group.state(step.index),
                step.num_tokens,
                self.group.state(step.index) == "finished" and step.future.end == "length",
                self.group.end_step(step.index),
                step.future.end == "stop" and step.num_tokens == step.future.num_tokens,
            )
            for step in self.steps
        )


@dataclass
class StepByStep:
    """Every step of one rank, one after the other."""

    cost: CostModel
    slots: int
    judge: Judge
    races: list[StepRace] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.group_steps = GroupSteps(self.judge)

    def add(self, id, plan, futures, prompt_tokens=0, scoring=None) -> None:
        steps = []
        for index, future in enumerate(futures):
            candidate_id, group = self.group_steps.launch(id, plan.terms, index, scoring=scoring)
            steps.append(Step(candidate_id, future))
        self.races.append(StepRace(id, plan, group, steps, prompt_tokens, scoring))

    def run(self) -> None:
        while any(not race.group.over for race in self.races):
            self._make_step()

    def _make_step(self) -> None:
        everyone = [(race, step) for race in self.races for step in race.steps]
        admitted = 0
        for race, step in everyone:
            running = sum(other.runs for _, other in everyone)
            if not step.runs and race.group.state(step.index) == "running" and running < self.slots:
                step.runs = True
                admitted += 1
                self.seconds += self.cost.prefill_s_per_token * race.prompt_tokens
        self.seconds += self.cost.step_prefill_s if admitted else 0.0
        running = [(race, step) for race, step in everyone if step.runs]
        context = sum(race.prompt_tokens + step.num_tokens for race, step in running) / len(running)
        self.seconds += self.cost.ptl(len(running), context)
        due = {}
        for race, step in running:
            step.num_tokens += 1
            if step.num_tokens == step.future.num_tokens:
                step.runs = False
                self.group_steps.ended(step.id, race.group, step.future.end, step.num_tokens)
            elif race.scoring is not None and step.num_tokens == race.plan.pruning.detection_length:
                due[step.id] = Observation(Confidence(*[step.future.score] * 3))
        by_id = {step.id: step for _, step in everyone}
        for candidate_id in self.group_steps.close_step(due, lambda id: by_id[id].num_tokens).stop:
            by_id[candidate_id].runs = False
        for race in self.races:
            if race.group.over and race.over_s is None:
                race.over_s = self.seconds
