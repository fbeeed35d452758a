"""Stop strings end a candidate where its group is decided, and mean the same in the API process."""

import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor

from tests.kernel.core.scheduler_runs import LOOPS, TracedRun, add_group, assert_nothing_left
from tests.support.dry_run import EOS_TOKEN

TEXT = "the sum is 42 END."


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def script(tokenizer) -> list[int]:
    """Tokens of TEXT; "END" is spelt over several of them."""
    tokens = tokenizer.encode(TEXT)
    assert len(tokenizer.encode("END")) == 3
    return tokens


def num_tokens_until_stop(tokenizer, script: list[int], stop: str) -> int:
    return next(count for count in range(1, len(script) + 1) if stop in tokenizer.decode(script[:count]))


def api_outputs(run: TracedRun, tokenizer, request_id: str, params: SamplingParams) -> list:
    """Outputs that vLLM's own output processor makes from the scheduler's messages."""
    processor = OutputProcessor(tokenizer, log_stats=False)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    request = EngineCoreRequest(
        request_id=request_id, external_req_id=request_id, prompt_token_ids=[5] * 20, mm_features=None,
        sampling_params=params, pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None,
        data_parallel_rank=None,
    )  # fmt: skip
    processor.add_request(request, None)
    outputs = [processor.process_outputs([output]).request_outputs for output in run.outputs[request_id]]
    return [completion for request_outputs in outputs for output in request_outputs for completion in output.outputs]


def test_a_stop_string_spelt_over_several_tokens_completes_the_group_in_that_step(new_run, tokenizer, script):
    num_tokens = num_tokens_until_stop(tokenizer, script, "END")
    run = new_run()
    run.scripts["g-1"] = script
    ids = add_group(run, "g", [100, 100, 100], group_size=1, stop=["END"])
    run.run()
    assert [run.state(id) for id in ids] == ["surplus", "finished", "surplus"]
    assert [run.num_tokens(id) for id in ids] == [num_tokens] * 3
    assert run.tokens("g-1") == script[:num_tokens]
    assert len({run.note(id).end_step for id in ids}) == 1
    assert_nothing_left(run)


def test_the_api_process_reports_the_stop_string(new_run, tokenizer, script):
    run = new_run()
    run.scripts["g-0"] = script
    add_group(run, "g", [100, 100], group_size=1, stop=["END"], interval=4)
    run.run()
    assert run.last("g-0").finish_reason == FinishReason.ABORT
    (completion,) = api_outputs(run, tokenizer, "g-0", SamplingParams(stop=["END"], max_tokens=4000))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "END")
    assert completion.text == TEXT.partition("END")[0]


def test_text_without_the_stop_string_goes_on(new_run, script):
    run = new_run()
    run.scripts["g-0"] = script
    ids = add_group(run, "g", [60, 70], group_size=1, stop=["FIN"])
    run.run()
    assert [run.state(id) for id in ids] == ["finished", "surplus"]
    assert run.num_tokens("g-0") == 60
    assert run.last("g-0").finish_reason == FinishReason.STOP
    assert_nothing_left(run)


def test_a_stop_string_before_min_tokens_does_not_end_the_candidate(new_run, script):
    run = new_run()
    run.scripts["g-0"] = script
    ids = add_group(run, "g", [60, 70], group_size=1, stop=["END"], min_tokens=40)
    run.run()
    assert run.num_tokens(ids[0]) == 60


def test_a_group_may_mix_endings_by_stop_string_and_by_token(new_run, tokenizer, script):
    run = new_run()
    run.scripts["g-2"] = script
    ids = add_group(run, "g", [90, 40, 100], group_size=2, stop=["END"])
    run.run()
    assert [run.state(id) for id in ids] == ["surplus", "finished", "finished"]
    assert run.num_tokens("g-2") == num_tokens_until_stop(tokenizer, script, "END")
    assert [run.num_tokens(id) for id in ids[:2]] == [40, 40]
    assert_nothing_left(run)


def test_an_untagged_request_leaves_its_stop_strings_to_the_api_process(new_run, script):
    run = new_run()
    run.scripts["plain"] = script
    run.add("plain", 60, stop=["END"])
    add_group(run, "g", [70, 80], group_size=1, stop=["END"])
    run.run()
    assert run.num_tokens("plain") == 60
    assert_nothing_left(run)


def test_a_stop_string_completed_by_the_last_allowed_token_counts_as_ended_by_itself(new_run, tokenizer, script):
    num_tokens = num_tokens_until_stop(tokenizer, script, "END")
    run = new_run(max_num_seqs=2)
    run.scripts["g-0"] = script
    ids = add_group(run, "g", [100, 100, 100, 100], group_size=1, stop=["END"], max_tokens=num_tokens)
    run.run()
    (completion,) = api_outputs(run, tokenizer, "g-0", SamplingParams(stop=["END"], max_tokens=num_tokens))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "END")
    assert [run.state(id) for id in ids] == ["finished", "surplus", "surplus", "surplus"]
    assert [run.num_tokens(id) for id in ids] == [num_tokens, num_tokens, 0, 0]


@pytest.mark.parametrize("loop", LOOPS[:1], ids=lambda loop: loop.name)
def test_what_follows_a_stop_string_in_its_step_is_dropped_even_the_end_of_the_sequence(new_run, tokenizer, script):
    """Several tokens of a step, as with drafts: the last of them would end the candidate by itself."""
    num_tokens = num_tokens_until_stop(tokenizer, script, "END")
    run = new_run()
    sample = run.sample

    def several(scheduled):
        output = sample(scheduled)
        for request_id, row in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if row and run.num_sampled[request_id] == num_tokens - 2:
                row += [*script[num_tokens - 2 : num_tokens], EOS_TOKEN]
        output.logprobs = None
        return output

    run.sample = several
    run.scripts["g-0"] = script
    add_group(run, "g", [100, 100], group_size=1, stop=["END"], interval=4)
    run.run()
    assert run.state("g-0") == "finished"
    assert run.tokens("g-0") == script[:num_tokens]
    (completion,) = api_outputs(run, tokenizer, "g-0", SamplingParams(stop=["END"], max_tokens=4000))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "END")
    assert completion.text == TEXT.partition("END")[0]
