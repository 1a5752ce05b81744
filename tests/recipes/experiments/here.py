"""Runs of recipes in the process of the test, not in one for each; what experiments write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_pfl.cli.trial import Trial
from recipes import outcome

MARKERS = "above\n<!-- {0}: begin -->\nold\n<!-- {0}: end -->\nbelow\n"
"""A page with a section that an experiment writes."""


def run_here(trial: Trial, threads: int | None = None, shows: bool = False) -> int:
    """Stands in for :meth:`Trial.run`."""
    outcome.run([*trial.options])
    return 0


def readme_for(name: str, folder: Path) -> Path:
    """A README.md in a folder, with a section for an experiment."""
    readme = folder / "README.md"
    readme.write_text(MARKERS.format(name))
    return readme


def text_of(readme: Path) -> str:
    """A page whose section was written, and nothing around it."""
    text = readme.read_text()
    assert text.startswith("above\n<!-- ")
    assert text.endswith(" -->\nbelow\n")
    assert "\nold\n" not in text
    return text


def cells_of(path: Path) -> dict[str, Any]:
    """An experiment's stored results, by the keys of its cells."""
    return {cell["key"]: cell["result"] for cell in map(json.loads, path.read_text().splitlines())}
