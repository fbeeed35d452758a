"""`vllm-rollout serve --enable-rollout-drafts`: what the flags set, and what does not go with them."""

import pytest

from vllm_rollout.parts.drafts.options import SPECULATIVE_CONFIG, DraftsOptions


def test_drafts_are_off_unless_the_user_wants_them(parsed):
    assert parsed().speculative_config is None
    assert parsed("--enable-rollout-drafts").speculative_config == SPECULATIVE_CONFIG


def test_memory_is_a_whole_power_of_two_and_its_file_is_in_the_state(parsed, tmp_path):
    args = parsed("--rollout-draft-memory-mib", "0.5", "--rollout-state", str(tmp_path))
    assert DraftsOptions.of(args) == DraftsOptions(memory_bytes=2**19, file=str(tmp_path / "drafts"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--async-scheduling",), "vLLM schedules synchronously. Leave out one of them."),
        (("--rollout-draft-memory-mib", "1e308"), "must be at most 1,099,511,627,776 MiB, got '1e308'"),
        (("--rollout-feature-ring-mib", "1e308"), "must be at most 1,099,511,627,776 MiB, got '1e308'"),
        (("--speculative-config", '{"method": "ngram"}'), "vLLM has one source of drafts. Leave out one of them."),
    ],
)
def test_what_leaves_no_place_for_drafts_is_refused_with_a_remedy(refusal, flags, said):
    assert said in refusal("--enable-rollout-drafts", *flags)
