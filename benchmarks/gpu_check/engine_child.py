"""The engine of a child process, in that process. Its public methods are the jobs that `engine.Engine` names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from benchmarks.gpu_check.engine import Settings, Wanted
from benchmarks.gpu_check.models import STOP_TOKEN
from benchmarks.gpu_check.moving_jobs import MovingJobs
from benchmarks.gpu_check.ptl_jobs import ProfilingJobs
from vllm_rollout.adapter.names import CPU_EXECUTOR_CLS, SCHEDULER_CLS, WORKER_CLS
from vllm_rollout.config import CPU_BLOCK_SIZE_TOKENS, OUTPUT_INTERVAL_TOKENS
from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.wire import REPORT_ATTRIBUTE, CandidateTag, EndingNote
from vllm_rollout.parts.drafts.options import SPECULATIVE_CONFIG
from vllm_rollout.parts.pruning.rules.ledger import Scoring
from vllm_rollout.parts.pruning.rules.pruning_plan import HeadKey, PruningPlan
from vllm_rollout.parts.pruning.rules.step import PRUNING, SCORING, TERMS
from vllm_rollout.parts.pruning.rules.terms import PruningTerms
from vllm_rollout.parts.pruning.worker.quality_head import QUALITY_HEAD_HIDDEN, HeadWeights
from vllm_rollout.parts.pruning.worker.scorer import PublishedHead


def engine_options(settings: Settings) -> dict[str, Any]:
    """Keywords of `vllm.LLM`. Ours and stock's differ only in the settings that turn us on."""
    options: dict[str, Any] = {"max_model_len": 1024, **settings.options}
    if current_platform.is_cpu():
        options = {"distributed_executor_backend": CPU_EXECUTOR_CLS, "block_size": CPU_BLOCK_SIZE_TOKENS, **options}
    if settings.kind != "stock":
        options |= {"scheduler_cls": SCHEDULER_CLS, "worker_cls": WORKER_CLS}
    if settings.kind == "drafts":
        options["speculative_config"] = dict(SPECULATIVE_CONFIG)
    if settings.model == "8b":  # its shape only
        options |= {"skip_tokenizer_init": True, "load_format": "dummy"}
    return options


def head_weights(hidden_size: int) -> HeadWeights:
    """A head with made-up weights, the same for every call with this hidden size. Its logits are about 1."""
    generator = torch.Generator().manual_seed(5)
    shapes = (QUALITY_HEAD_HIDDEN, hidden_size), (QUALITY_HEAD_HIDDEN,), (QUALITY_HEAD_HIDDEN,), (1,)
    return HeadWeights(*(torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes))


