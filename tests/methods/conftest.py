"""The engine that the tests of methods run on."""

import pytest


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> str:
    """The vectorized one, unless ``pytest tests/methods --engine reference`` asks otherwise."""
    name: str = request.config.getoption("--engine")
    return name
