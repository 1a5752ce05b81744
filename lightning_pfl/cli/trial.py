"""Runs in processes of their own: done ones are skipped, stopped ones go on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

RECORD = "sweep.json"
"""What a run was started with, and its exit status."""
OUTPUT = "output.txt"


@dataclass(frozen=True)
class Trial:
    """One run of a recipe.

    Attributes:
        name: What it is called, such as the settings in which runs differ: ``prox_weight=0.1``.
        seed: The seed of training and, where partitions vary, of the partition.
        options: Options of ``lightning-pfl fit``, with those of :func:`logs_to`.
        folder: The run's folder.
        program: The module that runs, and its command; it takes the options.
        cwd: Where it runs; None: here.
    """

    name: str
    seed: int
    options: tuple[str, ...]
    folder: Path
    program: tuple[str, ...] = ("lightning_pfl", "fit")
    cwd: Path | None = None

    @property
    def is_done(self) -> bool:
        """Whether a run with the same settings has ended well."""
        record = self._record()
        return record is not None and record["status"] == 0

    def forget(self) -> None:
        """Remove its logs and checkpoints."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, threads: int | None = None, shows: bool = False) -> int:
        """Run it in a process of its own, from its last checkpoint if it was stopped.

        Args:
            threads: Threads of torch, unless the environment says how many; None: as many as it
                takes.
            shows: Whether its output is shown; otherwise it is written to :data:`OUTPUT`.

        Returns:
            The exit status.
        """
        checkpoints = self.folder / "checkpoints"
        resumes = self._record() is not None and any(checkpoints.glob("last*.ckpt"))
        if not resumes:
            self.forget()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._note(None)
        own = {} if threads is None else {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        with (self.folder / OUTPUT).open("a") as output:
            status = subprocess.run(
                [
                    *(sys.executable, "-m", *self.program, *self.options),
                    *(("--ckpt_path", "last") if resumes else ()),
                ],
                stdout=None if shows else output,
                stderr=None if shows else subprocess.STDOUT,
                env={**{name: str(value) for name, value in own.items()}, **os.environ},
                cwd=self.cwd,
                check=False,
            ).returncode
        self._note(status)
        return status

    def _record(self) -> dict[str, int | None] | None:
        """Read what is known of a run with the same options."""
        path = self.folder / RECORD
        record = json.loads(path.read_text()) if path.is_file() else {}
        return record if record.get("options") == list(self.options) else None

    def _note(self, status: int | None) -> None:
        record = {"options": list(self.options), "status": status}
        (self.folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def logs_to(folder: Path) -> tuple[str, ...]:
    """Return the options by which a run logs to a folder, and to the same one when it goes on."""
    options = {
        "logger": "lightning.pytorch.loggers.TensorBoardLogger",
        "logger.save_dir": folder.parent.parent,
        "logger.name": folder.parent.name,
        "logger.version": folder.name,
    }
    return tuple(str(word) for name in options for word in (f"--trainer.{name}", options[name]))


def run_all(
    runs: Sequence[Callable[[int | None], int]], workers: int, tell: Callable[[int, int], None]
) -> None:
    """Run some at a time, in order, and go on after failures.

    Args:
        runs: Take a number of threads, or None, and return an exit status.
        workers: Runs at a time, >= 1, which share the processor's cores.
        tell: Takes a run's place and its status.
    """
    threads = max(1, (os.cpu_count() or 1) // workers) if workers > 1 else None
    with ThreadPoolExecutor(workers) as pool:
        try:
            for place, status in enumerate(pool.map(lambda run: run(threads), runs)):
                tell(place, status)
        except (KeyboardInterrupt, BrokenPipeError):
            pool.shutdown(cancel_futures=True)
            raise
