"""A resumable plan: an experiment's cells, each run once and stored as a line of JSON.

An experiment is a file of ``recipes/experiments/``; running it again continues with missing cells,
and repeats cells whose settings have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from recipes.outcome import RECIPES, commit
from recipes.reproduce import Run

README = RECIPES / "README.md"


class Plan:
    """The stored cells of one experiment.

    Args:
        name: The experiment's name: of its file of results, and of its section in ``README.md``.
        results: Folder of the results.
        logs: Folder of the logs and checkpoints of runs of recipes.
    """

    def __init__(
        self,
        name: str,
        results: Path = RECIPES / "results",
        logs: Path = Path("logs/reproduce"),
    ) -> None:
        self.name, self.results, self.logs = name, results.resolve(), logs.resolve()
        self.path = self.results / f"{name}.jsonl"

    def cells(self) -> dict[str, dict[str, Any]]:
        """Read all stored results by key, without an incomplete last line."""
        found: dict[str, dict[str, Any]] = {}
        if self.path.is_file():
            for line in self.path.read_text().splitlines():
                try:
                    cell = json.loads(line)
                except json.JSONDecodeError:
                    continue
                found[cell["key"]] = cell
        return found

    def stored(self, key: str, settings: dict[str, Any]) -> Any | None:
        """Return the stored result of a cell with these settings, or None."""
        cell = self.cells().get(key)
        return cell["result"] if cell and cell["fingerprint"] == _digest(settings) else None

    def cell(self, key: str, settings: dict[str, Any], work: Callable[[], Any]) -> Any:
        """Return the stored result of a cell, or store and return that of ``work()``.

        Args:
            key: Names the cell within the experiment.
            settings: All that the result depends on, in JSON's types.
            work: Computes the result, in JSON's types.
        """
        found = self.stored(key, settings)
        if found is not None:
            return found
        begin = time.perf_counter()
        result = work()
        line = {
            "key": key,
            "fingerprint": _digest(settings),
            "settings": settings,
            "result": result,
            "seconds": round(time.perf_counter() - begin, 2),
            "commit": commit(),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "torch": torch.__version__,
        }
        self._append(json.dumps(line))
        return result

    def recipe(
        self,
        key: str,
        recipe: Path,
        seed: int,
        extra: list[str],
        settings: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the outcome of a recipe with settings, stored or from a run in a new process.

        A run that was interrupted resumes from its last checkpoint.

        Args:
            key: Names the cell, seed included.
            recipe: The recipe's file.
            seed: The seed in place of the recipe's own.
            extra: Settings for the command line, such as ``--method.init_args.local_epochs=5``.
            settings: All that the outcome depends on, where that is less than the recipe's text.
        """
        run = self._run(recipe, seed, extra)

        def work() -> dict[str, Any]:
            if not run.trial.is_done and (status := run.trial.run(shows=True)):
                raise RuntimeError(f"{recipe.name} with seed {seed} ended with status {status}.")
            return run.found()

        settings = settings or {"run": run.fingerprint, "seed": seed}
        outcome: dict[str, Any] = self.cell(key, settings, work)
        return outcome

    def stored_recipe(
        self, key: str, recipe: Path, seed: int, extra: list[str]
    ) -> dict[str, Any] | None:
        """Return the stored outcome of a recipe with settings, or None."""
        run = self._run(recipe, seed, extra)
        return self.stored(key, {"run": run.fingerprint, "seed": seed})

    def _run(self, recipe: Path, seed: int, extra: list[str]) -> Run:
        options = argparse.Namespace(extra=extra, logs=self.logs / self.name)
        options.results = self.results
        return Run(recipe, seed, options)

    def write_section(self, text: str, readme: Path | None = README) -> None:
        """Replace the experiment's section between its markers in ``README.md``; None: nowhere.

        Raises:
            ValueError: If the markers are missing.
        """
        if readme is None:
            return
        begin, end = f"<!-- {self.name}: begin -->", f"<!-- {self.name}: end -->"
        whole = readme.read_text()
        if begin not in whole or end not in whole:
            raise ValueError(
                f"Expected the lines {begin!r} and {end!r} in {readme.name}, but one is missing. "
                "Add them where the section belongs."
            )
        before, rest = whole.split(begin)
        readme.write_text(f"{before}{begin}\n{text.strip()}\n{end}{rest.split(end)[1]}")

    def _append(self, line: str) -> None:
        """Write a line at once, after ending an incomplete line of a crash."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut = self.path.is_file() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a") as file:
            file.write(("\n" if cut else "") + line + "\n")


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
