"""Run recipes with several seeds and compare them in a table.

    python -m recipes.reproduce recipes/fedrep_digits.yaml --seeds 0 1 2
    python -m recipes.reproduce --seeds 0 1 2 --readme           all recipes, into recipes/README.md
    python -m recipes.reproduce --trainer.max_epochs=20          settings, written with "="
    python -m recipes.reproduce --workers 4                      four runs at a time

A run that is done is skipped, as long as its recipe is the same; a run that was stopped resumes
from its last checkpoint.
"""

import argparse
import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

from lightning_pfl.cli.trial import Trial, logs_to, run_all
from recipes.outcome import NO_DATA, OUTCOME, RECIPES
from recipes.results_table import print_comparison, write_readme


class Run:
    """One recipe with one seed.

    Args:
        recipe: The recipe's file.
        seed: The seed in place of the recipe's own.
        options: The command line: folders, and further settings in ``extra``.
    """

    def __init__(self, recipe: Path, seed: int, options: argparse.Namespace) -> None:
        self.recipe, self.seed = recipe, seed
        # What identifies the settings: the recipe's text without comments, and what was added.
        lines = [line.split(" #")[0].rstrip() for line in recipe.read_text().splitlines()]
        text = "\n".join([*(line for line in lines if not line.startswith("#")), *options.extra])
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:8]
        self.version = f"seed{seed}-{self.fingerprint}"
        self.outcome: Path = options.results / f"{recipe.stem}-seed{seed}.json"
        folder: Path = options.logs / recipe.stem / self.version
        self.trial = Trial(
            recipe.name,
            seed,
            (
                *("--config", str(recipe), "--seed_everything", str(seed)),
                *logs_to(folder),
                *options.extra,
            ),
            folder,
            program=("recipes.outcome",),
            cwd=RECIPES.parent,
        )

    def is_done(self) -> bool:
        """Whether there is a stored outcome for the current settings."""
        if not self.outcome.is_file():
            return False
        return bool(json.loads(self.outcome.read_text())["fingerprint"] == self.fingerprint)

    def forget(self) -> None:
        """Remove outcome, logs and checkpoints."""
        self.outcome.unlink(missing_ok=True)
        self.trial.forget()

    def start(self, threads: int | None = None, shows: bool = True) -> int:
        """Run it if it isn't done, and store its outcome; the arguments are the trial's.

        Returns:
            The exit status.
        """
        status = 0 if self.trial.is_done else self.trial.run(threads, shows)
        if status == 0:
            self.outcome.parent.mkdir(parents=True, exist_ok=True)
            self.outcome.write_text(json.dumps(self.found(), indent=1) + "\n")
        return status

    def found(self) -> dict[str, Any]:
        """Read the outcome that the finished run has left in its folder."""
        known = {"recipe": self.recipe.name, "fingerprint": self.fingerprint, "seed": self.seed}
        return {**known, **json.loads((self.trial.folder / OUTCOME).read_text())}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line; unknown settings go to ``lightning-pfl fit``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("recipes", nargs="*", type=Path, help="Recipe files; none: all of them.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--logs", type=Path, default=Path("logs/reproduce"))
    parser.add_argument("--results", type=Path, default=RECIPES / "results")
    parser.add_argument("--fresh", action="store_true", help="Forget outcomes and checkpoints.")
    parser.add_argument("--readme", action="store_true", help="Write the table of README.md.")
    parser.add_argument("--workers", type=int, default=1, help="Runs at a time.")
    options, extra = parser.parse_known_args(arguments)
    if options.workers < 1:
        parser.error(f"Expected --workers to be at least 1, but got {options.workers}.")
    options.extra = extra
    options.recipes = [p.resolve() for p in options.recipes] or sorted(RECIPES.rglob("*.yaml"))
    options.logs, options.results = options.logs.resolve(), options.results.resolve()
    return options


def run_missing(runs: list[Run], workers: int) -> tuple[list[str], list[str]]:
    """Run what has no outcome, and continue after failures.

    Returns:
        Recipes whose data are not here, and runs that failed.
    """
    missing = [run for run in runs if not run.is_done()]
    skipped: set[str] = set()
    failed: list[str] = []

    def start(run: Run, threads: int | None) -> int:
        if run.recipe.name in skipped:  # another seed needs the same data
            return NO_DATA
        status = run.start(threads, shows=workers == 1)
        if status == NO_DATA:
            skipped.add(run.recipe.name)
        return status

    def tell(place: int, status: int) -> None:
        if status not in (0, NO_DATA):
            failed.append(f"{missing[place].recipe.name} with seed {missing[place].seed}")

    run_all([partial(start, run) for run in missing], workers, tell)
    return sorted(skipped), failed


def stored_outcomes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the stored outcomes for the recipes' current settings."""
    found = []
    for path in sorted(options.results.glob("*-seed*.json")):
        outcome = json.loads(path.read_text())
        recipe = next(
            (
                p
                for p in {*options.recipes, *RECIPES.rglob("*.yaml")}
                if p.name == outcome["recipe"]
            ),
            None,
        )
        if recipe is not None and Run(recipe, outcome["seed"], options).is_done():
            found.append(outcome)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run missing outcomes, then print the comparison."""
    options = parse(arguments)
    runs = [Run(recipe, seed, options) for seed in options.seeds for recipe in options.recipes]
    for run in runs if options.fresh else []:
        run.forget()
    skipped, failed = run_missing(runs, options.workers)
    stored = stored_outcomes(options)
    print_comparison(options.recipes, stored)
    if options.readme:
        write_readme(RECIPES, stored)
    if skipped:
        print(f"Skipped, as their data are not here: {', '.join(skipped)}.")
    if failed:
        raise SystemExit(f"Not run, for the reasons above: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
