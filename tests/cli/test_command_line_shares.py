"""Settings that are a share or a number: a command line's 1 is one, its 1.0 is all."""

from __future__ import annotations

import pytest
from jsonargparse import ArgumentParser

from lightning_pfl.methods import ConvexClustering


@pytest.mark.parametrize("name", ["blocks", "dual_blocks"])
@pytest.mark.parametrize(("text", "value"), [("36", 36), ("1", 1), ("1.0", 1.0), ("0.5", 0.5)])
def test_a_number_stays_a_number(name: str, text: str, value: float) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(ConvexClustering, "method")
    found = parser.parse_args([f"--method.{name}={text}"]).method[name]
    assert (type(found), found) == (type(value), value)
