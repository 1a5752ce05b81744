"""Dicts of limited size."""

from __future__ import annotations

from lightning_pfl.core.recent import Recent


def test_what_was_read_stays() -> None:
    known = Recent[str, int](2)
    known["a"], known["b"] = 1, 2
    assert known["a"] == 1
    known["c"] = 3
    assert dict(known) == {"a": 1, "c": 3}


def test_what_is_written_again_stays_and_counts_once() -> None:
    known = Recent[str, int](2)
    known["a"], known["b"], known["a"] = 1, 2, 3
    known["c"] = 4
    assert dict(known) == {"a": 3, "c": 4}
