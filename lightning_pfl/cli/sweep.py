"""The command ``lightning-pfl sweep``: a recipe with a grid of settings and several seeds."""

from __future__ import annotations

import hashlib
import json
import re
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from textwrap import shorten
from typing import Any

import yaml

from lightning_pfl.cli.compare import print_comparison
from lightning_pfl.cli.trial import OUTPUT, Trial, logs_to, run_all
from lightning_pfl.results.comparison import compare
from lightning_pfl.results.settings import from_config

ERROR = re.compile(r"error: |[\w.]+(?:Error|Exception): ")
"""How a line begins with which an error does: the command line's, or one of Python."""
LONGEST = 300
"""Most letters of an error that are shown."""


def sweep_parser() -> ArgumentParser:
    """Make the parser of ``lightning-pfl sweep``."""
    parser = ArgumentParser(
        "lightning-pfl sweep",
        allow_abbrev=False,
        description="Run a recipe with every combination of settings and every seed, several at a "
        "time. What has ended is skipped, what was stopped goes on from its last checkpoint. "
        "Options of `fit` are passed on; one with several values, --method.prox_weight 0.01,0.1,1, "
        "is varied. The best settings are those of the best validation value.",
    )
    add = parser.add_argument
    add("--config", action="append", required=True, type=Path, metavar="FILE", help="as for fit")
    add("--seeds", default="0", help="seeds of training: 0..2 or 0,1,2 (default: 0)")
    add("--vary_data_seed", action="store_true", help="split the data by the same seeds, too")
    add("--workers", type=int, default=1, help="runs at a time (default: 1)")
    add("--folder", type=Path, help="where the runs log (default: logs/sweep/NAME of the recipe)")
    default = "the first that is neither a loss nor an error"
    add("--metric", help=f"the validation value to choose by (default: {default})")
    add("--dry_run", action="store_true", help="print the runs and start none")
    return parser


def run_sweep(words: Sequence[str], read_runs: Callable[[Sequence[list[str]]], None]) -> None:
    """Run what is missing of a sweep, compare its runs, and print the best settings.

    Args:
        words: The command line after ``lightning-pfl sweep``.
        read_runs: Reads the command lines of runs, and ends the program at a mistake in one.
    """
    parser = sweep_parser()
    given, rest = parser.parse_known_args(words)
    try:
        options = read_options(rest)
        check_validation(given.config, options)
        folder = given.folder or Path("logs", "sweep", given.config[0].stem)
        trials = make_trials(
            given.config, options, read_seeds(given.seeds), given.vary_data_seed, folder
        )
        if given.workers < 1:
            raise ValueError(f"Expected --workers to be at least 1, but got {given.workers}.")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    missing = [trial for trial in trials if not trial.is_done]
    # They differ by seeds, too.
    read_runs([["fit", *trial.options] for trial in {t.name: t for t in missing}.values()])
    print(f"{len(trials)} runs in {folder}, {len(trials) - len(missing)} of them done")
    if given.dry_run:
        for trial in missing:
            print(f"{trial.name} seed {trial.seed}: lightning-pfl fit {' '.join(trial.options)}")
        return
    failed = run_missing(missing, given.workers)
    ended = [trial.folder for trial in trials if trial.is_done]
    if ended:
        report(ended, given.metric)
    if failed:
        raise SystemExit(f"{len(failed)} runs failed: {', '.join(failed)}")


def run_missing(trials: Sequence[Trial], workers: int) -> list[str]:
    """Run trials, and print how each ended.

    Returns:
        The output files of those that failed.
    """
    failed = []

    def tell(place: int, status: int) -> None:
        trial = trials[place]
        output = trial.folder / OUTPUT
        how = "done" if status == 0 else f"failed{_error(output)}, see {output}"
        print(f"{place + 1}/{len(trials)} {trial.name} seed {trial.seed}: {how}", flush=True)
        if status:
            failed.append(str(output))

    run_all([trial.run for trial in trials], workers, tell)
    return failed


def _error(output: Path) -> str:
    """Return the error with which a run's output ends, in brackets; nothing if there is none."""
    lines = output.read_text(errors="replace").splitlines()
    begins = [place for place, line in enumerate(lines) if ERROR.match(line)]
    text = " ".join(lines[begins[-1] :]) if begins else ""
    return f" ({shorten(text, LONGEST, placeholder=' ...')})" if text else ""


