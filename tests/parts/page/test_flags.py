"""`vllm-rollout serve`: the page and recordings."""


def test_there_is_a_page_unless_the_user_wants_none(parsed):
    assert parsed().enable_rollout_page
    assert not parsed("--no-enable-rollout-page").enable_rollout_page


def test_a_configuration_file_takes_the_page_away(parsed, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("no-enable-rollout-page: true\n")
    assert not parsed("--config", str(config)).enable_rollout_page


def test_a_recording_that_cannot_be_written_is_refused(refusal, tmp_path):
    assert "must be a whole number of MiB, 0 for no bound, got '-1'" in refusal("--rollout-record-max-mib", "-1")
    said = refusal("--rollout-record", str(tmp_path / "nowhere" / "file"))
    assert "No such file or directory. Name a recording, or a new file that can be written." in said
    (notes := tmp_path / "notes.txt").write_text("first\nlast line")
    said = refusal("--rollout-record", str(notes))
    assert f"{notes}: it is no recording, since it begins with b'first\\nlast line'. Name a recording, or" in said


def test_a_switch_of_a_configuration_file_is_never_left_out_silently(refusal, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("enable-rollout-page: false\n")
    assert "Write no-enable-rollout-page: true" in refusal("--config", str(config))
