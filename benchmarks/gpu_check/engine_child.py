"""The engine of a child process: `engine_child SETTINGS MODEL`, then a JSON list per line: job, arguments."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from benchmarks.gpu_check.moving_jobs import MovingJobs
from vllm_rollout.adapter.names import SCHEDULER_CLS, WORKER_CLS
from vllm_rollout.adapter.wire import REPORT_ATTRIBUTE, CandidateTag, EndingNote
from vllm_rollout.config import OUTPUT_INTERVAL_TOKENS, QUALITY_HEAD_HIDDEN
from vllm_rollout.group.judging.ledger import Scoring
from vllm_rollout.group.plans.pruning_plan import PruningPlan
from vllm_rollout.group.plans.terms import GroupTerms
from vllm_rollout.group.types import HeadKey
from vllm_rollout.tracker.quality_head import HeadWeights
from vllm_rollout.tracker.tracker import PublishedHead

STOP_TOKEN = 6


class Child(MovingJobs):
    """An engine and what its worker showed of every candidate."""

    def __init__(self, settings: dict[str, Any], model: str) -> None:
        ours = {} if settings["kind"] == "stock" else {"scheduler_cls": SCHEDULER_CLS, "worker_cls": WORKER_CLS}
        if settings["model"] == "8b":  # its shape only
            ours |= {"skip_tokenizer_init": True, "load_format": "dummy"}
        self.llm = LLM(model, **{"max_model_len": 1024, "max_logprobs": -1, **ours, **settings["options"]})
        self.seen: dict[tuple[str, int], Any] = {}
        self._num_runs = 0
        if settings["kind"] == "rollout":
            self._watch()

    def _watch(self) -> None:
        """Note what reports say of candidates that are due."""
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        update = scheduler.update_from_output

        def watching(scheduler_output: Any, runner_output: Any) -> Any:
            report = runner_output.__dict__.get(REPORT_ATTRIBUTE)
            for request_id, observation in report.observations() if report is not None else ():
                if (candidate := scheduler._candidates.get(request_id)) is not None:
                    self.seen[tuple(candidate.id)] = observation
            return update(scheduler_output, runner_output)

        scheduler.update_from_output = watching

    def run(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        self._num_runs += 1
        self.seen.clear()
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        params = [self._params(request) for request in requests]
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "candidates": [self._shown(*pair) for pair in zip(requests, outputs, strict=True)]}

    def _group(self, request: dict[str, Any]) -> str:
        return f"{request['group']}-{self._num_runs}"

    def _params(self, request: dict[str, Any]) -> SamplingParams:
        ends_at, extra_args = request["ends_at"], None
        if request["group"] is not None:
            length = request["detection_length"]
            plan = None if length is None else PruningPlan(length, mode="shadow")
            tag = CandidateTag(
                self._group(request),
                request["index"],
                GroupTerms(request["group_size"], request["num_candidates"], request["early_stop"], pruning=plan),
                OUTPUT_INTERVAL_TOKENS,
                plan and Scoring("check", request["group"], 0),
            )
            extra_args = tag.to_extra_args()
        return SamplingParams(
            temperature=1,
            seed=request["seed"],
            max_tokens=request["max_tokens"],
            min_tokens=0 if ends_at is None else ends_at - 1,
            ignore_eos=True,
            stop_token_ids=None if ends_at is None else [STOP_TOKEN],
            logit_bias=None if ends_at is None else {STOP_TOKEN: 100.0},
            logprobs=-1 if request["expect"] else request["logprobs"],
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=False,
            extra_args=extra_args,
        )

    def _shown(self, request: dict[str, Any], output: Any) -> dict[str, Any]:
        note, _ = EndingNote.take(output.kv_transfer_params)
        completion = output.outputs[0]
        shown = {"tokens": list(completion.token_ids), "finish_reason": completion.finish_reason}
        if note is not None:
            shown |= {"state": note.state, "confidence": note.confidence}
        if (seen := self.seen.get((self._group(request), request["index"]))) is not None:
            shown["score"] = [seen.logit, *seen.confidence]
        if request["expect"]:
            tokens = [
                -statistics.fmean(entry.logprob for entry in position.values()) for position in completion.logprobs
            ]
            tokens = [value for value in tokens if math.isfinite(value)]
            shown["expected"] = [statistics.fmean(tokens), statistics.pstdev(tokens)]
        return shown

    def publish_head(self, detection_length: int) -> None:
        self.llm.llm_engine.collective_rpc(_publish, args=(detection_length,))

    def sleep_and_wake(self) -> None:
        if torch.cuda.is_available():
            self.llm.sleep(level=1)
            self.llm.wake_up()


def _publish(worker: Any, detection_length: int) -> None:
    hidden_size = worker.model_config.get_hidden_size()
    generator = torch.Generator().manual_seed(5)
    shapes = (QUALITY_HEAD_HIDDEN, hidden_size), (QUALITY_HEAD_HIDDEN,), (QUALITY_HEAD_HIDDEN,), (1,)
    weights = (torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes)
    head = PublishedHead(1, HeadWeights(*(tensor.to(worker.device) for tensor in weights)))
    worker.model_runner.candidate_tracker.heads[HeadKey(detection_length)] = head


def main(settings: str, model: str) -> None:
    child = Child(json.loads(settings), model)
    print("RESULT null", flush=True)
    for line in sys.stdin:
        job, *arguments = json.loads(line)
        print("RESULT " + json.dumps(getattr(child, job)(*arguments)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
