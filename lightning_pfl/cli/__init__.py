"""The command line: ``lightning-pfl fit|validate|test|predict --config recipe.yaml``."""

from lightning_pfl.cli.command_line import PFLCLI, find_modules_here, main
from lightning_pfl.cli.results import summary_rows

__all__ = ["PFLCLI", "find_modules_here", "main", "summary_rows"]
