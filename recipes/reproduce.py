"""Run recipes with several seeds and compare them in a table.

    python -m recipes.reproduce recipes/fedrep_digits.yaml --seeds 0 1 2
    python -m recipes.reproduce --seeds 0 1 2 --readme        all recipes, into recipes/README.md

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

from lightning_pfl.cli import PFLCLI, evaluated
from lightning_pfl.metrics import LastRounds
from recipes.results_table import print_comparison, write_readme

RECIPES = Path(__file__).resolve().parent


class History(L.Callback):
    """Keep the last evaluations and the time spent, also over a stop and a resume."""

    def __init__(self) -> None:
        self.last = LastRounds(window=10)
        self.seconds = 0.0
        self.started = time.perf_counter()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store what was evaluated in a round."""
        if trainer.sanity_checking:
            return
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.last.update(trainer.current_epoch, values)
        now = time.perf_counter()
        self.seconds, self.started = self.seconds + now - self.started, now

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: a checkpoint must load with ``weights_only=True``."""
        return {"last": self.last.state_dict(), "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue a stopped run."""
        self.last.load_state_dict(state_dict["last"])
        self.seconds = state_dict["seconds"]


def fingerprint(recipe: Path) -> str:
    """What identifies a recipe's settings: a hash of its text without comments."""
    lines = [line.split(" #")[0].rstrip() for line in recipe.read_text().splitlines()]
    text = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def commit() -> str:
    """The short hash of the code that runs; ``unknown`` outside a checkout."""
    command = ["git", "-C", str(RECIPES), "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def train(recipe: Path, seed: int, logs: Path, extra: list[str]) -> dict[str, Any]:
    """Run one recipe with one seed and test every client; return what the table needs."""
    history = History()
    logger = "lightning.pytorch.loggers.TensorBoardLogger"
    arguments = [
        *("fit", "--config", str(recipe), "--seed_everything", str(seed), "--ckpt_path", "last"),
        *("--trainer.logger", logger, "--trainer.logger.save_dir", str(logs)),
        *("--trainer.logger.name", recipe.stem, "--trainer.logger.version", f"seed_{seed}"),
        *extra,
    ]
    cli = PFLCLI(arguments, extra_callbacks=[history])
    cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)
    tested = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    device = cli.trainer.strategy.root_device.type
    return {
        "recipe": recipe.name,
        "fingerprint": fingerprint(recipe),
        "seed": seed,
        "rounds": cli.trainer.current_epoch,
        "last": evaluated(history.last.mean()),
        "test": evaluated(tested),
        "seconds": round(history.seconds, 1),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "commit": commit(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {device}",
        "torch": torch.__version__,
    }


def result_path(results: Path, recipe: Path, seed: int) -> Path:
    """Where the outcome of a run is stored."""
    return results / f"{recipe.stem}-seed{seed}.json"


def is_done(results: Path, recipe: Path, seed: int) -> bool:
    """Whether this run has a stored outcome, of the recipe as it is now."""
    path = result_path(results, recipe, seed)
    return path.is_file() and json.loads(path.read_text())["fingerprint"] == fingerprint(recipe)


def run(recipe: Path, seed: int, options: argparse.Namespace) -> None:
    """Run one recipe in a process of its own, so that memory is measured and freed per run."""
    worker = [
        sys.executable,
        "-m",
        "recipes.reproduce",
        str(recipe),
        "--seeds",
        str(seed),
        "--worker",
    ]
    folders = ["--logs", str(options.logs), "--results", str(options.results)]
    subprocess.run([*worker, *folders, *options.extra], check=True, cwd=RECIPES.parent)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; what it doesn't know goes to ``lightning-pfl fit``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("recipes", nargs="*", type=Path, help="Recipe files; none: all of them.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--logs", type=Path, default=Path("logs/reproduce"))
    parser.add_argument("--results", type=Path, default=RECIPES / "results")
    parser.add_argument(
        "--fresh", action="store_true", help="Forget stored outcomes and checkpoints."
    )
    parser.add_argument("--readme", action="store_true", help="Write the table of README.md.")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options, extra = parser.parse_known_args(arguments)
    options.extra = extra
    options.recipes = options.recipes or sorted(RECIPES.rglob("*.yaml"))
    return options


def main(arguments: list[str] | None = None) -> None:
    """Run what isn't done yet, then print the comparison."""
    options = parse(arguments)
    if options.worker:
        (recipe,), (seed,) = options.recipes, options.seeds
        outcome = train(recipe, seed, options.logs, options.extra)
        path = result_path(options.results, recipe, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(outcome, indent=1) + "\n")
        return
    for seed in options.seeds:
        for recipe in options.recipes:
            if options.fresh:
                forget(recipe, seed, options)
            if not is_done(options.results, recipe, seed):
                run(recipe, seed, options)
    stored = [json.loads(path.read_text()) for path in sorted(options.results.glob("*-seed*.json"))]
    print_comparison(options.recipes, stored)
    if options.readme:
        write_readme(RECIPES, stored)


def forget(recipe: Path, seed: int, options: argparse.Namespace) -> None:
    """Remove a run's outcome, logs and checkpoints."""
    result_path(options.results, recipe, seed).unlink(missing_ok=True)
    shutil.rmtree(options.logs / recipe.stem / f"seed_{seed}", ignore_errors=True)


if __name__ == "__main__":
    main()