def report(folders: Sequence[Path], metric: str | None) -> None:
    """Print the comparison of some runs, and the settings that are best on validation data."""
    comparison = compare(*folders, metric=metric)
    print_comparison(comparison)
    if not comparison.groups:
        return
    best = max(comparison.groups, key=comparison.score)
    print(f"Best on validation data ({comparison.metric}): {best.label}")
    print(f"  its configuration: {best.runs[0].folder / 'config.yaml'}")


def read_options(words: Sequence[str]) -> dict[str, list[str]]:
    """Read options of ``fit``, each with its values.

    Example:
        >>> read_options(["--method.prox_weight", "0.1,1", "--method.personal=[head, body]"])
        {'method.prox_weight': ['0.1', '1'], 'method.personal': ['[head, body]']}
    """
    options: dict[str, list[str]] = {}
    words = [part for word in words for part in _halves(word)]
    for name, value in zip(words[::2], [*words[1::2], ""], strict=False):
        if not name.startswith("--") or not value or value.startswith("--"):
            raise ValueError(
                f"Expected options of `fit` with their values, but got {name!r} {value!r}. Write "
                "--name value, or --name value1,value2 to vary it."
            )
        options[name.removeprefix("--")] = split_values(value)
    return options


def _halves(word: str) -> list[str]:
    name, equals, value = word.partition("=")
    return [name, value] if equals and name.startswith("--") else [word]


def split_values(text: str) -> list[str]:
    """Split values at commas outside of brackets, braces and quotes.

    Example:
        >>> split_values("0.1,1"), split_values("[a, b],[c]"), split_values("{a: 1, b: 2}")
        (['0.1', '1'], ['[a, b]', '[c]'], ['{a: 1, b: 2}'])
    """
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += (letter in "[{") - (letter in "]}") if not quote else 0
        if letter == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values]


def read_seeds(text: str) -> list[int]:
    """Read seeds: ``0..2`` or ``0,1,2``.

    Example:
        >>> read_seeds("0..2"), read_seeds("3,5")
        ([0, 1, 2], [3, 5])
    """
    try:
        if ".." in text:
            first, last = map(int, text.split(".."))
            seeds = list(range(first, last + 1))
        else:
            seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0:
        raise ValueError(f"Expected --seeds to be like 0..2 or 0,1,2, but got {text!r}.")
    return seeds


def check_validation(configs: Sequence[Path], options: dict[str, list[str]]) -> None:
    """Refuse recipes that validate on the test data, by which nothing may be chosen.

    Raises:
        ValueError: If the recipe, or an option, has ``val_split: test``.
    """
    splits: list[Any] = ["train"]
    for path in configs:
        found = from_config(yaml.safe_load(path.read_text()) or {}).values
        splits = [found["data.val_split"]] if "data.val_split" in found else splits
    splits = options.get("data.val_split", options.get("data.init_args.val_split", splits))
    if "test" in splits:
        raise ValueError(
            "Expected validation data of their own to choose settings by, but the recipe has "
            "data.val_split='test'. Add --data.val_split train --data.val_fraction 0.2."
        )


def make_trials(
    configs: Sequence[Path],
    options: dict[str, list[str]],
    seeds: Sequence[int],
    vary_data_seed: bool,
    folder: Path,
) -> list[Trial]:
    """Make a trial for each combination of values and each seed.

    Args:
        configs: The recipe's files.
        options: Options of ``fit`` and their values.
        seeds: Seeds of training.
        vary_data_seed: Whether ``data.seed`` is the same seed.
        folder: Where they log: ``<folder>/<values>-<digest>/seed<seed>``.
    """
    texts = [path.read_text() for path in configs]
    varied = [name for name, values in options.items() if len(values) > 1]
    trials = []
    for values in product(*options.values()):
        point = dict(zip(options, values, strict=True))
        name = " ".join(f"{key.rpartition('.')[2]}={point[key]}" for key in varied) or "recipe"
        passed = [word for key, value in point.items() for word in (f"--{key}", value)]
        # Changed settings are other runs.
        digest = hashlib.sha256(json.dumps([texts, passed]).encode()).hexdigest()[:6]
        called = "".join(c if c.isalnum() or c in "=._-" else "-" for c in name)[:60]
        for seed in seeds:
            where = folder / f"{called}-{digest}" / f"seed{seed}"
            own = {
                "trainer.enable_progress_bar": "false",
                "seed_everything": str(seed),
                **({"data.seed": str(seed)} if vary_data_seed else {}),
            }
            words = [word for path in configs for word in ("--config", str(path))]
            words += [*passed, *logs_to(where)]
            words += [word for key, value in own.items() for word in (f"--{key}", value)]
            trials.append(Trial(name, seed, tuple(words), where))
    return trials
