"""Several API processes are one server by this part. Without it there is one process."""

import pytest


@pytest.mark.parametrize("flags", [(), ("--data-parallel-size", "2")])
def test_without_the_part_there_is_one_api_process(parsed, flags):
    assert parsed(*flags).api_server_count is None, "vLLM's default"
    assert parsed("--without", "front_ends", *flags).api_server_count == 1


def test_without_the_part_a_headless_node_has_none(parsed):
    assert parsed("--without", "front_ends", "--headless").api_server_count is None


def test_without_the_part_several_processes_are_refused_by_its_name(refusal):
    said = refusal("--without", "front_ends", "--api-server-count", "2")
    assert "--api-server-count 2: this server runs without the part 'front_ends'. Leave it out" in said
