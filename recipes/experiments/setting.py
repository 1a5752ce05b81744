"""The command line that experiments share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from recipes.outcome import RECIPES
from recipes.plan import README

OPTIONS: dict[str, dict[str, Any]] = {
    "stored": {"action": "store_true", "help": "Run nothing, show what is stored."},
    "results": {"type": Path, "default": RECIPES / "results"},
    "logs": {"type": Path, "default": Path("logs/reproduce")},
    "figures": {"type": Path, "default": RECIPES / "figures"},
    "readme": {"type": Path, "default": README, "help": "Where the section is written."},
    "data-dir": {"type": Path, "help": "Folder of Fashion-MNIST, if not the usual."},
}
"""Options that several experiments have."""

SMALL = Path("logs/small")


class Small(argparse.Action):
    """``--small``: also leaves alone what git tracks.

    Unless they are given, the folders of results and figures become those of ``logs/small``, and
    README files aren't written.
    """

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any
    ) -> None:
        """Found on the command line."""
        namespace.small = True
        places = {"results": SMALL / "results", "figures": SMALL / "figures"}
        for name, place in {**places, "readme": None, "choosing": None}.items():
            if getattr(namespace, name, None) == parser.get_default(name):
                setattr(namespace, name, place)


def parser(
    description: str, small: str, *options: str, seeds: list[int] | None = None
) -> argparse.ArgumentParser:
    """The command line of an experiment, which may add options of its own.

    Args:
        description: What the experiment is.
        small: What ``--small`` leaves of it.
        options: Names in :data:`OPTIONS`.
        seeds: The seeds of the whole experiment; None for no ``--seeds``.
    """
    made = argparse.ArgumentParser(description=description)
    if seeds is not None:
        made.add_argument("--seeds", nargs="+", type=int, default=seeds)
    made.add_argument(
        "--small", action=Small, nargs=0, default=False, help=f"{small} Goes to {SMALL}."
    )
    for name in options:
        made.add_argument(f"--{name}", **OPTIONS[name])
    return made
