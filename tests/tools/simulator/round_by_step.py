"""Runs of rounds in which every step of every rank is made: what the simulator's rounds are held against.

Lengths, ranks, messages and places are kept in plain lists here; of `group/` it uses what an engine and an API process
would: `GroupSteps`, `Run` and `RoundProgress`.
"""

from dataclasses import dataclass, field
from math import inf

from tests.parts.pruning.steps import said
from tests.parts.rounds.steps import is_lost
from tests.support.steps import group_steps
from vllm_rollout.kernel.rules.plan import GroupPlan
from vllm_rollout.kernel.rules.selection import conclude
from vllm_rollout.kernel.rules.step import GroupSteps
from vllm_rollout.kernel.rules.types import Ending
from vllm_rollout.parts.pruning.rules.assessment import Confidence
from vllm_rollout.parts.pruning.rules.pruning_plan import Observation
from vllm_rollout.parts.pruning.rules.step import PRUNING
from vllm_rollout.parts.rounds.rules.race import RacePlace
from vllm_rollout.parts.rounds.rules.round_progress import GroupEnd, RoundProgress
from vllm_rollout.parts.rounds.rules.rounds import Run
from vllm_rollout.parts.rounds.rules.step import PLACE, RoundsStep
from vllm_rollout.parts.rounds.with_shaping.simulated.data import Trainer
from vllm_rollout.parts.shaping.rules.history import LengthHistory, observed_lengths
from vllm_rollout.parts.shaping.rules.launch_order import launch_order, waiting_groups
from vllm_rollout.parts.shaping.rules.moments import expected_remaining


@dataclass
class Candidate:
    id: object
    group: object
    future: object
    prompt_tokens: int
    detection_length: int | None = None
    """At which it is scored, if at all."""
    num_tokens: int = 0
    runs: bool = False

    @property
    def state(self):
        return self.group.state(self.id.index)

    @property
    def ending(self):
        cut = self.state == "finished" and self.future.end == "length"
        by_itself = self.future.end == "stop" and self.num_tokens == self.future.num_tokens
        return Ending(self.id.index, self.state, self.num_tokens, cut, self.group.end_step(self.id.index), by_itself)


@dataclass
class StepEngine:
    cost: object
    slots: float
    steps: GroupSteps = field(default_factory=group_steps)
    candidates: list = field(default_factory=list)
    messages: list = field(default_factory=list)
    between_s: float = 0.0
    end_s: float | None = None
    """End of the running step."""

    @property
    def begins(self):
        """Earliest time at which the engine can begin a step."""
        if self.end_s is not None:
            return inf
        if any(c.runs or c.state == "running" for c in self.candidates):
            return self.between_s
        return max(self.between_s, min((at for at, _ in self.messages), default=inf))

    def begin(self, now):
        self.between_s = now
        due = [message for message in self.messages if message[0] <= now]
        self.messages = [message for message in self.messages if message[0] > now]
        for _, (kind, what) in sorted(due, key=lambda message: message[0]):
            if kind == "cut":
                self.steps.part(RoundsStep).cut(what, self.steps)
            else:
                self.launch(*what)
        seconds, admitted = 0.0, False
        for candidate in self.candidates:
            if (
                candidate.state == "running"
                and not candidate.runs
                and sum(c.runs for c in self.candidates) < self.slots
            ):
                candidate.runs = admitted = True
                seconds += candidate.prompt_tokens * self.cost.prefill_s_per_token
        running = [c for c in self.candidates if c.runs]
        if running:
            context = sum(c.prompt_tokens + c.num_tokens for c in running) / len(running)
            seconds += self.cost.step_prefill_s * admitted + self.cost.ptl(len(running), context)
            self.end_s = now + seconds

    def launch(self, name, plan, futures, prompt_tokens, place=None, scoring=None):
        detection_length = None if plan.pruning is None else plan.pruning.detection_length
        its = said(scoring) | ({} if place is None else PLACE.value(place))
        for index, future in enumerate(futures):
            id, group = self.steps.launch(name, plan.terms, index, said=its)
            self.candidates.append(Candidate(id, group, future, prompt_tokens, detection_length))

    def end(self):
        """Returns (candidates that ended, [(group, its candidates, whether it lost its race)] that are over,
        {group: (candidates that go on, tokens of the longest that does not)})."""
        self.between_s, self.end_s = self.end_s, None
        ended, due = 0, {}
        for candidate in self.candidates:
            if candidate.runs:
                candidate.num_tokens += 1
                if candidate.num_tokens == candidate.future.num_tokens:
                    candidate.runs = False
                    ended += 1
                    self.steps.ended(candidate.id, candidate.group, candidate.future.end, candidate.num_tokens)
                elif candidate.num_tokens == candidate.detection_length:
                    due[candidate.id] = Observation(Confidence(*[candidate.future.score] * 3))
        by_id = {c.id: c for c in self.candidates}
        verdicts = self.steps.close_step({PRUNING: due} if due else {}, lambda id: by_id[id].num_tokens)
        for id in verdicts.stop:
            by_id[id].runs = False
        over = [
            (name, its := [c for c in self.candidates if c.id.group_id == name], is_lost(its[0].group))
            for name in verdicts.over
        ]
        left = {}
        for name in {c.id.group_id for c in self.candidates}:
            its = [c for c in self.candidates if c.id.group_id == name]
            if num_running := sum(c.state == "running" for c in its):
                left[name] = num_running, max((c.num_tokens for c in its if c.state != "running"), default=0)
        return ended + len(verdicts.stop), over, left


