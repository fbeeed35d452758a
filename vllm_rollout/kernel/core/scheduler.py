"""vLLM's schedulers, changed to obey group verdicts in the step from which the verdicts come.

Invariant: every candidate gets exactly one last output, in the step in which it ends or is stopped. An exception of our
code fails a candidate or a group, with its reason. It never reaches vLLM, which would end the engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_rollout.adapter.compat import check_vllm_version
from vllm_rollout.adapter.faults import Faults
from vllm_rollout.adapter.names import learned_name
from vllm_rollout.adapter.weights import listen_to_calls
from vllm_rollout.kernel.core.calls import add_rollout_calls
from vllm_rollout.kernel.core.candidate import END_REASONS, EngineCandidate, confidence_of, last_observations
from vllm_rollout.kernel.core.held_outputs import HeldOutputs, keep_first
from vllm_rollout.kernel.core.joining import Joining, JoinRefused
from vllm_rollout.kernel.core.last_outputs import empty_output, explain, failed_output, put, say_reasons
from vllm_rollout.kernel.core.parent import end_with_parent
from vllm_rollout.kernel.core.ports import CorePart, CoreParts
from vllm_rollout.kernel.core.slots import answer_for_room
from vllm_rollout.kernel.core.stop_strings import StopStrings
from vllm_rollout.kernel.core.versions import admitting, num_deferred, returns_experts
from vllm_rollout.kernel.core.weights import Weights
from vllm_rollout.kernel.parts import faces
from vllm_rollout.kernel.rules.detached import DetachedGroup, StayReason
from vllm_rollout.kernel.rules.lifecycle import Group
from vllm_rollout.kernel.rules.request_names import names_of_group
from vllm_rollout.kernel.rules.step import GroupSteps, LaunchRefused, Verdicts
from vllm_rollout.kernel.rules.types import ABORTED, CandidateId
from vllm_rollout.kernel.wire import REPORT_ATTRIBUTE, TAG_KEY, CandidateTag, EndingNote, RunnerReport
from vllm_rollout.kernel.xargs import as_written

logger = init_logger("vllm.vllm_rollout")
Kind = TypeVar("Kind")
VLLM_ERROR = "vLLM ended this request with an error, which the server's log has"
GRAMMAR_ERROR = (
    "vLLM ended this request with an error: its grammar could not be compiled, or rejected what was sampled. The "
    "server's log has the tokens."
)
UNMET = (
    "vllm_rollout: only %d of the %d siblings of a joined group (rollout_group_id, rollout_group_size) have come to "
    "this engine, and nothing else stops one of them. If a router spreads requests over several servers, let it keep a "
    "group together: its policy consistent_hash or sticky_least_loaded, and the group's name in the header "
    "X-Correlation-ID of each request. If nothing does, rollout_num_candidates is larger than what is sent. Said once; "
    "the metric vllm_rollout:joined_groups_unmet_total counts such groups."
)


class GroupSchedulerMixin:
    """Obeys group verdicts.

    Overrides: add_request, schedule, finish_requests, update_from_output, set_pause_state, reset_prefix_cache,
    _free_request, _preempt_request.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        end_with_parent()
        answer_for_room(self.kv_cache_manager)
        self.faults = Faults()
        self.weights = Weights(self)
        memories = next((make(dict(faces("memory"))) for _, make in faces("memories")), None)
        self.group_steps = GroupSteps([part() for _, part in faces("step")], contains=True, memories=memories)
        """Decides. All other code here translates and obeys."""
        self.clock = time.monotonic
        """Clock of groups that wait for siblings."""
        self._candidates: dict[str, EngineCandidate] = {}
        """Candidates by request id, from arrival until the step of their end is closed."""
        self.launched: dict[CandidateId, EngineCandidate] = {}
        """Those that are in a group."""
        self._ended: list[EngineCandidate] = []
        """Candidates that ended since the last step was closed."""
        self._joining = Joining(self.vllm_config)
        self._num_with_stop_strings = 0
        self._num_worker_errors = 0
        """Exceptions of ours that the worker has caught."""
        self.num_preemptions = 0
        self._preempted_aside = False
        """True if we have preempted a request since the last step, and no request may be admitted in the next one."""
        self._is_held, self._asked_pause = False, PauseState.UNPAUSED
        """True while the model lacks weights. What clients have asked for, which holds after that."""
        self.num_unmet = 0
        """Joined groups whose siblings did not come."""
        self.parts = CoreParts.of(self)

    def part(self, kind: type[Kind]) -> Kind:
        """The part's object in this engine core, by its class. Raises: LookupError if there is none."""
        return self.parts.part(kind)

    @property
    def num_internal_errors(self) -> int:
        """Exceptions of ours that were caught, here and in the worker."""
        return self.faults.num + self._num_worker_errors

    def cancel_groups(self, group_ids: Iterable[str]) -> None:
        """Stop the running candidates of these groups as deferred, in the next step.

        Groups that are over or have not begun are ignored.
        """
        for group_id in group_ids:
            self.group_steps.cancel(group_id)

    def abort_named(self, names: frozenset[str]) -> list[str]:
        """Abort the candidates whose request or group has one of these names. Returns the ids of those that ran."""
        candidates = self._named(names)
        for candidate in candidates:
            candidate.error = ABORTED
        found = [candidate.request.request_id for candidate in candidates]
        self.finish_requests(found, RequestStatus.FINISHED_ABORTED)
        return found

    def recompute(self, names: frozenset[str] | None) -> int:
        """Let candidates be computed again by the newest weights: those of groups with one of these names, or all.

        Returns the number of candidates that do so, see `Weights.recompute`.
        """
        candidates = self.launched.values() if names is None else self._named(names)
        num_recomputed = self.weights.recompute([candidate.request for candidate in candidates])
        if names is None:
            self.weights.all_recomputed()
        return num_recomputed

    def _named(self, names: frozenset[str]) -> list[EngineCandidate]:
        """Running candidates with one of these names, their request's or their group's."""
        return [
            candidate
            for id, candidate in self.launched.items()
            if candidate.end_reason is None
            and not names.isdisjoint(names_of_group(id.group_id) | names_of_group(candidate.request.request_id))
        ]

    def give_up(self, candidates: Mapping[str, Iterable[int]]) -> None:
        """Stop these candidates as surplus, in the next step. Unknown ones are ignored."""
        for group_id, indices in candidates.items():
            self.group_steps.give_up(group_id, indices)

    def forget_waiting(self) -> None:
        """Forget groups that have waited too long for siblings. Groups that have waited for long are counted before."""
        for group in self.group_steps.unmet(self.clock()):
            if not self.num_unmet:
                logger.warning(UNMET, group.num_launched, group.terms.num_candidates)
            self.num_unmet += 1
        for group_id in self.group_steps.forget_waiting(self.clock()):
            self.parts.call(CorePart.forget, group_id)

    def stays_because(self, group_id: str) -> StayReason | None:
        """Reason why this group cannot leave for another engine core now, or None."""
        if any(candidate.is_launched and candidate.id.group_id == group_id for candidate in self._ended):
            return "busy"
        return self.group_steps.stays_because(group_id)

    def candidates_of(self, group_id: str) -> list[EngineCandidate]:
        """Candidates of a group that run, wait or are preempted, by index."""
        return [self.launched[id] for id in self.group_steps.running(group_id)]

    def detach(self, group_id: str, candidates: Sequence[EngineCandidate]) -> DetachedGroup:
        """Forget a group whose candidates are in no queue. No client is notified, because they continue elsewhere."""
        request_ids = {candidate.id.index: candidate.request.request_id for candidate in candidates}
        for candidate in candidates:
            del self._candidates[candidate.request.request_id], self.launched[candidate.id]
            self._num_with_stop_strings -= candidate.stop_strings is not None
        self.finish_requests(list(request_ids.values()), RequestStatus.FINISHED_ABORTED)
        for finished in (self.finished_req_ids_dict or {}).values():
            finished.difference_update(request_ids.values())
        return self.group_steps.detach(group_id, request_ids)

    def attach(self, candidate: EngineCandidate, id: CandidateId, group: Group) -> None:
        """Register a candidate of another engine core, whose request is added next."""
        self._know(candidate, id, group)
        if candidate.stop_strings is not None:  # finds none, or the candidate would be over
            candidate.stop_strings.found_at(list(candidate.request.output_token_ids))

    def _know(self, candidate: EngineCandidate, id: CandidateId, group: Group) -> None:
        candidate.id, candidate.group, candidate.is_launched = id, group, True
        candidate.sampled_by(self.weights.sampling)
        self._candidates[candidate.request.request_id] = self.launched[id] = candidate
        if candidate.request.sampling_params.stop:
            candidate.stop_strings = StopStrings(self.vllm_config.model_config, candidate.request)
            self._num_with_stop_strings += 1

    def add_request(self, request: Request) -> None:
        try:
            self.weights.begin(request)
        except Exception as error:
            self.faults.caught("weights", error)
            request.skip_reading_prefix_cache = True
        super().add_request(request)
        if request.request_id in self._candidates:
            return  # it comes from another engine core
        params = request.sampling_params
        if params is None or not params.extra_args:
            return
        try:
            self._add(request)
        except Exception as error:
            candidate = self._candidates.get(request.request_id)
            if candidate is None:
                candidate = EngineCandidate(request, reads_notes=TAG_KEY in params.extra_args)
            self._fail(candidate, self.faults.caught("add_request", error))

    def _add(self, request: Request) -> None:
        """Launch or refuse a request with our fields."""
        if (tag := CandidateTag.of(request.sampling_params.extra_args)) is not None:
            self._launch(EngineCandidate(request, tag.output_interval), tag)
            return
        try:
            tag = self._joining.tag(request)
        except JoinRefused as refusal:
            self._refuse(EngineCandidate(request, reads_notes=False), str(refusal))
            return
        if tag is not None:
            self._launch(EngineCandidate(request, reads_notes=False), tag)

    def _launch(self, candidate: EngineCandidate, tag: CandidateTag) -> None:
        """Let a candidate enter its group, which may refuse it."""
        request = candidate.request
        self.forget_waiting()
        try:
            id, group = self.group_steps.launch(
                tag.group_id,
                tag.terms,
                tag.index,
                request_id=request.request_id,
                adapter=learned_name(request.lora_request),
                said=tag.said,
            )
        except LaunchRefused as refusal:
            self._refuse(candidate, str(refusal) if candidate.reads_notes else as_written(str(refusal))[1])
            return
        except Exception as error:
            reason = self.faults.caught("launch", error)
            self._fail(candidate, reason)
            self.group_steps.drop(tag.group_id)
            self._break(tag.group_id, reason)
            return
        self._know(candidate, id, group)

    def _refuse(self, candidate: EngineCandidate, refusal: str) -> None:
        """End a candidate without a token, in the next step."""
        request_id = candidate.request.request_id
        candidate.refusal = refusal
        self._candidates[request_id] = candidate
        self.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def _fail(self, candidate: EngineCandidate, reason: str) -> None:
        """End a candidate for this reason: in this step if the groups do not know yet which candidates ended, else in
        the next.
        """
        request_id = candidate.request.request_id
        candidate.error = reason
        candidate.held = HeldOutputs(1)  # the held outputs may be the cause
        self._candidates[request_id] = candidate
        if candidate.end_reason is None:
            self.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        if not candidate.is_told:
            candidate.end_reason = "failed"

    def _break(self, group_id: str, reason: str) -> None:
        """Fail all running candidates of a group that is forgotten."""
        for id in [id for id in self.launched if id.group_id == group_id]:
            candidate = self.launched.pop(id)
            candidate.is_launched = False
            self._fail(candidate, reason)
            candidate.is_told = True
        self.parts.call(CorePart.forget, group_id)

    def _fail_all(self, outputs: dict[int, EngineCoreOutputs], error: Exception) -> None:
        """Fail all candidates and forget their groups, because the exception of this step may concern any of them."""
        reason = self.faults.caught("update_from_output", error)
        self.group_steps = self.group_steps.fresh()
        for group_id in {id.group_id for id in self.launched}:
            self.parts.call(CorePart.forget, group_id)
        candidates, self._candidates = self._candidates, {}
        self.launched, self._ended, self._num_with_stop_strings = {}, [], 0
        self.finish_requests(list(candidates), RequestStatus.FINISHED_ABORTED)
        for step_outputs in outputs.values():
            step_outputs.outputs = [each for each in step_outputs.outputs if each.request_id not in candidates]
        for request_id, candidate in candidates.items():
            candidate.error = reason
            put(outputs, candidate.request, failed_output(candidate))
            self._joining.ended(request_id)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._look_for_weights()
        most = self.parts.most_running(self.waiting.peek_request()) if self.waiting else None
        if self._preempted_aside:
            self._preempted_aside, most = False, 0
        if most is None:
            return super().schedule(*args, **kwargs)
        with admitting(self, max(len(self.running), most)):  # type: ignore[arg-type]
            return super().schedule(*args, **kwargs)

    def finish_requests(self, request_ids: str | Iterable[str] | None, *args: Any, **kwargs: Any) -> list[Request]:
        finished = super().finish_requests(request_ids, *args, **kwargs)
        if request_ids is None and self._candidates:
            # A pause that aborts: clients of the requests returned here get empty outputs, which
            # would overtake held tokens. Candidates get their last output from the step that now follows.
            return [request for request in finished if request.request_id not in self._candidates]
        return finished

    def hold(self, lacks_weights: bool) -> None:
        """Schedule nothing while the model lacks weights, even if a client resumes generation."""
        if lacks_weights != self._is_held:
            self._is_held = lacks_weights
            if lacks_weights and self._asked_pause == PauseState.UNPAUSED:
                logger.warning("vllm_rollout: requests wait for weights, because a trainer has begun to send some.")
            self.set_pause_state(self._asked_pause)

    def set_pause_state(self, pause_state: PauseState) -> None:
        self._asked_pause = pause_state
        pause_state = PauseState.PAUSED_ALL if self._is_held else pause_state
        super().set_pause_state(pause_state)
        self.weights.is_paused = pause_state != PauseState.UNPAUSED
        self.parts.call(CorePart.interrupted)

    def _look_for_weights(self) -> None:
        try:
            self.weights.before_step()
        except Exception as error:
            self.faults.caught("weights", error)
            self.reset_prefix_cache(reset_running_requests=True)  # KV of old weights must not be read

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self.parts.call(CorePart.cache_reset)
        return super().reset_prefix_cache(*args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.num_preemptions += 1
        if (candidate := self._candidates.get(request.request_id)) is not None:
            candidate.num_preemptions += 1
        super()._preempt_request(request, *args, **kwargs)
        try:
            self.weights.preempted(request)
        except Exception as error:
            self.faults.caught("weights", error)
            request.skip_reading_prefix_cache = True

    def preempt(self, request: Request, *, drop_stale_output: bool = False) -> None:
        """Preempt a request for a reason of ours. vLLM's preemptions for lack of memory are counted, these are not."""
        super()._preempt_request(request, time.monotonic(), drop_stale_output)
        self._preempted_aside = returns_experts(self)  # type: ignore[arg-type]

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        # Called once per request that ends, whatever ended it: work happens only here.
        candidate = self._candidates.get(request.request_id)
        if candidate is not None:
            candidate.end_reason = END_REASONS.get(request.status, "failed")
            if request.status == RequestStatus.FINISHED_ERROR:
                candidate.error = GRAMMAR_ERROR if request.use_structured_output else VLLM_ERROR
            self._ended.append(candidate)
        return super()._free_request(request, *args, **kwargs)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        report: RunnerReport | None = model_runner_output.__dict__.get(REPORT_ATTRIBUTE)
        if report is not None:
            self._num_worker_errors = max(self._num_worker_errors, report.num_internal_errors)
        if report is not None and self.weights.sampled_by(report.weights):
            for candidate in self._candidates.values():
                candidate.sampled_by(self.weights.sampling)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.parts.call(CorePart.stepped, scheduler_output)
        if self._candidates:
            try:
                self._obey(outputs, model_runner_output, report)
            except Exception as error:
                self._fail_all(outputs, error)
        return outputs

    def _obey(
        self,
        outputs: dict[int, EngineCoreOutputs],
        model_runner_output: ModelRunnerOutput,
        report: RunnerReport | None,
    ) -> None:
        """Get the groups' verdicts, stop candidates accordingly, and pass outputs on."""
        if self._num_with_stop_strings:
            self._end_by_stop_strings(outputs)
        seen = {} if report is None else self._seen(report)
        verdicts = self._close_step(seen, model_runner_output)
        if verdicts.stop:
            self._stop(verdicts, outputs)
        self._pass_outputs(outputs, verdicts, model_runner_output)
        if self._ended:
            self._forget_ended(outputs, verdicts)
        for group_id in verdicts.over:
            self.parts.call(CorePart.forget, group_id)

    def _seen(self, report: RunnerReport) -> dict[str, dict[CandidateId, Any]]:
        """Observations of the step, by part and candidate. Candidates that could not be observed fail."""
        seen: dict[str, dict[CandidateId, Any]] = {}
        failed = dict(report.failed)
        for name, its in report.parts.items():
            try:
                for request_id, observation in its.observations():
                    candidate = self._candidates.get(request_id)
                    if candidate is not None and candidate.end_reason is None:
                        seen.setdefault(name, {})[candidate.id] = observation
            except Exception as error:
                failed |= dict.fromkeys(its.request_ids, self.faults.caught("observations", error))
                seen.pop(name, None)
        for request_id, reason in failed.items():
            if (candidate := self._candidates.get(request_id)) is not None:
                self._fail(candidate, reason)
        return seen

    def _close_step(
        self, seen: Mapping[str, Mapping[CandidateId, Any]], model_runner_output: ModelRunnerOutput
    ) -> Verdicts:
        """Report ended candidates to the groups, and get their verdicts."""
        for candidate in self._ended:
            if candidate.is_told:
                continue
            candidate.is_told = True
            if not candidate.is_launched:
                continue
            last: Mapping[str, Any] = {}
            try:
                last = last_observations(candidate, model_runner_output)
            except Exception as error:
                candidate.error, candidate.end_reason = self.faults.caught("last_observations", error), "failed"
            self.group_steps.ended(candidate.id, candidate.group, candidate.end_reason, candidate.num_tokens, last)  # type: ignore[arg-type]
        verdicts = self.group_steps.close_step(seen, lambda id: self.launched[id].num_tokens, now_s=self.clock())
        for group_id, error in verdicts.broken.items():
            self._break(group_id, self.faults.caught("a group's rules", error))
        return verdicts

    def _end_by_stop_strings(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for step_outputs in outputs.values():
            for output in step_outputs.outputs:
                candidate = self._candidates.get(output.request_id)
                if candidate is None or candidate.stop_strings is None:
                    continue
                try:
                    num_kept = candidate.stop_strings.found_at(output.new_token_ids)
                except Exception as error:
                    self._fail(candidate, self.faults.caught("stop_strings", error))
                    continue
                if num_kept is None:
                    continue
                candidate.num_dropped = len(output.new_token_ids) - num_kept
                goes_on = candidate.end_reason is None
                if goes_on:
                    self.finish_requests(output.request_id, RequestStatus.FINISHED_ABORTED)
                if candidate.num_dropped:  # drafts beyond the end
                    keep_first(output, num_kept)
                if goes_on or candidate.num_dropped:
                    # The API process finds the string itself and turns this into finish reason `stop`.
                    # STOP here would make its detokenizer drop the last token.
                    output.finish_reason = FinishReason.ABORT
                candidate.end_reason = "stop"  # also when the token that completes the string was the last one allowed

    def _stop(self, verdicts: Verdicts, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Stop candidates through vLLM's own `finish_requests`: running, waiting and preempted ones alike."""
        candidates = [self.launched[candidate_id] for candidate_id in verdicts.stop]
        for candidate in candidates:
            candidate.is_told = True
        stop = [candidate.request.request_id for candidate in candidates]
        self.finish_requests(stop, RequestStatus.FINISHED_ABORTED)
        self._refresh_stats(outputs)

    def _refresh_stats(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Count again after stopping: with several API processes no later step may correct this step's gauges."""
        for step_outputs in outputs.values():
            if (stats := step_outputs.scheduler_stats) is not None:
                stats.num_running_reqs, num_waiting = self.get_request_counts()
                stats.num_waiting_reqs = num_waiting - num_deferred(self)  # type: ignore[arg-type]
                stats.kv_cache_usage = self.get_kv_cache_usage()

    def _pass_outputs(
        self,
        outputs: dict[int, EngineCoreOutputs],
        verdicts: Verdicts,
        model_runner_output: ModelRunnerOutput,
    ) -> None:
        """Annotate last outputs. Hold the others until there are enough of them for a message."""
        candidates = self._candidates
        for client_index, step_outputs in list(outputs.items()):
            passed = []
            for output in step_outputs.outputs:
                candidate = candidates.get(output.request_id)
                if candidate is None:
                    passed.append(output)
                elif candidate.end_reason is not None:
                    del candidates[output.request_id]
                    passed.append(self._last_output(candidate, output, verdicts, model_runner_output))
                else:
                    try:
                        released = candidate.held.add(output)
                    except Exception as error:
                        self._fail(candidate, self.faults.caught("held_outputs", error))
                        continue
                    if released is not None:
                        passed.append(released)
            step_outputs.outputs = passed
            if not passed and step_outputs.scheduler_stats is None and not step_outputs.finished_requests:
                del outputs[client_index]

    def _forget_ended(self, outputs: dict[int, EngineCoreOutputs], verdicts: Verdicts) -> None:
        """Give candidates that ended without an output in this step (waiting, preempted, aborted) their last one."""
        untold = []
        for candidate in self._ended:
            if not candidate.is_told:  # it failed while outputs were passed: its group learns in the next step
                untold.append(candidate)
                continue
            request = candidate.request
            if self._candidates.pop(request.request_id, None) is not None:
                put(outputs, request, self._last_output(candidate, empty_output(request), verdicts, None))
            self._num_with_stop_strings -= candidate.stop_strings is not None
            if candidate.is_launched:
                del self.launched[candidate.id]
            self._joining.ended(request.request_id)
        self._ended = untold
        if self.finished_req_ids_dict:
            # Data parallel: super() has delivered its set. Ours must not wait for a step that may never come.
            for client_index, request_ids in self.finished_req_ids_dict.items():
                step_outputs = outputs.setdefault(client_index, EngineCoreOutputs())
                step_outputs.finished_requests = (step_outputs.finished_requests or set()) | request_ids
            self.finished_req_ids_dict.clear()

    def _last_output(
        self,
        candidate: EngineCandidate,
        output: EngineCoreOutput,
        verdicts: Verdicts,
        model_runner_output: ModelRunnerOutput | None,
    ) -> EngineCoreOutput:
        """The last output of a candidate: everything held, and data about its end."""
        try:
            output = candidate.held.finish(output)
            if not candidate.is_launched:
                explain(candidate, output)
                return output
            stopped = "surplus" if candidate.id in verdicts.lost_ties else verdicts.stop.get(candidate.id)
            say_reasons(candidate, output, stopped)
            if candidate.reads_notes:
                note = self._note(candidate, model_runner_output)
                output.kv_transfer_params = note.to_params(output.kv_transfer_params)
            return output
        except Exception as error:
            candidate.error = self.faults.caught("last_output", error)
            return failed_output(candidate)

    def _note(self, candidate: EngineCandidate, model_runner_output: ModelRunnerOutput | None) -> EndingNote:
        id, group = candidate.id, candidate.group
        return EndingNote(
            state=group.state(id.index),
            end_step=group.end_step(id.index),
            confidence=confidence_of(candidate, model_runner_output),
            weights=self.weights.named(candidate.weights, learned_name(candidate.request.lora_request)),
            parts=self.group_steps.notes(id, group),
            ended_by_itself=candidate.end_reason == "stop",
            is_replaced=group.is_replaced(id.index),
            num_preemptions=candidate.num_preemptions,
            error=candidate.error,
        )


class RolloutScheduler(GroupSchedulerMixin, Scheduler):
    """The scheduler of vLLM's synchronous step loop, with groups."""


class AsyncRolloutScheduler(GroupSchedulerMixin, AsyncScheduler):
    """The scheduler of vLLM's asynchronous step loop, with groups.

    The step after a verdict is already scheduled. So a stopped candidate has at most one more token in flight, which
    vLLM drops because the request has finished.
    """


def make_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> Scheduler:
    """Factory for `--scheduler-cls`. vLLM accepts a factory, and only here the kind of step loop is known.

    This alone gives an engine groups, also one that a trainer builds: `LLM(scheduler_cls="vllm_rollout.Scheduler")`.
    """
    check_vllm_version()
    add_rollout_calls()
    listen_to_calls()
    cls = AsyncRolloutScheduler if vllm_config.scheduler_config.async_scheduling else RolloutScheduler
    return cls(vllm_config=vllm_config, **kwargs)
