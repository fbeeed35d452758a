"""Tokens of running candidates, from vLLM's own scheduler."""

from types import SimpleNamespace

from tests.kernel.core.scheduler_runs import TracedRun, add_group
from vllm_rollout.kernel.core.calls import rollout_call
from vllm_rollout.parts.page.calls import LAST_TOKENS, LastTokens


def last_tokens(run: TracedRun, group_id: str) -> list[LastTokens]:
    """As an API process asks for them."""
    core = SimpleNamespace(scheduler=run.scheduler)
    return LAST_TOKENS.decode_result(rollout_call(core, LAST_TOKENS.name, LAST_TOKENS.encode_argument(group_id)))


def test_a_viewer_is_told_the_last_tokens_of_what_has_not_ended(new_run):
    run = new_run(max_num_seqs=3, max_model_len=2048)
    add_group(run, "g", [700, 5, 700, 700], group_size=2)
    add_group(run, "other", [9], group_size=1)
    while len((told := last_tokens(run, "g"))[0].token_ids) + told[0].offset < 600:
        assert run.step()
    assert [each.index for each in told] == [0, 2, 3]
    for each in told:
        said = list(run.requests[f"g-{each.index}"].output_token_ids)
        assert each.token_ids == said[each.offset :]
        assert len(each.token_ids) == min(512, len(said))
    assert last_tokens(run, "unknown") == []
    run.run()
    assert last_tokens(run, "g") == []
