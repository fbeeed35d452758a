from tests.kernel.core.conftest import loop, new_run  # noqa: F401
