"""The command line: ``lightning-pfl fit|validate|test|predict --config recipe.yaml``.

A recipe names classes and their arguments, as in Python.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_pfl import __version__
from lightning_pfl.cli.adapt import adapt_parser, run_adapt
from lightning_pfl.cli.catalogue import COMMANDS, run_catalogue
from lightning_pfl.cli.compare import compare_parser, run_compare
from lightning_pfl.cli.completion import completion_parser, run_completion
from lightning_pfl.cli.parser import Parser, in_a_line, nearest
from lightning_pfl.cli.partition import partition_parser, run_partition
from lightning_pfl.cli.results import print_results
from lightning_pfl.cli.sweep import run_sweep, sweep_parser
from lightning_pfl.federation.log_folder import log_folder
from lightning_pfl.methods.base import Method

OTHER_COMMANDS = (
    "Also: `methods list`, `methods show NAME`, `recipes list|show NAME|copy NAME [TO]`, "
    "`compare RUN...`, `sweep --config RECIPE`, `partition --config RECIPE`, "
    "`adapt --ckpt FILE --data FILE`, `completion bash|zsh|tcsh`."
)


class PFLCLI(LightningCLI):
    """LightningCLI with a ``method:`` key and the federated strategy as default.

    The method is a callback with its own key, since ``trainer.callbacks`` of a second ``--config``
    replaces those of the first.

    Args:
        args: Command line arguments, a nested dict of settings, or None for ``sys.argv``.
        extra_callbacks: Callbacks of the calling program, added to those of the configuration.
        **kwargs: As for LightningCLI; they override the defaults set here.
    """

    def __init__(
        self, args: ArgsType = None, extra_callbacks: Sequence[Callback] = (), **kwargs: Any
    ) -> None:
        defaults: dict[str, Any] = {
            "trainer_defaults": {
                "strategy": {"class_path": "lightning_pfl.FederatedStrategy"},
                "callbacks": list(extra_callbacks),
            },
            # Runs are repeatable without a seed in the recipe.
            "seed_everything_default": 0,
            # A resumed run writes into the folder of the run that it continues.
            "save_config_kwargs": {"overwrite": True},
            "parser_class": Parser,
        }
        super().__init__(args=args, **{**defaults, **kwargs})

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Make a parser without abbreviations, so that ``--trainer.max_epoch`` is a misspelling."""
        return super().init_parser(**{"allow_abbrev": False, **kwargs})

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Add ``--version`` and the other commands to the help of the first level."""
        first = {"version": __version__, "epilog": OTHER_COMMANDS, **main_kwargs}
        super().setup_parser(add_subcommands, first, subparser_kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the ``method`` key, which joins the callbacks."""
        parser.add_lightning_class_args(Method, "method", subclass_mode=True)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse ``args``, without Lightning's warning about a nonempty ``sys.argv``.

        Programs that start runs have their own command lines.
        """
        if args is None or isinstance(args, list):
            self.config = parser.parse_args(with_data_class(sys.argv[1:] if args is None else args))
        else:
            self.config = parser.parse_object(args)

    def _parse_ckpt_path(self) -> None:
        """Keep the recipe's model instead of the checkpoint's hyper-parameters.

        LightningCLI would read these into ``model`` without their class. The strategy compares
        checkpoint and model.
        """

    def instantiate_classes(self) -> None:
        """Make the objects; a refused setting ends the program with a line of explanation.

        With ``JSONARGPARSE_DEBUG=true`` it is the complete traceback.
        """
        try:
            super().instantiate_classes()
        except (MisconfigurationException, ValueError, TypeError) as error:
            line = in_a_line(error)
            if line is None:
                raise
            self.parser.error(line, error)

    def before_validate(self) -> None:
        """Warn if no checkpoint is loaded."""
        self._warn_if_untrained()

    def before_test(self) -> None:
        """Warn if no checkpoint is loaded."""
        self._warn_if_untrained()

    def before_predict(self) -> None:
        """Warn if no checkpoint is loaded."""
        self._warn_if_untrained()

    def _warn_if_untrained(self) -> None:
        if self._get(self.config, "ckpt_path") is None:
            rank_zero_warn(
                f"`{self.subcommand}` got no checkpoint, so all clients have the untrained model "
                "of the recipe. Pass --ckpt_path PATH.ckpt for the models of a run."
            )

    def after_fit(self) -> None:
        """Print the last evaluation, the mean of the last ten rounds, the best round, and more."""
        print_results(self.trainer.callback_metrics)
        folder = log_folder(self.trainer)
        if folder is None:
            return
        if isinstance(self.trainer.logger, TensorBoardLogger):
            print(f"Curves and pictures: tensorboard --logdir {self.trainer.logger.root_dir}")
        if (folder / "clients_val.csv").is_file():
            print(f"Client by client:    lightning-pfl compare {folder} --html compare.html")

    def after_validate(self) -> None:
        """Print the statistics over clients as one table, below Lightning's list."""
        print_results(self.trainer.callback_metrics, title="After the validation")

    def after_test(self) -> None:
        """Print the statistics over clients as one table, below Lightning's list."""
        print_results(self.trainer.callback_metrics, title="After the test")

    def after_predict(self) -> None:
        """Write all clients' results of ``predict_step`` to ``predictions.pt`` in the log folder.

        It is a dict from client name to a list of outputs, one per batch, in the order of the data.
        """
        loop: Any = self.trainer.predict_loop
        if not self.trainer.is_global_zero or not loop.predictions:
            return
        folder = log_folder(self.trainer) or Path(self.trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        outputs = dict(zip(loop.load().names, loop.predictions, strict=True))
        torch.save(outputs, folder / "predictions.pt")
        print(f"Predictions of {len(outputs)} clients: {folder / 'predictions.pt'}")


def with_data_class(words: list[str]) -> list[str]:
    """Name the usual data module before ``--data.source.help X``, which needs one.

    Example:
        >>> with_data_class(["fit", "--data.source.help", "Digits"])
        ['fit', '--data', 'FederatedDataModule', '--data.source.help', 'Digits']
    """
    for place, word in enumerate(words):
        if word.partition("=")[0] == "--data":
            break
        if re.match(r"--data\.[\w.]+\.help\b", word):
            return [*words[:place], "--data", "FederatedDataModule", *words[place:]]
    return words


class Completion(PFLCLI):
    """Print a shell's script of completion, which needs all options, in place of a run.

    Args:
        args: The command line after ``lightning-pfl completion``.
    """

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Print the script and end the program."""
        options = {
            name: own.get_defaults().keys() for name, own in self._subcommand_parsers.items()
        }
        others = {name: parser for name, (_, parser) in OTHER.items()}
        run_completion(cast("list[str]", args), options, others)
        sys.exit()


class Reading(PFLCLI):
    """Read command lines of runs in place of a run; a mistake in one ends the program as there.

    Args:
        args: What comes after ``lightning-pfl``, of each.
    """

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Read all, and end as a run does that has nothing to do."""
        for words in cast("Sequence[list[str]]", args):
            parser.parse_args(with_data_class(words))
        sys.exit()


def read_runs(lines: Sequence[list[str]]) -> None:
    """Read command lines of runs, and end the program at a mistake in one."""
    try:
        Reading(cast(Any, lines))
    except SystemExit as end:
        if end.code:
            raise


OTHER: dict[str, tuple[Callable[[list[str]], object], Callable[[], ArgumentParser]]] = {
    "compare": (run_compare, compare_parser),
    "sweep": (partial(run_sweep, read_runs=read_runs), sweep_parser),
    "partition": (run_partition, partition_parser),
    "adapt": (run_adapt, adapt_parser),
    "completion": (Completion, completion_parser),
}
"""Commands with a parser of their own: what runs them, and what makes the parser."""


def main(args: ArgsType = None) -> None:
    """Run a recipe."""
    find_modules_here()
    words = sys.argv[1:] if args is None else args
    if isinstance(words, list) and words and words[0] in COMMANDS:
        run_catalogue(words)
        return
    if isinstance(words, list) and words and words[0] in OTHER:
        run, _ = OTHER[words[0]]
        run(words[1:])
        return
    if isinstance(words, list) and words and not words[0].startswith("-"):
        check_command(words[0])
    try:
        PFLCLI(args)
    except (FileNotFoundError, MisconfigurationException) as error:
        # Of a source whose data are neither here nor to be had from the network, or of settings
        # that don't go together, such as another strategy.
        if in_a_line(error) is None or "JSONARGPARSE_DEBUG" in os.environ:
            raise
        sys.exit(f"error: {error}")


def check_command(word: str) -> None:
    """End the program unless ``word`` is a command; parsers know those of recipes alone.

    Example:
        >>> check_command("compere")
        Traceback (most recent call last):
        SystemExit: error: Expected a command, but got 'compere'. Did you mean 'compare'?
    """
    known = [*PFLCLI.subcommands(), *COMMANDS, *OTHER, "deploy"]
    if word not in known:
        near = nearest(word, known)
        advice = f"Did you mean {near!r}?" if near else f"Choose one of {', '.join(known)}."
        sys.exit(f"error: Expected a command, but got {word!r}. {advice}")


def find_modules_here() -> None:
    """Find modules in the working directory, as ``python -m lightning_pfl`` does.

    Recipes name classes of one's own by ``module.Class``.
    """
    here = str(Path.cwd())
    # Python itself has `safe_path` (`python -P`) since 3.11.
    if not getattr(sys.flags, "safe_path", False) and here not in sys.path:
        sys.path.insert(0, here)


if __name__ == "__main__":
    main()
