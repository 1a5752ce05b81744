"""Run recipes with several seeds and compare them in a table.

    python -m recipes.reproduce recipes/fedrep_digits.yaml --seeds 0 1 2
    python -m recipes.reproduce --seeds 0 1 2 --readme           all recipes, into recipes/README.md
    python -m recipes.reproduce --trainer.max_epochs=20          settings, written with "="

A run that is done is skipped, as long as its recipe is the same; a run that was stopped resumes
from its last checkpoint.
"""

import argparse
import hashlib
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, Timer

from lightning_pfl.cli.command_line import PFLCLI
from lightning_pfl.cli.results import summary_rows
from recipes.results_table import print_comparison, write_readme

RECIPES = Path(__file__).resolve().parent
#: Exit status of a run whose data are nowhere (EX_UNAVAILABLE of sysexits.h).
NO_DATA = 69


class ProcessTimer(Callback):
    """Processor time of all rounds with their evaluations, independent of other programs."""

    def __init__(self) -> None:
        self.seconds = self._before = self._begin = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Continue the count of a resumed run."""
        self._before, self._begin = self.seconds, time.process_time()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the time after each round, without fine-tuning after the last."""
        self.seconds = self._before + time.process_time() - self._begin

    def state_dict(self) -> dict[str, Any]:
        """Return the time so far."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the time of the run that this one continues."""
        self.seconds = state_dict["seconds"]


class Run:
    """One recipe with one seed.

    Args:
        recipe: The recipe's file.
        seed: The seed in place of the recipe's own.
        options: The command line: folders, and further settings in ``extra``.
    """

    def __init__(self, recipe: Path, seed: int, options: argparse.Namespace) -> None:
        self.recipe, self.seed, self.options = recipe, seed, options
        # What identifies the settings: the recipe's text without comments, and what was added.
        lines = [line.split(" #")[0].rstrip() for line in recipe.read_text().splitlines()]
        text = "\n".join([*(line for line in lines if not line.startswith("#")), *options.extra])
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:8]
        self.version = f"seed{seed}-{self.fingerprint}"
        self.outcome: Path = options.results / f"{recipe.stem}-seed{seed}.json"

    def is_done(self) -> bool:
        """Whether there is a stored outcome for the current settings."""
        if not self.outcome.is_file():
            return False
        return bool(json.loads(self.outcome.read_text())["fingerprint"] == self.fingerprint)

    def forget(self) -> None:
        """Remove outcome, logs and checkpoints."""
        self.outcome.unlink(missing_ok=True)
        shutil.rmtree(self.options.logs / self.recipe.stem / self.version, ignore_errors=True)

    def was_begun(self) -> bool:
        """Whether an interrupted run has left a checkpoint."""
        folder = self.options.logs / self.recipe.stem / self.version / "checkpoints"
        return any(folder.glob("last*.ckpt"))

    def start(self) -> None:
        """Run in a new process, which measures its memory and frees it."""
        options = self.options
        subprocess.run(
            [
                *(sys.executable, "-m", "recipes.reproduce", str(self.recipe), "--worker"),
                *("--seeds", str(self.seed)),
                *("--logs", str(options.logs), "--results", str(options.results)),
                *options.extra,
            ],
            check=True,
            cwd=RECIPES.parent,
        )

    def work(self) -> None:
        """Train, test every client, and store the values of the table."""
        timer, processor = Timer(), ProcessTimer()  # count on when a run resumes
        resumed = self.was_begun()
        cli = PFLCLI(self.arguments(), extra_callbacks=[timer, processor])
        fitted = summary_rows(cli.trainer.callback_metrics)
        if resumed and not any(name.startswith("last10/") for name in fitted):
            # Stopped between its last round and its outcome: no round is left that would evaluate.
            self.forget()
            self.work()
            return
        rounds = cli.trainer.current_epoch
        cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)
        device = cli.trainer.strategy.root_device.type
        outcome = {
            "recipe": self.recipe.name,
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "rounds": rounds,
            "last10": {k.split("/", 1)[1]: v for k, v in fitted.items() if k.startswith("last10/")},
            "test": summary_rows(cli.trainer.callback_metrics),
            "seconds": round(timer.time_elapsed("train"), 1),
            "cpu_seconds": round(processor.seconds, 1),
            "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "commit": commit(),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, {device}",
            "torch": torch.__version__,
        }
        self.outcome.parent.mkdir(parents=True, exist_ok=True)
        self.outcome.write_text(json.dumps(outcome, indent=1) + "\n")

    def arguments(self) -> list[str]:
        """Return the command line of ``lightning-pfl``."""
        return [
            *("fit", "--config", str(self.recipe), "--seed_everything", str(self.seed)),
            *("--trainer.logger", "lightning.pytorch.loggers.TensorBoardLogger"),
            *("--trainer.logger.save_dir", str(self.options.logs)),
            *("--trainer.logger.name", self.recipe.stem),
            *("--trainer.logger.version", self.version),
            *self.options.extra,
            *(("--ckpt_path", "last") if self.was_begun() else ()),
        ]


def commit() -> str:
    """Return the short hash of the running code; ``unknown`` outside a checkout."""
    command = ["git", "-C", str(RECIPES), "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line; unknown settings go to ``lightning-pfl fit``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("recipes", nargs="*", type=Path, help="Recipe files; none: all of them.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--logs", type=Path, default=Path("logs/reproduce"))
    parser.add_argument("--results", type=Path, default=RECIPES / "results")
    parser.add_argument("--fresh", action="store_true", help="Forget outcomes and checkpoints.")
    parser.add_argument("--readme", action="store_true", help="Write the table of README.md.")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options, extra = parser.parse_known_args(arguments)
    options.extra = extra
    options.recipes = [p.resolve() for p in options.recipes] or sorted(RECIPES.rglob("*.yaml"))
    options.logs, options.results = options.logs.resolve(), options.results.resolve()
    return options


def work(run: Run) -> None:
    """Run in this process; exit with :data:`NO_DATA` if the source finds no data."""
    try:
        run.work()
    except FileNotFoundError as error:
        print(f"{run.recipe.name} is skipped. {error}", file=sys.stderr)
        raise SystemExit(NO_DATA) from None


def run_all(runs: list[Run], fresh: bool) -> tuple[list[str], list[str]]:
    """Run missing outcomes, and continue after failures.

    Returns:
        Recipes whose data are not here, and runs that failed.
    """
    skipped: list[str] = []
    failed: list[str] = []
    for run in runs:
        if fresh:
            run.forget()
        if run.recipe.name in skipped or run.is_done():
            continue
        try:
            run.start()
        except subprocess.CalledProcessError as error:
            if error.returncode == NO_DATA:
                skipped.append(run.recipe.name)
            else:
                failed.append(f"{run.recipe.name} with seed {run.seed}")
    return skipped, failed


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
    if options.worker:
        work(runs[0])
        return
    skipped, failed = run_all(runs, options.fresh)
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
