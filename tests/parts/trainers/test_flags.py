"""`vllm-rollout serve --rollout-compat TRAINER`."""

import pytest


def test_trainers_are_named_one_by_one(parsed, monkeypatch):
    assert parsed("--rollout-compat", "trl").rollout_compat == ["trl"]
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    both = parsed("--rollout-compat", "skyrl", "--rollout-compat", "prime-rl")
    assert both.rollout_compat == ["skyrl", "prime-rl"]


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ("nobody", "prime-rl"),
        ("prime-rl", "VLLM_SERVER_DEV_MODE=1"),
        ("trl-legacy", "Install TRL 1.14 to 1.16, and write --rollout-compat trl."),
    ],
)
def test_a_trainer_without_all_its_endpoints_is_refused_with_a_remedy(refusal, monkeypatch, trainer, said):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "0")
    assert said in refusal("--rollout-compat", trainer)


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        (("--rollout-compat", "prime-rl", "--enable-lora"), 1),
        (("--rollout-compat", "skyrl", "--enable-lora", "--api-server-count", "1"), 1),
        (("--rollout-compat", "prime-rl"), None),
        (("--rollout-compat", "trl", "--enable-lora", "--api-server-count", "2"), 2),
        (("--enable-lora",), None),
    ],
)
def test_adapters_that_a_trainer_loads_are_known_to_the_one_process_that_there_is(parsed, monkeypatch, flags, count):
    """Unset, vLLM starts an API process per data-parallel rank."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    assert parsed("--data-parallel-size", "2", *flags).api_server_count == count


def test_several_processes_of_which_one_knew_an_adapter_are_refused(refusal, monkeypatch):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    said = refusal("--rollout-compat", "skyrl", "--enable-lora", "--api-server-count", "3")
    assert "--api-server-count 3 does not go with --rollout-compat skyrl and --enable-lora" in said
    assert "Say 1" in said
