"""The tiny models of the runner's tests."""

from tests.engine_svc.runner.conftest import tiny_model

__all__ = ["tiny_model"]
