"""The command line: ``lightning-pfl`` and ``python -m lightning_pfl``."""

from __future__ import annotations

import sys

from lightning_pfl import cli
from lightning_pfl.deploy import commands


def main() -> None:
    """Run a recipe, or a part of a deployment (``deploy``)."""
    if sys.argv[1:2] == ["deploy"]:
        cli.find_modules_here()
        commands.main(sys.argv[2:])
    else:
        cli.main()


if __name__ == "__main__":
    main()
