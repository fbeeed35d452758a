"""`vllm-rollout serve --rollout-profile FILE`."""


def test_a_file_that_is_no_profile_is_refused(refusal, tmp_path):
    file = tmp_path / "profile.json"
    assert "--rollout-profile: cannot read the profile" in refusal("--rollout-profile", str(file))
    file.write_text("{}")
    assert "is no profile of format" in refusal("--rollout-profile", str(file))
