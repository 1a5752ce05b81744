"""The command line: ``lightning-pfl fit|validate|test|predict --config recipe.yaml``."""

from lightning_pfl.cli.command_line import PFLCLI, main
from lightning_pfl.cli.results import evaluated

__all__ = ["PFLCLI", "evaluated", "main"]
