"""Files that are whole at every moment, and what a killed writer leaves."""

import os
import time

from vllm_rollout.whole_file import LEFT_S, write_whole


def test_what_killed_writers_left_long_ago_is_removed(tmp_path):
    path = tmp_path / "drafts-0"
    old = time.time() - LEFT_S - 60
    names = (".drafts-0.abcd1234", ".drafts-0.abcd_new", ".drafts-1.abcd1234", ".drafts-0.lock")
    for name in names:
        (tmp_path / name).write_bytes(b"left")
        if not name.endswith("_new"):
            os.utime(tmp_path / name, (old, old))
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert sorted(left.name for left in tmp_path.iterdir()) == sorted([*names[1:], "drafts-0"])


def test_a_name_with_signs_of_a_pattern_is_taken_as_it_is(tmp_path):
    old = time.time() - LEFT_S - 60
    for name in (".[ab].abcd1234", ".a.abcd1234"):
        (tmp_path / name).write_bytes(b"left")
        os.utime(tmp_path / name, (old, old))
    write_whole(tmp_path / "[ab]", b"new")
    assert sorted(left.name for left in tmp_path.iterdir()) == [".a.abcd1234", "[ab]"]
