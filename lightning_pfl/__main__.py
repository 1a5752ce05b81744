"""The command line: ``lightning-pfl`` and ``python -m lightning_pfl``."""

from __future__ import annotations

import os
import sys

from lightning_pfl import cli
from lightning_pfl.deploy import commands


def main() -> None:
    """Run a command; where ``| head`` reads no further, end without a traceback."""
    try:
        _run()
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered goes nowhere when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _run() -> None:
    """Run a recipe, or a part of a deployment (``deploy``)."""
    if sys.argv[1:2] == ["deploy"]:
        cli.find_modules_here()
        commands.main(sys.argv[2:])
    else:
        cli.main()


if __name__ == "__main__":
    main()