class Child(MovingJobs, ProfilingJobs):
    """An engine, and the values that its worker reports of every candidate."""

    def __init__(self, settings: Settings, model: str) -> None:
        self.llm = LLM(model, **engine_options(settings))
        self.seen: dict[tuple[str, int], Any] = {}
        self._num_runs = 0

    def run(self, requests: list[Wanted], watch_steps: bool) -> dict[str, Any]:
        self._num_runs += 1
        self.seen.clear()
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        params = [self._params(request) for request in requests]
        with self._steps_timed(watch_steps) as times:
            started = time.perf_counter()
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - started
        step_ms = [1e3 * (after - before) for before, after in pairwise(times)]
        candidates = [self._shown(*pair) for pair in zip(requests, outputs, strict=True)]
        return {"seconds": seconds, "candidates": candidates, "step_ms": step_ms}

    def watch_scores(self) -> None:
        scheduler = self._core.scheduler
        update = scheduler.update_from_output

        def watching(scheduler_output: Any, runner_output: Any) -> Any:
            report = runner_output.__dict__.get(REPORT_ATTRIBUTE)
            scores = None if report is None else report.parts.get(PRUNING)
            for request_id, observation in () if scores is None else scores.observations():
                if (candidate := scheduler._candidates.get(request_id)) is not None:
                    self.seen[tuple(candidate.id)] = observation
            return update(scheduler_output, runner_output)

        scheduler.update_from_output = watching

    def publish_head(self, detection_length: int) -> None:
        self.llm.llm_engine.collective_rpc(_publish, args=(detection_length,))

    def sleep_and_wake(self) -> None:
        if torch.cuda.is_available():
            self.llm.sleep(level=1)
            self.llm.wake_up()

    def train_beside(self, requests: list[Wanted], num_rows: int, budget_s: float) -> dict[str, Any]:
        trained = [0]
        if budget_s:
            self.llm.llm_engine.collective_rpc(_learn, args=(num_rows,))

        def train() -> None:
            before = time.perf_counter()
            left = self.llm.llm_engine.collective_rpc("rollout_train", args=(budget_s,))[0]
            trained[0] += bool(left)
            train_ms.append(1e3 * (time.perf_counter() - before))

        train_ms: list[float] = []
        with self._after_each_step(train if budget_s else None):
            answer = self.run(requests, watch_steps=True)
        self.llm.llm_engine.collective_rpc(_forget)
        return {"seconds": answer["seconds"], "step_ms": answer["step_ms"], "train_ms": train_ms,
                "num_trained_steps": trained[0]}  # fmt: skip

    @property
    def _core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @contextmanager
    def _steps_timed(self, on: bool) -> Iterator[list[float]]:
        """Times at which steps ended, measured the same way for every engine."""
        times: list[float] = []
        with self._after_each_step((lambda: times.append(time.perf_counter())) if on else None):
            yield times

    @contextmanager
    def _after_each_step(self, then: Callable[[], None] | None) -> Iterator[None]:
        """Call `then` after each step, also after steps whose outputs our scheduler keeps for a while."""
        scheduler = self._core.scheduler
        update = scheduler.update_from_output

        def updating(*arguments: Any) -> Any:
            outputs = update(*arguments)
            then()
            return outputs

        if then is not None:
            scheduler.update_from_output = updating
        try:
            yield
        finally:
            scheduler.update_from_output = update

    def _group(self, request: Wanted) -> str:
        return f"{request.group}-{self._num_runs}"

    def _params(self, request: Wanted) -> SamplingParams:
        ends_at, extra_args = request.ends_at, None
        if request.group is not None:
            length = request.detection_length
            plan = None if length is None else PruningPlan(length, mode="shadow")
            parts = {} if plan is None else TERMS.value(PruningTerms(plan))
            said = {} if plan is None else SCORING.value(Scoring("check", request.group, 0))
            terms = GroupTerms(request.group_size, request.num_candidates, request.early_stop, parts=parts)
            tag = CandidateTag(self._group(request), request.index, terms, OUTPUT_INTERVAL_TOKENS, said)
            extra_args = tag.to_extra_args()
        return SamplingParams(
            temperature=request.temperature,
            seed=request.seed,
            max_tokens=request.max_tokens,
            min_tokens=0 if ends_at is None else ends_at - 1,
            ignore_eos=True,
            stop_token_ids=None if ends_at is None else [STOP_TOKEN],
            logit_bias=None if ends_at is None else {STOP_TOKEN: 100.0},
            logprobs=request.logprobs,
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=False,
            extra_args=extra_args,
        )

    def _shown(self, request: Wanted, output: Any) -> dict[str, Any]:
        note, _ = EndingNote.take(output.kv_transfer_params)
        completion = output.outputs[0]
        shown = {"tokens": list(completion.token_ids), "finish_reason": completion.finish_reason}
        if note is not None:
            shown |= {"state": note.state, "confidence": note.confidence, "num_preemptions": note.num_preemptions}
        if (seen := self.seen.get((self._group(request), request.index))) is not None:
            shown["score"] = [seen.logit, *seen.confidence]
        return shown


def _publish(worker: Any, detection_length: int) -> None:
    weights = head_weights(worker.model_config.get_hidden_size())
    head = PublishedHead(1, HeadWeights(*(tensor.to(worker.device) for tensor in weights)))
    worker.quality_heads.scorer.heads[HeadKey(detection_length)] = head


TRAINED = HeadKey(64)
"""Key of the head that `train_beside` trains."""


def _learn(worker: Any, num_rows: int) -> None:
    hidden_size = worker.model_config.get_hidden_size()
    features = torch.randn(num_rows, hidden_size, generator=torch.Generator().manual_seed(1))
    positives = [bool(row % 2) for row in range(num_rows)]
    worker.quality_heads.learn(TRAINED, features, positives, [1.0] * num_rows)


def _forget(worker: Any) -> None:
    worker.quality_heads.forget(TRAINED)
