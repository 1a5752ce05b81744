"""What tests of recorded steps share."""

import pytest

from lightning_pfl.engine import trace


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record at the second call, so that short tests replay."""
    monkeypatch.setattr(trace, "WARM_UP", 1)
