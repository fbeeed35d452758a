"""Model runners without a model, as far as our mixins touch them."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_rollout.kernel.rules.terms import GroupTerms
from vllm_rollout.kernel.rules.terms_port import PartTerms
from vllm_rollout.kernel.wire import REPORT_ATTRIBUTE, CandidateTag, RunnerReport

HIDDEN_SIZE = 4
VOCAB_SIZE = 5


class Row(NamedTuple):
    """One request's part of a step."""

    request_id: str
    num_computed: int
    """Computed tokens after the step."""
    num_known: int
    """Prompt and output before it: a row that does not get there samples nothing."""


class InnerOutput(AsyncModelRunnerOutput):
    def __init__(self, output: ModelRunnerOutput) -> None:
        self.output = output

    def get_output(self) -> ModelRunnerOutput:
        return self.output

    def get_kv_connector_output(self) -> str:
        return "connector"


class Sampler:
    def __call__(self, logits: torch.Tensor, input_batch: Any) -> torch.Tensor:
        return logits.argmax(dim=1)


class RunnerV1:
    """The parts of vLLM's V1 runner that the mixin touches."""

    def __init__(self, asynchronous: bool = False) -> None:
        self.device = torch.device("cpu")
        self.asynchronous = asynchronous
        self.speculative_config = None
        self.rows: list[Row] = []
        self.execute_model_state = None
        self.hidden = torch.empty(0)
        self.all_logits: list[torch.Tensor] = []

    def execute_model(self, scheduler_output: Any) -> None:
        rows = self.rows = scheduler_output.rows
        self.hidden = torch.arange(len(rows) * HIDDEN_SIZE, dtype=torch.float32).reshape(-1, HIDDEN_SIZE)
        self.execute_model_state = SimpleNamespace(sample_hidden_states=self.hidden)
        self.input_batch = SimpleNamespace(req_ids=[row.request_id for row in rows], num_reqs=len(rows), generators={})
        unfinished = np.array([row.num_computed < row.num_known for row in rows] + [True])
        self.discard_request_mask = SimpleNamespace(np=unfinished)  # longer than the batch, as vLLM's buffers are
        self.optimistic_seq_lens_cpu = torch.tensor([row.num_computed for row in rows] + [99])

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> str:
        return "what vLLM answers"

    def sample_tokens(self, grammar: Any = None) -> Any:
        self._sample(self.new_logits(), None)
        return self.answer()

    def new_logits(self) -> torch.Tensor:
        self.all_logits.append(torch.randn(len(self.rows), VOCAB_SIZE))
        return self.all_logits[-1]

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> torch.Tensor:
        return logits.argmax(dim=1)

    def answer(self) -> Any:
        ids = [row.request_id for row in self.rows]
        output = ModelRunnerOutput(req_ids=ids, req_id_to_index={id: row for row, id in enumerate(ids)})
        return InnerOutput(output) if self.asynchronous else output


class RunnerV2(RunnerV1):
    """The runner V2: `sample` makes logits from the rows that `logits_indices` picks."""

    def load_model(self) -> None:
        self.sampler = Sampler()

    def sample_tokens(self, grammar: Any = None) -> Any:
        rows = self.rows
        padded = torch.full((2 * len(rows), HIDDEN_SIZE), -1.0)
        indices = torch.arange(len(rows), dtype=torch.int32) * 2
        padded[indices.long()] = self.hidden
        batch = SimpleNamespace(
            req_ids=[row.request_id for row in rows],
            num_reqs=len(rows),
            logits_indices=indices,
            num_computed_tokens_np=np.array([row.num_computed - 1 for row in rows]),
            num_scheduled_tokens=np.ones(len(rows), dtype=np.int64),
            prefill_len_np=np.array([row.num_known for row in rows]),
        )
        self.sample(padded, batch)
        return self.answer()

    def sample(self, hidden_states: torch.Tensor, input_batch: Any) -> torch.Tensor:
        return self.sampler(self.new_logits(), input_batch)


class Verifying(RunnerV1):
    """V1 in a step with drafts, of which it accepts as many as it is told."""

    num_drafted: tuple[int, ...]
    num_sampled: tuple[int, ...]

    def execute_model(self, scheduler_output: Any) -> None:
        super().execute_model(scheduler_output)
        self.hidden = torch.randn(sum(self.num_drafted) + len(self.num_drafted), HIDDEN_SIZE)
        self.execute_model_state = SimpleNamespace(sample_hidden_states=self.hidden)

    def sample_tokens(self, grammar: Any = None) -> Any:
        logits = torch.randn(len(self.hidden), VOCAB_SIZE)
        self._sample(logits, SimpleNamespace(num_draft_tokens=list(self.num_drafted)))
        return self.answer()

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        self.is_verifying = spec_decode_metadata is not None
        sampled = torch.full((len(self.num_drafted), max(self.num_drafted) + 1), -1)
        for row, num in enumerate(self.num_sampled):
            sampled[row, :num] = 5
        return SimpleNamespace(sampled_token_ids=sampled)


Kind = tuple[type[RunnerV1], bool, bool]
"""Class of a runner, whether it is V2, and whether it is a CPU's."""
KINDS: list[Kind] = [(RunnerV1, False, False), (RunnerV1, False, True), (RunnerV2, True, False)]


def new_request(
    request_id: str,
    num_prompt_tokens: int,
    *,
    parts: Mapping[str, PartTerms] | None = None,
    said: dict[str, Any] | None = None,
    tagged: bool = True,
    observed: bool = True,
    adapter: str | None = None,
) -> Any:
    """`parts`, `said`: terms of its group and its own values, by part."""
    tag = CandidateTag("g", 0, GroupTerms(1, 2, parts=parts or {}), 64, said or {}, observed=observed)
    extra_args = tag.to_extra_args() if tagged else None
    return SimpleNamespace(
        req_id=request_id,
        prompt_token_ids=[0] * num_prompt_tokens,
        prompt_embeds=None,
        lora_request=None if adapter is None else SimpleNamespace(lora_name=adapter),
        sampling_params=SimpleNamespace(extra_args=extra_args),
    )


def made(kind: Kind, extend: Callable[..., None], *, asynchronous: bool = False) -> RunnerV1:
    """A runner of this kind. `extend`: adds our mixins."""
    base, v2, cpu = kind
    runner = base(asynchronous)
    extend(runner, v2=v2, cpu=cpu)
    if v2:
        runner.load_model()
    return runner


def step(runner: Any, rows: list[Row], new: tuple = (), finished: tuple = ()) -> tuple[Any, RunnerReport | None]:
    runner.execute_model(SimpleNamespace(rows=rows, scheduled_new_reqs=new, finished_req_ids=set(finished)))
    output = runner.sample_tokens()
    if isinstance(output, AsyncModelRunnerOutput):
        output = output.get_output()
    return output, output.__dict__.get(REPORT_ATTRIBUTE)
