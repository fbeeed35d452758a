from tests.kernel.api.conftest import app_of, parsed, refusal, restored  # noqa: F401
