"""The picture of the layers in docs/architecture.md is that of the linter."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_layers_are_those_of_the_linter() -> None:
    boxes = dict(re.findall(r'^    (L\d+)\["(.*)"\]$', PAGE, re.MULTILINE))
    (arrows,) = re.findall(r"^    (L1 --> .*)$", PAGE, re.MULTILINE)
    drawn = [boxes[box].replace("·", "|") for box in arrows.split(" --> ")]
    settings = (ROOT / "pyproject.toml").read_text()
    (layers,) = re.findall(r"^layers = \[(.*?)^\]", settings, re.MULTILINE | re.DOTALL)
    assert drawn == re.findall(r'"(.*)"', layers)
