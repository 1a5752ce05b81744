"""The command ``lightning-pfl completion``: what a shell suggests after a TAB."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_pfl import methods, models
from lightning_pfl.cli.catalogue import catalogue_parser, find_recipes

SHELLS = ("bash", "zsh", "tcsh")
FILES = {"--config", "--ckpt_path"}
CHOICES = {"method": methods.__all__, "model": models.__all__}
"""Options of `fit` that name a class of the package."""


Parsers = Mapping[str, Callable[[], ArgumentParser]]
"""Makers of the parsers of commands."""


def run_completion(
    words: Sequence[str], options: Mapping[str, Iterable[str]], others: Parsers
) -> None:
    """Print a script that teaches a shell the command's words.

    Args:
        words: The command line after ``lightning-pfl completion``.
        options: Subcommands of the recipes, such as ``fit``, and their options without ``--``.
        others: The commands that have a parser of their own, by name.
    """
    parser = completion_parser()
    shell = parser.parse_args(words).shell
    try:
        import shtab
    except ImportError:
        parser.exit(
            2,
            "error: Expected the package shtab, but it isn't installed. Install it: "
            "pip install 'lightning-pfl[completion]'\n",
        )
    print(shtab.complete(whole_parser(options, others), shell=shell))


def completion_parser() -> ArgumentParser:
    """Make the parser of ``lightning-pfl completion``."""
    parser = ArgumentParser(
        "lightning-pfl completion",
        allow_abbrev=False,
        description="Print a script that completes commands, options, methods and recipes: "
        'eval "$(lightning-pfl completion bash)" in a shell, or in its start-up file.',
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


def whole_parser(options: Mapping[str, Iterable[str]], others: Parsers) -> ArgumentParser:
    """Make one parser of all commands, as shtab reads it; it parses nothing.

    Jsonargparse's own scripts are no way: with the Trainer's arguments they take minutes to write.

    Args:
        options: As for :func:`run_completion`.
        others: As for :func:`run_completion`.
    """
    import shtab

    parser, commands = catalogue_parser()
    for name, make in others.items():
        commands.add_parser(name, parents=[make()], add_help=False, help=name)
    for name, keys in options.items():
        add: Any = commands.add_parser(name, help=name).add_argument
        for key in keys:
            add(f"--{key}", choices=CHOICES.get(key))
    recipes = list(find_recipes())
    for name, of_command in commands.choices.items():
        for action in _actions(of_command):
            if action.metavar == "NAME":
                action.choices = methods.__all__ if name == "methods" else recipes
            elif action.metavar == "RUN":
                action.complete = shtab.DIRECTORY
            elif action.type is Path or FILES & {*action.option_strings}:
                action.complete = shtab.FILE
    return parser


def _actions(parser: ArgumentParser) -> Iterator[Any]:
    for action in parser._actions:
        if isinstance(action.choices, dict):  # a command's own commands
            for below in action.choices.values():
                yield from _actions(below)
        else:
            yield action
