"""Rounds of groups that end when rewards differ, of filtering, and of a client that resamples: seconds and tokens.

Time is virtual: one engine whose step takes as long as RollPacker's 7B on an H800 (`benchmarks/rollpacker.py`). `SEATS`
groups run at once, and a round ends when `SEATS` groups with different rewards are complete. All prompts have the same
success rate (or rates of their own: `MIXED`), whatever the answer's length. Lengths are log-normal within and between
prompts, and so are grading times. There are as many graders as needed. A group without variance is replaced by the next
prompt.
- ours, by its launches: `decide` itself (enough under way for an even chance of variance); other chances; the prompt's
  rate known from 16 earlier answers; a quality head's estimates for answers that await their grade; `decide` in the
  order of grading; waves (as many, but only when nothing is under way, so no spare starts while a reward is awaited);
  one at a time; all of `max_candidates` from the start
- filter: plain groups of `GROUP_SIZE`. A group without variance is dropped, and the next prompt starts at once (rounds
  with `filter`)
- filter in batches: `SEATS` groups, wait for all, then as many again (DAPO's dynamic sampling)
- resample: the client gets a whole group. If its rewards are equal, the client asks for the same prompt again

Invariant: the same numbers for the same seed, and no timing of this machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from typing import Any, Literal, NamedTuple

import numpy as np

from benchmarks.common import median
from benchmarks.rollpacker import MODELS, TAILS
from vllm_rollout.group.rewards.until import (
    EVEN_CHANCE,
    UNIFORM,
    CandidateReward,
    CandidateStage,
    Decision,
    Order,
    Prior,
    UntilTerms,
    decide,
    num_needed,
)

GROUP_SIZE, MAX_CANDIDATES, SEATS = 8, 32, 32
RATES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
MIXED = (0.5, 0.5)
"""Beta distribution of success rates for prompts that differ: many never or always succeed."""
MODEL = "7B/8k"
PROMPT_TOKENS = 200
GRADING_MEDIAN_S, GRADING_SIGMA = 1.0, 0.6
SLOW_GRADING_S = 10.0
SLOW_WAYS = ("ours", "ours_head", "ours_known", "waves", "all")
HISTORY = 16
"""Earlier answers of a prompt, from which its success rate is known."""
COST = MODELS[MODEL].cost


class Way(NamedTuple):
    title: str
    color: str
    max_candidates: int = MAX_CANDIDATES
    order: Order = "index"
    launches: Literal["even", "waves", "one", "again", "all"] = "even"
    """`even`: as `decide` says. `waves`, `one`, `again`: only when nothing is under way. `all`: at the start."""
    chance: float = EVEN_CHANCE
    knows_rate: bool = False
    in_batches: bool = False
    head: float | None = None
    """None, or the quality head's separation: distance of the scores of right and wrong answers, in standard deviations
    (1: an AUC of 0.76, 2: 0.92). Its probabilities are calibrated as if half of all answers were right.
    """


WAYS = {
    "ours": Way("ours", "#0f766e"),
    "ours_known": Way("ours, rate known", "#14b8a6", knows_rate=True),
    "ours_30": Way("ours, a chance of 0.3", "#99f6e4", chance=0.3),
    "ours_80": Way("ours, a chance of 0.8", "#115e59", chance=0.8),
    "ours_grading": Way("ours, by grading", "#84cc16", order="grading"),
    "ours_head": Way("ours, a head's word", "#0891b2", head=1.0),
    "waves": Way("ours, in waves", "#5eead4", launches="waves"),
    "one": Way("ours, one at a time", "#7c3aed", launches="one"),
    "all": Way("ours, all at once", "#2563eb", launches="all"),
    "filter": Way("filter, next prompt", "#f59e0b", max_candidates=GROUP_SIZE),
    "batches": Way("filter in batches", "#b45309", max_candidates=GROUP_SIZE, in_batches=True),
    "resample": Way("client resamples", "#64748b", launches="again"),
}


@dataclass(slots=True)
class Running:
    group: Group
    index: int
    reward: float
    length: int
    grading_s: float
    start: float = 0.0
    """Steps of the engine before its launch."""
    stage: CandidateStage = "running"
    place: int = 0
    chance: float | None = None
    """Success probability by the head, or None."""


@dataclass(slots=True, eq=False)
class Group:
    scale: float
    """Deviation of the prompt's log lengths from the overall median."""
    rate: float
    prior: Prior
    candidates: list[Running] = field(default_factory=list)
    num_graded: int = 0


@cache
def step_s(batch_size: int, context: int) -> float:
    """Seconds of a step; context in units of 64 tokens."""
    return COST.ptl(batch_size, 64 * context)


