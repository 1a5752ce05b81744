"""A recipe's run and its outcome: what ``recipes.reproduce`` starts in a process of its own.

python -m recipes.outcome --config RECIPE ...      options of ``lightning-pfl fit``
"""

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

RECIPES = Path(__file__).resolve().parent
#: Exit status of a run whose data are nowhere (EX_UNAVAILABLE of sysexits.h).
NO_DATA = 69
#: The file in the folder of the run.
OUTCOME = "outcome.json"


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


def run(options: list[str]) -> None:
    """Train, test every client, and store the values of the tables.

    Args:
        options: Those of ``lightning-pfl fit``; ``--ckpt_path last``, of a run that was stopped, is
            the last one.
    """
    timer, processor = Timer(), ProcessTimer()  # count on when a run resumes
    cli = PFLCLI(["fit", *options], extra_callbacks=[timer, processor])
    fitted = summary_rows(cli.trainer.callback_metrics)
    folder = Path(str(cli.trainer.log_dir))
    resumed = options[-2:] == ["--ckpt_path", "last"]
    if resumed and not any(name.startswith("last10/") for name in fitted):
        # Stopped between its last round and its outcome: no round is left that would evaluate.
        shutil.rmtree(folder)
        run(options[:-2])
        return
    rounds = cli.trainer.current_epoch
    cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)
    device = cli.trainer.strategy.root_device.type
    outcome = {
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
    (folder / OUTCOME).write_text(json.dumps(outcome, indent=1) + "\n")


def commit() -> str:
    """Return the short hash of the running code; ``unknown`` outside a checkout."""
    command = ["git", "-C", str(RECIPES), "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def main(options: list[str]) -> None:
    """Run; exit with :data:`NO_DATA` if the source finds no data."""
    try:
        run(options)
    except FileNotFoundError as error:
        recipe = Path(options[options.index("--config") + 1]).name
        print(f"{recipe} is skipped. {error}", file=sys.stderr)
        raise SystemExit(NO_DATA) from None


if __name__ == "__main__":
    main(sys.argv[1:])