def round_by_step(opened, plans, futures, prompt_tokens, cost, num_ranks, slots, message_s, turn, lengths, order):
    """One round: (seconds, fates by position, results by position, whose turn it is to get a group)."""
    progress = RoundProgress(opened)
    progress.start_in(order)
    engines = [StepEngine(cost, inf if slots is None else slots) for _ in range(num_ranks)]
    places = inf if slots is None else 2 * slots * num_ranks
    taken, work, results = 0, [{} for _ in range(num_ranks)], {}

    def work_of(position, num_candidates, age):
        if lengths[position] is None:
            return num_candidates
        return round(num_candidates * expected_remaining(age, lengths[position]))

    rank_of, to_api, waiting = {}, [], None
    now = 0.0
    first = True
    while first or not progress.is_over:
        if not first:
            times = [(e.end_s, 0, r) for r, e in enumerate(engines) if e.end_s is not None]
            times += [(e.begins, 2, r) for r, e in enumerate(engines) if e.begins < inf]
            times += [(at, 1, number) for number, (at, *_) in enumerate(to_api)]
            now, order, number = min(times)
            if order == 2:
                engines[number].begin(now)
                continue
            if order == 0:
                ended, over, left = engines[number].end()
                if ended:
                    to_api.append((now + message_s, ended, over, left))
                continue
            _, ended, over, left = to_api.pop(number)
            for name, (num_running, age) in left.items():
                work[rank_of[int(name)]][name] = work_of(int(name), num_running, age)
            taken -= ended
            was_cut = progress.is_cut
            for name, candidates, lost in over:
                position = int(name)
                del work[rank_of[position]][name]
                result = results[position] = conclude(plans[position], [c.ending for c in candidates])
                longest = max((result.endings[index].num_tokens for index in result.selected), default=0)
                deferred = lost or any(ending.state == "deferred" for ending in result.endings)
                progress.group_over(position, GroupEnd(result.status == "complete", deferred, longest))
            if opened.kind == "short" and num_ranks > 1 and progress.is_cut and not was_cut:
                for engine in engines:
                    engine.messages.append((now + message_s, ("cut", opened.key)))
        first = False
        while True:
            if waiting is None:
                waiting = progress.start()
            if waiting is None:
                break
            wanted = plans[waiting].num_candidates
            if progress.is_cut:
                progress.withdraw(waiting)
            elif taken and taken + wanted > places:
                break
            else:
                taken += wanted
                rank = min(range(num_ranks), key=lambda r: (sum(work[r].values()), (r - turn) % num_ranks))
                turn = (rank + 1) % num_ranks
                work[rank][str(waiting)] = work_of(waiting, wanted, 0)
                rank_of[waiting] = rank
                place = RacePlace(opened.key, progress.num_wanted, waiting) if opened.kind == "short" else None
                group = (str(waiting), plans[waiting], futures[waiting], prompt_tokens[waiting], place)
                engines[rank].messages.append((now + message_s, ("launch", group)))
            waiting = None
    return now, progress, results, turn


def run_by_step(data, setting, cost, *, epochs, seed, num_ranks, slots, message_s):
    """Every round of a run: (kind, seconds, {(prompt, epoch): returned lengths}, generated tokens, deferred)."""
    run, trainer = Run(setting.terms), Trainer(data.prompts, epochs, seed)
    prompts = {prompt.id: prompt for prompt in data.prompts}
    short = setting.group.plan(max_candidates=64)
    rounds, turn, history = [], 0, LengthHistory()
    while trainer.num_left or run.num_waiting:
        hand_in = trainer.hand_in(run)
        opened = run.plan(str(run.num_rounds), hand_in.prompts, kind=hand_in.kind)
        run.begin(opened)
        plan = short if opened.kind == "short" else GroupPlan(setting.terms.group_size)
        entries = opened.all_entries
        futures = [
            data.candidates(prompts[e.prompt_id], e.prompt.epoch, e.num_deferred, plan.num_candidates) for e in entries
        ]
        prompt_tokens = [prompts[e.prompt_id].prompt_tokens for e in entries]
        lengths = [history.of(e.prompt_id) or history.dataset() for e in entries]
        plans, order = [plan] * len(entries), range(len(entries))
        if opened.wants_all and slots is not None:
            known = history.statistics(e.prompt_id for e in entries)
            order = launch_order(waiting_groups(plans, known, [None] * len(entries)), slots * num_ranks).positions
        seconds, progress, results, turn = round_by_step(
            opened, plans, futures, prompt_tokens, cost, num_ranks, slots, message_s, turn, lengths, order
        )
        for position, result in results.items():
            history.observe(entries[position].prompt_id, observed_lengths(result.endings))
        back = {
            (entry.prompt_id, entry.prompt.epoch): tuple(
                results[position].endings[index].num_tokens for index in results[position].selected
            )
            for position, entry in enumerate(entries)
            if progress.fates.get(position) == "returned"
        }
        generated = sum(result.generated_tokens for result in results.values())
        record = run.close(progress.outcomes(), seconds, generated, 0)
        rounds.append((opened.kind, seconds, back, generated, record.num_deferred))
    return rounds