class Round:
    """One round of one way, event by event: an answer ends, or a grade comes."""

    def __init__(self, way: Way, rate: float | None, seed: int, grading_s: float = GRADING_MEDIAN_S) -> None:
        self.way, self.rate, self.grading_s = way, rate, grading_s
        self.rng = np.random.default_rng(seed)
        tail = TAILS[MODEL].described()
        self.within, self.between = tail["sigma"], tail["prompt_sigma"]
        self.log_median = math.log(tail["mean"]) - (self.within**2 + self.between**2) / 2
        self.terms = UntilTerms(GROUP_SIZE, way.max_candidates, way.order)
        self.seconds = self.steps = self.tokens = 0.0
        self.starts = 0.0
        """Sum over running candidates of the step at which each started."""
        self.num_running = self.num_groups = self.num_teach = self.num_idle = 0
        self.ends: list[tuple[float, int, Running]] = []
        self.grades: list[tuple[float, int, Running]] = []
        self.num_launched = 0

    def run(self) -> dict[str, float]:
        for _ in range(SEATS):
            self.begin()
        while self.num_teach < SEATS or (self.way.in_batches and self.num_idle < SEATS):
            self.next_event()
        self.tokens += sum(self.steps - each.start for _, _, each in self.ends if each.stage == "running")
        return {
            "seconds": self.seconds / SEATS,
            "tokens": self.tokens / SEATS,
            "candidates": self.num_launched / SEATS,
            "prompts": self.num_groups / SEATS,
        }

    def begin(self) -> None:
        self.num_groups += 1
        rate = self.rng.beta(*MIXED) if self.rate is None else self.rate
        prior = Prior(1 + HISTORY * rate, 1 + HISTORY * (1 - rate)) if self.way.knows_rate else UNIFORM
        self.act(Group(self.between * self.rng.standard_normal(), rate, prior))

    def next_event(self) -> None:
        while self.ends and self.ends[0][2].stage != "running":
            heappop(self.ends)
        while self.grades and self.grades[0][2].stage != "awaited":
            heappop(self.grades)
        end_s = math.inf
        if self.ends:
            each_s = step_s(self.num_running, round((PROMPT_TOKENS + self.steps - self.starts / self.num_running) / 64))
            end_s = self.seconds + (self.ends[0][0] - self.steps) * each_s
        if self.grades and self.grades[0][0] <= end_s:
            grade_s, _, candidate = heappop(self.grades)
            if self.ends:
                self.steps += (grade_s - self.seconds) / each_s
            self.seconds = grade_s
            candidate.stage, candidate.place = "graded", candidate.group.num_graded
            candidate.group.num_graded += 1
            self.act(candidate.group)
            return
        self.steps, serial, candidate = heappop(self.ends)
        self.seconds = end_s
        self.leave(candidate, "awaited")
        heappush(self.grades, (self.seconds + candidate.grading_s, serial, candidate))

    def leave(self, candidate: Running, stage: CandidateStage) -> None:
        if candidate.stage == "running":
            self.tokens += self.steps - candidate.start
            self.starts -= candidate.start
            self.num_running -= 1
        candidate.stage = stage

    def launch(self, group: Group) -> None:
        rng = self.rng
        length = min(math.exp(self.log_median + group.scale + self.within * rng.standard_normal()), 8192)
        grading_s = self.grading_s * math.exp(GRADING_SIGMA * rng.standard_normal())
        reward = float(rng.random() < group.rate)
        candidate = Running(group, len(group.candidates), reward, max(1, round(length)), grading_s, self.steps)
        if (apart := self.way.head) is not None:
            score = rng.standard_normal() + apart * (reward - 0.5)
            candidate.chance = 1 / (1 + math.exp(-apart * score))
        group.candidates.append(candidate)
        heappush(self.ends, (self.steps + candidate.length, self.num_launched, candidate))
        self.starts += self.steps
        self.num_running += 1
        self.num_launched += 1

    def act(self, group: Group) -> None:
        known = [
            CandidateReward(
                each.index,
                each.stage,
                each.reward if each.stage == "graded" else None,
                each.place,
                each.chance if each.stage == "awaited" else None,
            )
            for each in group.candidates
        ]
        decision = decide(self.terms, known, group.prior, self.way.chance)
        num_open = sum(each.stage in ("running", "awaited") for each in group.candidates)
        if self.way.launches == "again" and num_open:
            return
        for index in decision.stop:
            self.leave(group.candidates[index], "gone")
        if decision.kind == "wait":
            for _ in range(self.num_to_launch(group, decision, num_open)):
                self.launch(group)
            return
        self.num_teach += decision.teaches
        if not self.way.in_batches:
            if not decision.teaches:
                self.begin()
            return
        self.num_idle += 1
        if self.num_idle == SEATS and self.num_teach < SEATS:
            self.num_idle = 0
            for _ in range(SEATS):
                self.begin()

    def num_to_launch(self, group: Group, decision: Decision, num_open: int) -> int:
        left = self.terms.max_candidates - len(group.candidates)
        if self.way.launches == "even":
            return decision.launch
        if self.way.launches == "all":
            return left
        if not group.candidates:
            return GROUP_SIZE
        if num_open:
            return 0
        rewards = [each.reward for each in group.candidates if each.stage == "graded"]
        wave = {"waves": num_needed(group.prior, rewards, left), "one": 1, "again": GROUP_SIZE}
        return min(left, wave[self.way.launches])


def rounds(
    seeds: Sequence[int], ways: Sequence[str] = tuple(WAYS), grading_s: float = GRADING_MEDIAN_S
) -> list[dict[str, Any]]:
    """Medians over seeds, by way and rate. A rate of None stands for MIXED."""
    rows = []
    for rate in (*RATES, None):
        for name in ways:
            runs = [Round(WAYS[name], rate, seed, grading_s).run() for seed in seeds]
            medians = {key: round(median(run[key] for run in runs), 3) for key in runs[0]}
            rows.append({"rate": rate, "way": name, **medians})
    return rows
