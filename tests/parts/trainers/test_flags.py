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
