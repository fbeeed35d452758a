"""The tracker knows tensors, not an engine."""

from tests.support.imports import imported_modules
from tests.test_architecture import modules_of, offences, vllm


def test_the_tracker_observes_with_torch_and_without_vllm():
    paths = modules_of("tracker")
    assert "torch" in {name for path in paths for name in imported_modules(path.read_text())}
    assert offences(paths, vllm) == []
