"""What tests of several modules need."""

from __future__ import annotations

import pytest


@pytest.fixture
def a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process one of Flower's tasks, in which messages can be made."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
