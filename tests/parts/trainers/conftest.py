from tests.kernel.api.conftest import parsed, refusal, restored  # noqa: F401
